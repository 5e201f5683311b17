"""The forward pass: `fused` where sequences and heads fill the chip; else `prepare` over all chunks and `scan` over
each sequence and head, `overlapped` where both fit side by side.

Where there are too few sequences and heads to fill the chip, a sequence is split into pieces. A first scan gives each
piece's affine map of the state before it, from which a second scan takes all pieces at once.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.activation import Activation
from pallas_kernels.config import Config
from pallas_kernels.fused import make_fused
from pallas_kernels.inputs import CHUNK, Problem, Raw
from pallas_kernels.overlapped import make_overlapped
from pallas_kernels.prepare import make_prepare
from pallas_kernels.scan import REGISTER_KEYS, make_scan
from pallas_kernels.spans import compose, find_spans

ROWS = 8  # tokens in a group of shared memory's layout


def forward(
    inputs: Sequence[jax.Array],
    initial_state: jax.Array | None,
    sequences: jax.Array | None = None,
    decay: Sequence[jax.Array] = (),
    *,
    scale: float,
    g_min: float | None,
    activation: Activation | None = None,
    every: int = 0,
    config: Config,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """(o [B, T, HV, V] in v's dtype, final state [N, HV, K, V] float32) of q, k, v, g, beta and, where rows hold
    segments, `Packing.marks` [B, T]; shapes as in `kda`.

    The inputs must be supported (`support.unsupported_reason`); q, k and v of float32 are rounded to bfloat16. Every g
    <= 0 is exact; g_min promises every g >= g_min >= -5. sequences: [N, 2] int32, the first chunk and the number of
    chunks of each sequence in the only row; without, every row is one. With an `activation` the inputs are raw, and
    `decay` is A_log [HV], dt_bias [HV, K]. With `every` a third result: the states of each row behind so many chunks
    each, and behind its last, [B, n, HV, K, V] float32.
    """
    config.check(inputs[0].shape[3], inputs[2].shape[3])
    T = inputs[2].shape[1]
    if T % ROWS:  # the copies move whole groups of rows; tokens of zeros leave the state as it is
        inputs = [jnp.pad(x, [(0, 0), (0, -T % ROWS)] + [(0, 0)] * (x.ndim - 2)) for x in inputs]
    q, k, v, g, beta, *marks = inputs
    (B, _, HV, V), K, dtype = v.shape, q.shape[3], v.dtype
    if dtype == jnp.float32:
        q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    bounded = g_min is not None and v.dtype == jnp.bfloat16  # float16 has no room for the exponents
    raw = None if activation is None else Raw(activation, g.dtype, T)
    problem = Problem(q.shape, v.shape, v.dtype, bounded, raw, bool(marks))
    marks = [jnp.pad(x, [(0, 0), (0, -x.shape[1] % CHUNK)]) for x in marks]
    arrays = (q, k, v, g if raw else g.astype(jnp.float32), *(x.astype(jnp.float32) for x in (beta, *marks, *decay)))
    if initial_state is not None:
        initial_state = initial_state.astype(jnp.float32)
    if config.route != "apart" and sequences is None and not every:
        has_state = initial_state is not None
        make = make_fused if config.route == "fused" else make_overlapped
        run = make(problem, scale=scale, has_state=has_state, interpret=interpret)
        o, final_state, *_ = run(*arrays, *([initial_state] if has_state else []))
        return o[:, :T].astype(dtype), final_state
    prepared = make_prepare(problem, interpret=interpret)(*arrays)

    def scan(spans: jax.Array, state: jax.Array | None = None, config: Config = config, **options: Any) -> Any:
        if state is None and K > REGISTER_KEYS and options.get("outputs", True):  # registers spill without
            state = jnp.zeros((spans.shape[0], HV, K, V), jnp.float32)
        has_state = state is not None
        options |= {"scale": scale, "config": config, "has_state": has_state, "interpret": interpret}
        run = make_scan(spans.shape[0], v.shape, K, v.dtype, **options)
        return run(spans, *prepared, *([state] if has_state else []))

    pieces = config.pieces if sequences is None else 1
    spans = find_spans(B, problem.chunks, pieces, sequences)
    if pieces > 1:
        (maps,) = scan(spans, config=Config(stages=config.stages), outputs=False)
        initial = jnp.zeros((B, HV, K, V), jnp.float32) if initial_state is None else initial_state
        before, final_state = compose(maps[..., V:], maps[..., :V], initial)
        o, _, *states = scan(spans, before, every=every)
    else:
        o, final_state, *states = scan(spans, initial_state, every=every)
    return o[:, :T].astype(dtype), final_state, *states
