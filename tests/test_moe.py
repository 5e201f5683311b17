"""Mixture of experts against a float64 NumPy loop: choice, weights, latent and shared experts, loads, balance."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import layer_cases
import numpy as np
import pytest
import reference_layers as oracle
import tolerances
from flax import nnx

from kda_jax.layers import MixtureOfExperts, MoEConfig, SiTU, balanced_bias
from kda_jax.layers.mlp import swiglu
from kda_jax.models import HybridConfig

WIDTH = layer_cases.WIDTH
BASE = MoEConfig(num_experts=6, top_k=2, expert_width=5, shared_experts=1, scaling=2.4)
CASES = {
    "kimi_linear": (BASE, swiglu),
    "kimi_k3": (dataclasses.replace(BASE, latent_dim=7, shared_experts=2), SiTU(0.5, 0.8)),
    "groups": (dataclasses.replace(BASE, num_groups=3, top_groups=2, shared_experts=0), swiglu),
    "plain": (dataclasses.replace(BASE, renormalize=False, top_k=3, shared_experts=0), swiglu),
    "one": (dataclasses.replace(BASE, num_experts=1, top_k=1, renormalize=False), swiglu),
}
IDS = layer_cases.SEGMENT_IDS[:, :9]


def build(name, rng):
    config, activation = CASES[name]
    layer = nnx.eval_shape(lambda: MixtureOfExperts(WIDTH, config, activation=activation, rngs=nnx.Rngs(0)))
    return layer_cases.randomize(layer, rng)


def naive(name, params, x):
    config, activation = CASES[name]
    if isinstance(activation, SiTU):
        activation = functools.partial(oracle.situ, beta=activation.beta, linear_beta=activation.linear_beta)
    else:
        activation = lambda gate, up: oracle.silu(gate) * up  # noqa: E731
    options = {"top_k": config.top_k, "groups": config.num_groups, "top_groups": config.top_groups}
    options |= {"renormalize": config.renormalize, "scaling": config.scaling, "activation": activation}
    rows = x.reshape(-1, WIDTH).astype(np.float64)
    return oracle.mixture_of_experts(params, rows, **options).reshape(x.shape)


@nnx.jit
def value_and_gradients(layer, x, segment_ids, cotangent):
    def loss(layer, x):
        y, load = layer(x, segment_ids=segment_ids)
        return jnp.sum(y * cotangent), (y, load)

    return nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, rng):
    """Gradients are finite differences of the loop along random directions; the choice has none."""
    layer = build(name, rng)
    params = layer_cases.parameters(layer)
    x = rng.normal(size=(2, 7, WIDTH)).astype(np.float32)
    cotangent = rng.normal(size=x.shape)
    (dparams, dx), (y, load) = value_and_gradients(layer, x, None, cotangent.astype(np.float32))
    tolerances.assert_close(y, naive(name, params, x), tolerances.FORWARD["float32"])
    assert load.sum() == 14 * CASES[name][0].top_k
    assert list(dparams["router"]) == ["kernel"]

    gradients = {"x": dx, "params": nnx.to_pure_dict(dparams)}
    point = {"x": x.astype(np.float64), "params": params}
    for target, gradient in jax.tree.leaves_with_path(gradients):
        direction = rng.normal(size=gradient.shape)

        def loss(step, target=target, direction=direction):
            move = lambda path, leaf: leaf + step * direction if path == target else leaf  # noqa: E731
            moved = jax.tree_util.tree_map_with_path(move, point)
            return np.sum(naive(name, moved["params"], moved["x"]) * cotangent)

        want = (loss(1e-6) - loss(-1e-6)) / 2e-6
        got = np.sum(np.asarray(gradient, np.float64) * direction)
        assert abs(got - want) <= 1e-4 * (np.linalg.norm(gradient) + 1e-3), jax.tree_util.keystr(target)


def test_bias_changes_the_choice_alone(rng):
    """With a bias that forces two experts, the weights are still those of the plain scores."""
    layer = build("kimi_linear", rng)
    layer.router.bias[...] = jnp.array([0, 9.0, 0, 0, 9.0, 0])
    x = rng.normal(size=(1, 5, WIDTH)).astype(np.float32)
    experts, weights = layer.router(x[0])
    assert {frozenset(row) for row in experts.tolist()} == {frozenset((1, 4))}
    scores = 1 / (1 + np.exp(-x[0] @ layer_cases.parameters(layer)["router"]["kernel"]))
    want = 2.4 * scores / scores[:, [1, 4]].sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, np.take_along_axis(want, np.asarray(experts), -1), rtol=1e-5)


def test_no_token_is_dropped(rng):
    """All tokens choose the same experts, and each gets its own output."""
    layer = build("kimi_linear", rng)
    layer.router.bias[...] = jnp.array([0, 9.0, 0, 0, 9.0, 0])
    x = rng.normal(size=(2, 40, WIDTH)).astype(np.float32)
    y, load = nnx.jit(lambda layer, x: layer(x))(layer, x)
    np.testing.assert_array_equal(load, [0, 80, 0, 0, 80, 0])
    tolerances.assert_close(y, naive("kimi_linear", layer_cases.parameters(layer), x), tolerances.FORWARD["float32"])


def test_forward_mode(rng):
    """<c, J t> = <J^T c, t>, in the direction t of the tokens."""
    layer = build("kimi_k3", rng)
    x, tangent, cotangent = rng.normal(size=(3, *IDS.shape, WIDTH)).astype(np.float32)
    _, forward = jax.jit(lambda x, t: jax.jvp(lambda x: layer(x)[0], (x,), (t,)))(x, tangent)
    (_, backward), _ = value_and_gradients(layer, x, None, cotangent)
    assert float(jnp.sum(forward * cotangent)) == pytest.approx(float(jnp.sum(backward * tangent)), rel=1e-4)


def test_padding_reaches_nothing(rng):
    """Neither a load, nor another token's output, nor a gradient, whatever stands in it."""
    layer = build("kimi_k3", rng)
    x = rng.normal(size=(*IDS.shape, WIDTH)).astype(np.float32)
    spoilt = np.where(IDS[..., None] == 0, np.nan, x)
    cotangent = np.where(IDS[..., None] == 0, 0, rng.normal(size=x.shape)).astype(np.float32)
    gradients, (y, load) = value_and_gradients(layer, x, IDS, cotangent)
    gradients_spoilt, (y_spoilt, load_spoilt) = value_and_gradients(layer, spoilt, IDS, cotangent)
    valid = IDS != 0
    np.testing.assert_array_equal(y[valid], y_spoilt[valid])
    jax.tree.map(np.testing.assert_array_equal, gradients, gradients_spoilt)
    np.testing.assert_array_equal(load, load_spoilt)
    experts, _ = layer.router(x[valid])
    np.testing.assert_array_equal(load, np.bincount(np.asarray(experts).reshape(-1), minlength=6))


