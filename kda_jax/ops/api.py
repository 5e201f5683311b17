"""The public operator over sequences: choose an implementation and run it on checked inputs."""

import functools
from collections.abc import Callable, Iterable, Sequence

from jaxtyping import Array

from kda_jax.ops import validate
from kda_jax.ops.chunk import kda_chunk
from kda_jax.ops.gates import Decay, l2_normalize, write_strength
from kda_jax.ops.packing import select_valid
from kda_jax.ops.prepare import SEQUENCE_DIMS, run_sequence
from kda_jax.ops.scan import kda_scan
from kda_jax.ops.types import Beta, CuSeqlens, Keys, LogDecay, Queries, SegmentIds, State, Values

Implementation = str | Sequence[str] | None


def _mosaic_gpu(*inputs, chunk_size, **options):
    del chunk_size  # fixed by its kernels
    from pallas_kernels.vjp import kda_mosaic

    return kda_mosaic(*inputs, **options)


def _raw_mosaic_gpu(*inputs, chunk_size, **options):
    del chunk_size  # fixed by its kernels
    from pallas_kernels.vjp import kda_raw_mosaic

    return kda_raw_mosaic(*inputs, **options)


def _scan(*inputs, g_min, chunk_size, **options):
    del g_min, chunk_size  # the recurrence needs neither
    return kda_scan(*inputs, **options)


# Best first: the order of `implementation=None`.
_IMPLEMENTATIONS: dict[str, Callable] = {"mosaic_gpu": _mosaic_gpu, "chunk": kda_chunk, "scan": _scan}


def check_names(implementation: Implementation, known: Iterable[str]) -> tuple[str, ...]:
    """The implementations asked for, in order; raises ValueError where one is not among those known."""
    known = tuple(known)
    if implementation is None:
        return known
    if not isinstance(implementation, Sequence):
        raise TypeError(f"implementation must be None, a name or a sequence of names, got {implementation!r}")
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    if not names or any(name not in known for name in names):
        raise ValueError(f"implementation must be None or from {known}, or several of them, got {implementation!r}")
    return names


def _unsupported_reason(name: str, asked_for: bool, q: Array, k: Array, v: Array, g: Array) -> str | None:
    """Why the named implementation cannot run on these inputs here, or None; only one asked for may round them."""
    if name != "mosaic_gpu":
        return None
    from pallas_kernels.support import unsupported_reason

    return unsupported_reason(q, k, v, g, rounded=asked_for)


def first_supported(names: tuple[str, ...], reason: Callable[[str], str | None]) -> str:
    """The first name without a reason against it; raises NotImplementedError with all reasons where there is none."""
    reasons = {}
    for name in names:
        reasons[name] = reason(name)
        if reasons[name] is None:
            return name
    raise NotImplementedError("; ".join(f"implementation {name!r}: {reason}" for name, reason in reasons.items()))


def _run_first(names: tuple[str, ...], asked_for: bool, q, k, v, g, beta, **options):
    """The first of the named implementations that supports the inputs."""
    name = first_supported(names, lambda name: _unsupported_reason(name, asked_for, q, k, v, g))
    return _IMPLEMENTATIONS[name](q, k, v, g, beta, **options)


