"""Every layer against its float64 oracle: values, gradients, packing, padding, causality."""

import jax
import jax.numpy as jnp
import layer_cases
import numpy as np
import pytest
import reference_layers as oracle
import tolerances
from flax import nnx

from kda_jax.layers import GatedMLP, GatedRMSNorm

NAMES = sorted(layer_cases.CASES)
IDS = layer_cases.SEGMENT_IDS
ONE = np.ones_like(IDS)


@nnx.jit
def forward(layer, x, segment_ids):
    return layer(x, segment_ids=segment_ids)[0]


@nnx.jit
def value_and_gradients(layer, x, segment_ids, cotangent):
    def loss(layer, x):
        y, _ = layer(x, segment_ids=segment_ids)
        return jnp.sum(y * cotangent), y

    gradients, y = nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
    return y, *gradients


@pytest.mark.parametrize("name", NAMES)
def test_values(name, rng):
    layer = layer_cases.build(name, rng)
    x = rng.normal(size=(*IDS.shape, layer_cases.WIDTH)).astype(np.float32)
    want = layer_cases.run_oracle(name, layer_cases.parameters(layer), x, ONE)
    tolerances.assert_close(forward(layer, x, None), want, tolerances.FORWARD["float32"], "one sequence a row")


@pytest.mark.parametrize("name", NAMES)
def test_packed_values_and_gradients(name, rng):
    """Packed rows are separate sequences; gradients are finite differences of the oracle along random directions."""
    layer = layer_cases.build(name, rng)
    x = rng.normal(size=(*IDS.shape, layer_cases.WIDTH)).astype(np.float32)
    x[IDS == 0] = 1e4  # padding may hold anything
    cotangent = rng.normal(size=x.shape)
    params = layer_cases.parameters(layer)
    y, dparams, dx = value_and_gradients(layer, x, IDS, cotangent.astype(np.float32))
    tolerances.assert_close(y, layer_cases.run_oracle(name, params, x, IDS), tolerances.FORWARD["float32"], "packed")
    assert not np.any(y[IDS == 0])

    assert not np.any(dx[IDS == 0])
    inputs = {"x": x.astype(np.float64), "params": params}
    grads = {"x": dx, "params": nnx.to_pure_dict(dparams)}
    paths = [(path, leaf) for path, leaf in jax.tree.leaves_with_path(grads)]
    for target, grad in paths:
        directions = {target: rng.normal(size=grad.shape)}

        def loss(step, directions=directions):
            def move(path, leaf):
                return leaf + step * directions.get(path, 0.0)

            moved = jax.tree_util.tree_map_with_path(move, inputs)
            return np.sum(layer_cases.run_oracle(name, moved["params"], moved["x"], IDS) * cotangent)

        want = (loss(1e-5) - loss(-1e-5)) / 2e-5
        got = np.sum(np.asarray(grad, np.float64) * directions[target])
        size = np.linalg.norm(grad) + 1e-3
        assert abs(got - want) <= 1e-4 * size, f"{jax.tree_util.keystr(target)}: {got} != {want}"


@pytest.mark.parametrize("name", NAMES)
def test_causality(name, rng):
    """Bitwise: a later token changes no earlier output, and every later output depends on an earlier token."""
    layer = layer_cases.build(name, rng)
    x = rng.normal(size=(*IDS.shape, layer_cases.WIDTH)).astype(np.float32)
    changed = x.copy()
    changed[:, 11] += 1.0
    before, after = forward(layer, x, None), forward(layer, changed, None)
    np.testing.assert_array_equal(before[:, :11], after[:, :11])
    assert np.all(np.any(before[:, 11:] != after[:, 11:], axis=-1))


def test_swiglu(rng):
    layer = GatedMLP(5, 7, rngs=nnx.Rngs(0))
    x = rng.normal(size=(2, 3, 5)).astype(np.float32)
    tolerances.assert_close(layer(x), oracle.swiglu(layer_cases.parameters(layer), x), tolerances.FORWARD["float32"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gated_norm(dtype, rng):
    norm = GatedRMSNorm(6, rngs=nnx.Rngs(0))
    norm.scale[...] = jnp.asarray(rng.normal(size=6), jnp.float32)
    x, gate = (jnp.asarray(rng.normal(size=(2, 3, 4, 6)), dtype) for _ in range(2))
    x = x.at[0, 0].set(1e-4)  # near epsilon
    wide, wide_gate = np.asarray(x, np.float64), np.asarray(gate, np.float64)
    plain = oracle.rms_norm(wide, np.asarray(norm.scale[...], np.float64))
    assert norm(x).dtype == dtype
    tolerances.assert_close(norm(x), plain, tolerances.FORWARD[dtype], "no gate")
    tolerances.assert_close(norm(x, gate), plain / (1 + np.exp(-wide_gate)), tolerances.FORWARD[dtype], "gate")
