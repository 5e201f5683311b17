"""What stands in padding tokens reaches no output and no gradient of a layer."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kda_jax.layers import Attention, KimiDeltaAttention, LatentAttention, MLAConfig
from kda_jax.layers.mixer import MixerConfig

LAYERS = {
    "kda": lambda rngs: KimiDeltaAttention(8, 2, 4, rngs=rngs),
    "attention": lambda rngs: Attention(8, 2, 4, rngs=rngs),
    "mla": lambda rngs: LatentAttention(
        8, 2, MLAConfig(latent_dim=6, shared_dim=2, key_dim=4, value_dim=4, output_gate=True), rngs=rngs
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_nan_in_padding_stays_there(name):
    layer = LAYERS[name](nnx.Rngs(0))
    ids = jnp.array([[0, 1, 1, 0, 2, 2, 0]])
    x = jax.random.normal(jax.random.key(1), (1, 7, 8))
    poisoned = jnp.where(ids[..., None] == 0, jnp.nan, x)

    @nnx.jit
    def run(layer, x):
        def loss(layer, x):
            return (jnp.where(ids[..., None] != 0, layer(x, segment_ids=ids)[0], 0) ** 2).sum()

        return layer(x, segment_ids=ids)[0], nnx.grad(loss, argnums=(0, 1))(layer, x)

    y, (weights, dx) = run(layer, x)
    y_poisoned, (weights_poisoned, dx_poisoned) = run(layer, poisoned)
    assert jnp.array_equal(y, y_poisoned)
    assert jnp.array_equal(dx, dx_poisoned)
    assert not dx[ids == 0].any()
    assert dx[ids != 0].any()
    assert jax.tree.all(jax.tree.map(jnp.array_equal, weights, weights_poisoned))


def test_integer_inputs_are_refused():
    with pytest.raises(TypeError, match="x must have a floating dtype, got int32"):
        KimiDeltaAttention(8, 2, 4, rngs=nnx.Rngs(0))(jnp.ones((1, 3, 8), jnp.int32))


def leaves_equal(a, b):
    return jax.tree.all(jax.tree.map(jnp.array_equal, a, b))


@pytest.mark.parametrize("name", LAYERS)
def test_no_tokens_and_padded_tokens_keep_the_cache(name):
    """Bit for bit, in a row of its own: beside it another row goes on as it would without segment ids."""
    layer = LAYERS[name](nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 5, 8))
    _, cache = layer(x, cache=layer.init_cache(2, 9))
    for ids in (None, jnp.ones((2, 0), jnp.int32)):
        y, after = layer(x[:, :0], segment_ids=ids, cache=cache)
        assert (y.shape, y.dtype) == ((2, 0, 8), x.dtype)
        assert leaves_equal(cache, after)
    (want, plain), (y, after) = (layer(x[:, :1], segment_ids=ids, cache=cache) for ids in (None, jnp.array([[0], [3]])))
    first, second = ([leaf[row] for leaf in jax.tree.leaves(after)] for row in (0, 1))
    assert leaves_equal(first, [leaf[0] for leaf in jax.tree.leaves(cache)])
    assert not y[0].any()
    for got, expected in zip([y[1], *second], [want[1], *(leaf[1] for leaf in jax.tree.leaves(plain))], strict=True):
        assert jnp.allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_no_rows(name):
    layer = LAYERS[name](nnx.Rngs(0))
    for cache in (None, layer.init_cache(0, 9)):
        y, _ = layer(jnp.zeros((0, 5, 8)), cache=cache)
        assert y.shape == (0, 5, 8)


def test_a_state_keeps_its_dtype():
    """Also over a sequence, where the arithmetic is in float32."""
    layer = LAYERS["kda"](nnx.Rngs(0))
    cache = jax.tree.map(lambda x: x.astype(jnp.bfloat16), layer.init_cache(1))
    for length in (5, 1):
        _, cache = layer(jnp.ones((1, length, 8)), cache=cache)
        assert {leaf.dtype for leaf in jax.tree.leaves(cache)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("name", ["attention", "mla"])
def test_a_cache_of_another_layer_is_refused(name):
    """Of fewer heads, or of another kind."""
    layer, other = LAYERS[name](nnx.Rngs(0)), Attention(8, 2, 4, num_kv_heads=1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"the cache holds entries of shapes \[.*\] a token, this layer's have \["):
        layer(jnp.ones((1, 1, 8)), cache=other.init_cache(1, 4))


def test_chunks_of_a_mixer_are_powers_of_two():
    with pytest.raises(ValueError, match="chunk_size must be a power of two, got 12"):
        MixerConfig(chunk_size=12)