def kda(
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecay,
    beta: Beta,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    cu_seqlens: CuSeqlens | None = None,
    g_min: float | None = None,
    chunk_size: int = 64,
    implementation: Implementation = None,
) -> tuple[Values, State]:
    """Kimi Delta Attention of activated inputs (Kimi Linear, arXiv 2510.26692, section 3).

        S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T          o_t = scale * S_t^T q_t

    Args:
      q, k: [B, T, H, K] queries and keys. Keys of norm at most 1 keep the state bounded for beta up to 2.
      v: [B, T, HV, V] values; HV is a multiple of H and value head j uses key head j // (HV // H).
      g: [B, T, HV, K] log decay in nats, finite and <= 0; any such value is exact and safe, however strong.
      beta: [B, T, HV] write strength, in [0, 1], or [0, 2] for negative eigenvalues.
      scale: of the output; K**-0.5 by default.
      initial_state: [N, HV, K, V], zero by default; N = B, or the number of sequences in `cu_seqlens`.
      segment_ids: [B, T] integers: equal ids are one sequence, 0 is padding, the state resets where the id changes. The
        initial state belongs to a row's first segment, the final state to its last.
      cu_seqlens: [N + 1] integers with B = 1: sequence n holds the tokens cu_seqlens[n] <= t < cu_seqlens[n + 1]. Equal
        neighbours are an empty sequence, whose state passes through. Each sequence has an initial and a final state.
      g_min: a number in [-5, 0): your promise that g >= g_min everywhere, which allows dense tiles. Where it is broken
        the result is wrong.
      chunk_size: tokens a chunk, a power of two; the result does not depend on it beyond rounding.
      implementation: None for the best that is supported, a name ("mosaic_gpu", "chunk", "scan") for that or an error,
        or a sequence of names, the first supported of which runs. "mosaic_gpu" rounds float32 q, k and v to bfloat16,
        whose accuracy o and the gradients then have, in float32; so None takes "chunk" for float32. Its gradients of
        float16 have the accuracy of bfloat16 too.

    Returns:
      o: [B, T, HV, V] in v's dtype, zero for tokens of no sequence (which have zero gradients too) while states are
        finite.
      final_state: [N, HV, K, V], float32 (float64 where an input is float64).

    Raises:
      ValueError, TypeError: at trace time, naming the argument, what it is and what was expected.
      NotImplementedError: with the reason, where no implementation asked for supports the inputs.
    """
    validate.check_chunking(chunk_size, g_min)
    o, final_state, *_ = run_sequence(
        functools.partial(_run_first, check_names(implementation, _IMPLEMENTATIONS), implementation is not None),
        {"q": q, "k": k, "v": v, "g": g, "beta": beta},
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        g_min=g_min,
        chunk_size=chunk_size,
    )
    return o, final_state


def kda_raw(
    q: Queries,
    k: Keys,
    v: Values,
    g_raw: LogDecay,
    beta_raw: Beta,
    decay: Decay,
    *,
    negative_eigenvalues: bool = False,
    scale: float | None = None,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    cu_seqlens: CuSeqlens | None = None,
    chunk_size: int = 64,
    implementation: Implementation = None,
) -> tuple[Values, State]:
    """Kimi Delta Attention of a layer's raw projections: `kda(l2(q), l2(k), v, decay(g_raw), beta)`.

        l2(x) = x * rsqrt(sum x^2 + 1e-6)        beta = sigmoid(beta_raw), twice that with `negative_eigenvalues`

    Args:
      q, k, v, g_raw, beta_raw: the projections, shaped as the arguments of `kda`.
      decay: parameters of the decay; with a `lower_bound` the dense tiles of `kda`'s `g_min` are used.
      negative_eigenvalues: whether beta reaches 2.
      scale, initial_state, segment_ids, cu_seqlens, chunk_size, implementation: as in `kda`.

    Returns:
      o and final_state as `kda`, with gradients for every projection, `decay.A_log` and `decay.dt_bias`.

    Raises:
      ValueError, TypeError, NotImplementedError: as `kda`.
    """
    arrays = {"q": q, "k": k, "v": v, "g_raw": g_raw, "beta_raw": beta_raw}
    validate.check_decay(decay, validate.check_inputs(arrays, SEQUENCE_DIMS))
    validate.check_chunking(chunk_size, None)
    names = check_names(implementation, _IMPLEMENTATIONS)

    def run(q, k, v, g_raw, beta_raw, *, packing, **options):
        asked_for = implementation is not None
        name = first_supported(names, lambda name: _unsupported_reason(name, asked_for, q, k, v, g_raw))
        options |= {"packing": packing}
        if name == "mosaic_gpu":
            return _raw_mosaic_gpu(
                q, k, v, g_raw, beta_raw, decay, negative_eigenvalues=negative_eigenvalues, **options
            )
        q, k, g_raw, beta_raw = select_valid(packing, q, k, g_raw, beta_raw)  # whose activations have derivatives
        activated = l2_normalize(q), l2_normalize(k), v, decay(g_raw), write_strength(beta_raw, negative_eigenvalues)
        return _IMPLEMENTATIONS[name](*activated, g_min=decay.lower_bound, **options)

    o, final_state, *_ = run_sequence(
        run,
        arrays,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )
    return o, final_state
