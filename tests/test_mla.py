"""Latent attention: what its cache holds, which form a call takes, its norms near zero, its errors."""

import dataclasses

import jax
import jax.numpy as jnp
import layer_cases
import numpy as np
import pytest
import tolerances
from flax import nnx

from kda_jax.layers import LatentAttention, MLAConfig

CAPACITY = 40


def test_cache_is_compressed(rng):
    """Latent and shared key alone, however many heads there are."""
    layer = layer_cases.build("mla", rng)
    (entry,) = layer.init_cache(2, CAPACITY).entries
    assert entry.shape == (2, CAPACITY, 7 + 2)


@pytest.mark.parametrize(("length", "absorbed"), [(1, True), (3, True), (30, False)])
def test_form_of_a_call_on_a_cache(length, absorbed):
    """Few tokens attend to the latents themselves; for many, keys and values are made of all the cache."""
    layer = LatentAttention(8, 3, MLAConfig(latent_dim=16, key_dim=11, shared_dim=5, value_dim=7), rngs=nnx.Rngs(0))
    x = jnp.zeros((2, length, 8))
    jaxpr = jax.make_jaxpr(lambda cache: layer(x, cache=cache)[0])(layer.init_cache(2, CAPACITY))
    shapes = {v.aval.shape for equation in jaxpr.jaxpr.eqns for v in equation.outvars}
    assert ((2, CAPACITY, 3, 11) not in shapes) == absorbed


@pytest.mark.parametrize("name", ["mla", "mla_gated"])
def test_latents_near_epsilon(name, rng):
    """The norms on the latent and the query add 1e-6, not the 1e-5 of the others: visible in small latents."""
    layer = layer_cases.build(name, rng)
    x = 1e-3 * rng.normal(size=(1, 6, layer_cases.WIDTH)).astype(np.float32)
    want = layer_cases.run_oracle(name, layer_cases.parameters(layer), x, np.ones((1, 6)))
    tolerances.assert_close(layer(x)[0], want, tolerances.FORWARD["float32"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent_dim": 0}, "latent_dim must be an integer of at least 1, got 0"),
        ({"latent_dim": 8.0}, "MLAConfig.latent_dim must be an integer of at least 1, got 8.0"),
        ({"latent_dim": None}, "latent_dim must be an integer of at least 1, got None"),
        ({"query_rank": 0}, "query_rank must be an integer of at least 1, got 0"),
        ({"value_dim": 7}, "value_dim must be at most key_dim \\+ shared_dim"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(layer_cases.SMALL, **changes)
