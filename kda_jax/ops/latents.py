"""Attention of one token to latents, from which both scores and values come: the definition."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kda_jax.ops.types import state_dtype

LatentQueries = Float[Array, "B H C"]
Latents = Float[Array, "B S C"]
Window = Int[Array, "B 2"]
LatentOutputs = Float[Array, "B H R"]


def attend_latents(
    q: LatentQueries, latents: Latents, window: Window, *, value_channels: int, scale: float
) -> LatentOutputs:
    """`kda_jax.ops.latent_attention.latent_attention` in plain JAX."""
    dtype = state_dtype(q.dtype)
    scores = scale * jnp.einsum("bhc,bsc->bhs", q, latents, preferred_element_type=dtype)
    place = jnp.arange(latents.shape[1])[None]
    seen = ((window[:, :1] <= place) & (place < window[:, 1:]))[:, None]
    scores = jnp.where(seen, scores, jnp.finfo(dtype).min)
    weights = jnp.where(seen, jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total == 0, 1, total)).astype(q.dtype)
    # of all channels: XLA would copy the first ones of a long cache for the product
    return jnp.einsum("bhs,bsc->bhc", weights, latents)[..., :value_channels].astype(q.dtype)
