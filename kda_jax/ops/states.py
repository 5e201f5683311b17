"""The public operator that also returns the state of every chunk."""

from collections.abc import Callable

from jaxtyping import Array, Float

from kda_jax.ops import validate
from kda_jax.ops.api import Implementation, check_names, first_supported
from kda_jax.ops.chunk import kda_chunk
from kda_jax.ops.prepare import run_sequence
from kda_jax.ops.types import Beta, Keys, LogDecay, Queries, SegmentIds, State, Values


def _mosaic_gpu(*inputs, chunk_size, **options):
    from pallas_kernels.vjp import kda_mosaic

    return kda_mosaic(*inputs, states_every=chunk_size, **options)


# Best first: the order of `implementation=None`.
_IMPLEMENTATIONS: dict[str, Callable] = {"mosaic_gpu": _mosaic_gpu, "chunk": kda_chunk}


def _unsupported_reason(name, asked_for, inputs, chunk_size):
    """Why the named implementation cannot run on these inputs here, or None; only one asked for may round them."""
    if name != "mosaic_gpu":
        return None
    from pallas_kernels.support import unsupported_reason

    return unsupported_reason(*inputs, rounded=asked_for, states_every=chunk_size)


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
    implementation: Implementation = None,
) -> tuple[Values, State, Float[Array, "B chunks HV K V"]]:
    """`kda` with the state after every chunk: the checkpoints of a prefix cache.

    The arguments are `kda`'s without `cu_seqlens`, whose sequences would begin inside chunks; implementations are
    "mosaic_gpu", which takes a `chunk_size` of 64 or more and has the gradients of the chunk form, and "chunk".

    Returns:
      o and final_state as `kda`; states [B, ceil(T / chunk_size), HV, K, V] in final_state's dtype, where states[:, c]
      is the state after min((c + 1) * chunk_size, T) tokens. Passed as `initial_state` it resumes there, within the
      same segment: a call that begins with a new segment starts from none.

    Raises:
      ValueError, TypeError, NotImplementedError: as `kda`.
    """
    validate.check_chunking(chunk_size, g_min)
    names = check_names(implementation, _IMPLEMENTATIONS)

    def run(*inputs, **options):
        asked_for = implementation is not None
        name = first_supported(names, lambda name: _unsupported_reason(name, asked_for, inputs[:4], chunk_size))
        return _IMPLEMENTATIONS[name](*inputs, **options)

    o, final_state, states = run_sequence(
        run,
        {"q": q, "k": k, "v": v, "g": g, "beta": beta},
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        cu_seqlens=None,
        g_min=g_min,
        chunk_size=chunk_size,
    )
    return o, final_state, states
