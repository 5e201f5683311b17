"""The backward pass: `prepare` once more with its inverse, `backward_scan` over each sequence and head in both
directions, `backward_chunk` over all chunks at once.

A long sequence of few heads is split into pieces as in `forward`: a scan gives their maps, `backward_scan` from nothing
what they themselves give to the gradient of the state, and once more, from what the maps then tell, all of its results.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.activation import Activation
from pallas_kernels.backward_chunk import make_backward_chunk
from pallas_kernels.backward_scan import make_backward_scan
from pallas_kernels.config import Config
from pallas_kernels.inputs import CHUNK, Problem, Raw
from pallas_kernels.prepare import make_prepare
from pallas_kernels.scan import make_scan
from pallas_kernels.spans import compose, find_spans

SMALLEST_BETA = 2.0**-40  # beta is divided by; a token that writes this little writes nothing


def unsupported_reason(scale: float) -> str | None:
    """Why inputs that `forward` takes have no backward kernels, or None."""
    return "the backward kernels divide by scale, which is 0" if scale == 0 else None


def backward(
    inputs: tuple[jax.Array, ...],
    initial_state: jax.Array | None,
    cotangents: tuple[jax.Array, jax.Array],
    sequences: jax.Array | None = None,
    decay: Sequence[jax.Array] = (),
    *,
    scale: float,
    g_min: float | None,
    activation: Activation | None = None,
    config: Config,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Gradients of q, k, v, g, beta, of the initial state, and of the decay's parameters a row, in the inputs' dtypes.

    inputs, sequences, decay, activation: as in `forward`; cotangents: of o and the final state. q, k, v and do
    are rounded to bfloat16, whose accuracy the gradients have: float16 holds neither cotangents of any size nor dv and
    v_new of a small beta, by whose square dbeta is divided. Heads that share a key head are summed in float32, in a
    fixed order. Those of A_log and dt_bias are [B, HV] and [B, HV, K], in float32.
    """
    (B, T, H, K), (HV, V) = inputs[0].shape, inputs[2].shape[2:]
    do, dfinal = cotangents

    def whole(x: jax.Array) -> jax.Array:  # tokens of zeros leave the state as it is
        return jnp.pad(x, [(0, 0), (0, -T % CHUNK)] + [(0, 0)] * (x.ndim - 2)) if T % CHUNK else x

    q, k, v, g, beta, *marks = (whole(x) for x in inputs)
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    raw = None if activation is None else Raw(activation, g.dtype, T)
    g = g if raw else g.astype(jnp.float32)
    beta = jnp.maximum(beta.astype(jnp.float32), math.log(SMALLEST_BETA) if raw else SMALLEST_BETA)
    marks, parameters = ([x.astype(jnp.float32) for x in xs] for xs in (marks, decay))
    do = whole(do.astype(v.dtype))
    dfinal = dfinal.astype(jnp.float32)
    initial = jnp.zeros_like(dfinal) if initial_state is None else initial_state.astype(jnp.float32)

    problem = Problem(q.shape, v.shape, v.dtype, bounded=g_min is not None, raw=raw, segments=bool(marks))
    prepared = make_prepare(problem, inverse=True, interpret=interpret)(q, k, v, g, beta, *marks, *parameters)
    prepared, norms = (prepared[:-1], prepared[-1:]) if raw else (prepared, ())
    options: dict[str, Any] = {"scale": scale, "interpret": interpret}
    # half as many pieces as forward: the two directions are blocks of one grid
    pieces = max(1, config.pieces // 2) if sequences is None else 1
    spans = find_spans(B, problem.chunks, pieces, sequences)
    scan_options = options | {"warpgroups": config.warpgroups, "segments": problem.segments}
    run = make_backward_scan(spans.shape[0], v.shape, K, v.dtype, **scan_options)

    def scan(initial: jax.Array, dfinal: jax.Array) -> Any:
        return run(spans, *prepared, do, initial, dfinal / scale, *marks)

    if pieces > 1:
        maps = make_scan(
            spans.shape[0], v.shape, K, v.dtype, config=Config(stages=config.stages), outputs=False, **options
        )
        M, N = jnp.split(maps(spans, *prepared[:6])[0], [V], axis=-1)[::-1]
        initial, _ = compose(M, N, initial)
        *_, dN = scan(initial, jnp.zeros_like(initial))
        dfinal, dinitial = compose(M.mT, dN, dfinal, reverse=True)
        S, dS, v_new, dv, _ = scan(initial, dfinal)
    else:
        S, dS, v_new, dv, dinitial = scan(initial, dfinal)
    chunk = make_backward_chunk(problem, **options)
    dq, dk, dg, dbeta, *partial = chunk(q, k, g, beta, do, v_new, dv, S, dS, *marks, *parameters, *norms)

    if HV > H:
        dq, dk = (x.reshape(*x.shape[:2], H, HV // H, K).sum(3, dtype=jnp.float32) for x in (dq, dk))
    grads = [dx[:, :T].astype(x.dtype) for dx, x in zip((dq, dk, dv, dg, dbeta), inputs[:5], strict=True)]
    if initial_state is not None:
        grads.append(dinitial.astype(initial_state.dtype))
    if raw:
        owned = None
        if sequences is not None:  # chunks of no sequence give anything
            owned = jax.lax.iota(jnp.int32, problem.chunks)[None, :, None, None] < jnp.sum(sequences[:, 1])
        dA_log, ddt_bias = (x.sum(1, where=owned) for x in partial[:2])
        grads += [dA_log.sum(-1), ddt_bias]
    return tuple(grads)
