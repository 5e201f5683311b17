"""The forward pass: `prepare` over all chunks at once, then `scan` over each sequence and head."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.config import Config
from pallas_kernels.prepare import make_prepare
from pallas_kernels.scan import make_scan

ROWS = 8  # tokens in a group of shared memory's layout


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    *,
    scale: float,
    g_min: float | None,
    config: Config,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """(o [B, T, HV, V] in v's dtype, final state [B, HV, K, V] float32) for activated inputs; shapes as in `kda`.

    The inputs must be supported (`support.unsupported_reason`). Every g <= 0 is exact; g_min promises every g >=
    g_min >= -5.
    """
    T = v.shape[1]
    if T % ROWS:  # the copies move whole groups of rows; tokens of zeros leave the state as it is
        q, k, v, g, beta = (jnp.pad(x, [(0, 0), (0, -T % ROWS)] + [(0, 0)] * (x.ndim - 2)) for x in (q, k, v, g, beta))
    B, padded, _, K = q.shape
    HV, V = v.shape[2:]
    bounded = g_min is not None and v.dtype == jnp.bfloat16  # float16 has no room for the exponents
    prepare = make_prepare(q.shape, v.shape, v.dtype, bounded=bounded, interpret=interpret)
    prepared = prepare(q, k, v, g.astype(jnp.float32), beta.astype(jnp.float32))
    has_state = initial_state is not None
    scan = make_scan(B, padded, HV, K, V, v.dtype, scale=scale, config=config, has_state=has_state, interpret=interpret)
    state = () if initial_state is None else (initial_state.astype(jnp.float32),)
    o, final_state = scan(*prepared, *state)
    return o[:, :T], final_state
