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


def test_an_empty_sequence_keeps_the_state():
    layer = KimiDeltaAttention(8, 2, 4, rngs=nnx.Rngs(0))
    _, cache = layer(jnp.ones((2, 5, 8)))
    y, after = layer(jnp.ones((2, 0, 8)), cache=cache)
    assert y.shape == (2, 0, 8)
    assert jnp.array_equal(cache.state, after.state)


def test_chunks_of_a_mixer_are_powers_of_two():
    with pytest.raises(ValueError, match="chunk_size must be a power of two, got 12"):
        MixerConfig(chunk_size=12)