def test_rows_are_independent(rng):
    layer = build("kimi_linear", rng)
    x = rng.normal(size=(2, 5, WIDTH)).astype(np.float32)
    spoilt = x.copy()
    spoilt[1] = np.nan
    call = nnx.jit(lambda layer, x: layer(x)[0])
    np.testing.assert_array_equal(call(layer, x)[0], call(layer, spoilt)[0])


def test_bfloat16(rng):
    """Weights and computation in bfloat16, the router in float32: the choice is that of the float32 layer."""
    wide = build("kimi_linear", rng)
    wide = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), wide)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)
    x = jnp.asarray(rng.normal(size=(2, 7, WIDTH)), jnp.bfloat16)
    y, load = half(x)
    want, want_load = wide(x.astype(jnp.float32))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(load, want_load)
    tolerances.assert_close(y, want, 2e-2)


def test_balance(rng):
    """A step of `rate` against the deviation from the mean; repeated, the loads even out."""
    got = balanced_bias(jnp.zeros(3), jnp.array([5, 1, 3]), 0.1)
    np.testing.assert_allclose(got, [-0.1, 0.1, 0.0])

    layer = build("kimi_linear", rng)
    layer.router.bias[...] = jnp.array([1.0, 0.5, 0, 0, 0, -0.5])
    x = jnp.asarray(rng.normal(size=(4, 64, WIDTH)), jnp.float32)
    graphdef, state = nnx.split(layer)

    @jax.jit
    def run(state):
        def step(state, _):
            layer = nnx.merge(graphdef, state)
            _, load = layer(x)
            layer.router.bias[...] = balanced_bias(layer.router.bias[...], load, 0.02)
            return nnx.state(layer), load

        return jax.lax.scan(step, state, length=100)[1]

    loads = np.asarray(run(state))
    assert np.ptp(loads[0]) > 150
    assert np.ptp(loads[-1]) < 30


