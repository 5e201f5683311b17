"""The Linen wrappers: one parameter tree with the NNX layers, alone and inside a Linen model."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import layer_cases
import numpy as np
import pytest
from flax import nnx

from kda_jax.layers import Attention, KimiDeltaAttention, LatentAttention, MLAConfig, linen, mixer_config

WIDTH = 6
SMALL = MLAConfig(latent_dim=7, key_dim=4, shared_dim=2, value_dim=5)
LAYERS = {
    "kda": (KimiDeltaAttention, linen.KimiDeltaAttention, (WIDTH, 2, 4), {"num_value_heads": 4}),
    "gdn": (KimiDeltaAttention, linen.KimiDeltaAttention, (WIDTH, 2, 4), {"mixer": mixer_config("gdn")}),
    "attention": (Attention, linen.Attention, (WIDTH, 2, 4), {"rope_theta": 100.0}),
    "mla": (LatentAttention, linen.LatentAttention, (WIDTH, 2, SMALL), {}),
}


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_same_parameters_same_results(name, rng):
    """init, apply, grad, and a cached call, packed, against the NNX layer with the same parameters."""
    nnx_class, linen_class, args, kwargs = LAYERS[name]
    x = rng.normal(size=(2, 7, WIDTH)).astype(np.float32)
    ids = np.array([[1, 1, 1, 0, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1]], np.int32)
    wrapped = linen_class(*args, **kwargs)
    variables = jax.jit(wrapped.init)(jax.random.key(0), x)
    assert set(variables) == {"params"}
    layer = layer_cases.randomize(nnx.eval_shape(lambda: nnx_class(*args, **kwargs, rngs=nnx.Rngs(0))), rng)
    params = nnx.to_pure_dict(nnx.state(layer))
    assert jax.tree.map(jnp.shape, variables["params"]) == jax.tree.map(jnp.shape, params)
    cotangent = rng.normal(size=x.shape).astype(np.float32)

    @jax.jit
    def by_linen(params, x):
        def loss(params, x):
            y, cache = wrapped.apply({"params": params}, x, segment_ids=ids, cache=layer.init_cache(2, 10))
            later, _ = wrapped.apply({"params": params}, x[:, :1], cache=cache)
            return jnp.sum(y * cotangent), (y, later)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    @nnx.jit
    def by_nnx(layer, x):
        def loss(layer, x):
            y, cache = layer(x, segment_ids=ids, cache=layer.init_cache(2, 10))
            later, _ = layer(x[:, :1], cache=cache)
            return jnp.sum(y * cotangent), (y, later)

        return nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)

    (dparams, dx), outputs = by_linen(params, x)
    (dlayer, dx_nnx), outputs_nnx = by_nnx(layer, x)
    pairs = ((dparams, nnx.to_pure_dict(dlayer)), (dx, dx_nnx), (outputs, outputs_nnx))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), *zip(*pairs, strict=True))
    assert all(np.any(np.asarray(g)) for g in jax.tree.leaves(dparams))


def test_inside_a_linen_model(rng):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(2):
                y, _ = linen.KimiDeltaAttention(WIDTH, num_heads=2, head_dim=4, name=f"kda_{i}")(x)
                x = x + y
            return nn.Dense(3)(x)

    x = rng.normal(size=(2, 7, WIDTH)).astype(np.float32)
    model = Model()
    variables = jax.jit(model.init)(jax.random.key(0), x)
    assert set(variables["params"]) == {"kda_0", "kda_1", "Dense_0"}
    first, second = (variables["params"][f"kda_{i}"]["q_proj"]["kernel"] for i in range(2))
    assert np.any(first != second), "each layer draws its own parameters"

    layers = [nnx.eval_shape(lambda: KimiDeltaAttention(WIDTH, 2, 4, rngs=nnx.Rngs(0))) for _ in range(2)]
    h = x
    for i, layer in enumerate(layers):
        nnx.update(layer, variables["params"][f"kda_{i}"])
        h = h + nnx.jit(lambda layer, x: layer(x)[0])(layer, h)
    want = h @ variables["params"]["Dense_0"]["kernel"] + variables["params"]["Dense_0"]["bias"][None, None]
    np.testing.assert_allclose(jax.jit(model.apply)(variables, x), want, rtol=1e-5, atol=1e-5)
