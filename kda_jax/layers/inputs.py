"""The check that every layer makes of what it is called with."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kda_jax.layers.cache import AttentionCache, DeltaCache
from kda_jax.ops.types import SegmentIds


def check_inputs(
    x: Float[Array, "B T D"],
    in_features: int,
    segment_ids: SegmentIds | None,
    cache: DeltaCache | AttentionCache | None,
) -> None:
    """Raises unless x is floating [B, T, in_features], segment_ids integers [B, T] and cache of B rows if given."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x must have a floating dtype, got {x.dtype}")
    if x.ndim != 3 or x.shape[-1] != in_features:
        raise ValueError(f"x must be [B, T, {in_features}], got {x.shape}")
    if segment_ids is not None and (
        segment_ids.shape != x.shape[:2] or not jnp.issubdtype(segment_ids.dtype, jnp.integer)
    ):
        raise ValueError(f"segment_ids must be integers {x.shape[:2]}, got {segment_ids.dtype} {segment_ids.shape}")
    if cache is not None and cache.batch_size != x.shape[0]:
        raise ValueError(f"cache has {cache.batch_size} rows for an x of {x.shape[0]}")


def zero_padding(x: Float[Array, "B T D"], segment_ids: SegmentIds | None) -> Float[Array, "B T D"]:
    """x with its padding tokens zero, by select: what stands in them reaches no output and no gradient."""
    return x if segment_ids is None else jnp.where(segment_ids[..., None] != 0, x, 0)


def no_tokens(x: Float[Array, "B 0 D"], dtype: DTypeLike | None, param_dtype: DTypeLike) -> Float[Array, "B 0 D"]:
    """What a layer makes of an x without tokens: the same in the dtype of its output."""
    return x.astype(jnp.promote_types(x.dtype, param_dtype) if dtype is None else dtype)