def test_vmap_over_layers(rng):
    """Several seeds in one program, with gradients: each its own loads."""
    layers = [build("kimi_linear", rng) for _ in range(2)]
    graphdef = nnx.graphdef(layers[0])
    x = jnp.asarray(rng.normal(size=(2, 7, WIDTH)), jnp.float32)

    def loss(state):
        y, load = nnx.merge(graphdef, state)(x)
        return jnp.sum(jnp.sin(y)), load

    grad = jax.grad(loss, has_aux=True)
    together = jax.jit(jax.vmap(grad))(jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(nnx.state, layers)))
    for i, layer in enumerate(layers):
        close = lambda a, b, i=i: tolerances.assert_close(a[i], b, tolerances.GRADIENT["float32"])  # noqa: E731
        jax.tree.map(close, together, grad(nnx.state(layer)))


def test_shard_map(rng):
    """Over the batch, with check_vma on: outputs and the sum of the shards' gradients."""
    graphdef, params = nnx.split(build("kimi_linear", rng))
    x = jnp.asarray(rng.normal(size=(2, 7, WIDTH)), jnp.float32)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def outputs(params, x):
        return nnx.merge(graphdef, params)(x)[0]

    sharded = jax.shard_map(outputs, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec("data"))

    def value_and_gradient(function):
        loss = lambda params: (jnp.sum(jnp.sin(function(params, x))), function(params, x))  # noqa: E731
        return jax.jit(jax.grad(loss, has_aux=True))(params)

    close = lambda a, b: tolerances.assert_close(a, b, tolerances.GRADIENT["float32"])  # noqa: E731
    jax.tree.map(close, value_and_gradient(sharded), value_and_gradient(outputs))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 0}, "top_k must be an integer of at least 1, got 0"),
        ({"num_experts": None}, "num_experts must be an integer of at least 1, got None"),
        ({"num_experts": 4.0}, "MoEConfig.num_experts must be an integer of at least 1, got 4.0"),
        ({"num_experts": "4"}, "num_experts must be an integer of at least 1, got '4'"),
        ({"shared_experts": -1}, "shared_experts must be an integer of at least 0, got -1"),
        ({"latent_dim": 0}, "latent_dim must be an integer of at least 1, got 0"),
        ({"num_groups": 4}, "num_groups must divide self.num_experts=6, got 4"),
        ({"num_groups": 2, "top_groups": 3}, "top_groups must be at most self.num_groups=2, got 3"),
        ({"num_groups": 3, "top_groups": 1, "top_k": 3}, "top_k must be at most the 2 experts in reach, got 3"),
        ({"storage": "int4"}, "storage must be None or \"mxfp4\", got 'int4'"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **changes)


def test_call_errors(rng):
    with pytest.raises(ValueError, match=r"x must be \[B, T, 12\], got \(2, 3\)"):
        build("one", rng)(jnp.zeros((2, 3)))


def test_model_config_errors():
    with pytest.raises(ValueError, match="dense_layers must be an integer of at least 0, got -1"):
        HybridConfig(vocab_size=7, width=8, num_heads=2, head_dim=4, pattern=("kda",), moe=BASE, dense_layers=-1)
    with pytest.raises(ValueError, match=r"must be above 0, got SiTU\(beta=0, linear_beta=25\.0\)"):
        SiTU(beta=0)


@pytest.mark.parametrize("shape", [(2, 0, WIDTH), (0, 3, WIDTH)])
def test_no_tokens(shape, rng):
    y, load = build("kimi_k3", rng)(jnp.zeros(shape))
    assert y.shape == shape
    assert not load.any()
