"""The public operator that also returns the state of every chunk."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kda_jax.ops import validate
from kda_jax.ops.chunk import kda_chunk
from kda_jax.ops.prepare import run_sequence
from kda_jax.ops.types import Beta, Keys, LogDecay, Queries, SegmentIds, State, Values


def kda_with_states(
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecay,
    beta: Beta,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    g_min: float | None = None,
    chunk_size: int = 64,
) -> tuple[Values, State, Float[Array, "B chunks HV K V"]]:
    """`kda` by the chunkwise form, with the state after every chunk: the checkpoints of a prefix cache.

    Returns:
      o and final_state as `kda`; states [B, ceil(T / chunk_size), HV, K, V], where states[:, c] is the state after
      min((c + 1) * chunk_size, T) tokens. Passed as `initial_state` it resumes there, within the same segment: a call
      that begins with a new segment starts from none.
    """
    validate.check_chunking(chunk_size, g_min)
    o, final_state, before = run_sequence(
        kda_chunk,
        {"q": q, "k": k, "v": v, "g": g, "beta": beta},
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        cu_seqlens=None,
        g_min=g_min,
        chunk_size=chunk_size,
    )
    after = jnp.concatenate([before, final_state[None]])[1:]
    return o, final_state, jnp.moveaxis(after, 0, 1)
