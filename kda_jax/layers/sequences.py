"""Numbers for the sequences of packed rows."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from kda_jax.ops.packing import plan_segments
from kda_jax.ops.types import SegmentIds, TokenMask


def number_sequences(segment_ids: SegmentIds) -> tuple[TokenMask, Int[Array, "B T"]]:
    """Which tokens [B, T] are not padding, and the number of each one's sequence in its row, from 0.

    Padding has the number of the token before it. The operator's own plan decides where a sequence begins.
    """
    plan = plan_segments(segment_ids)
    assert plan.reset is not None  # only `cu_seqlens` come without
    return plan.valid, jnp.cumsum(plan.reset, axis=1, dtype=jnp.int32)
