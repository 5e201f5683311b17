"""The backward pass: `prepare` once more with its inverse, `backward_scan` over each sequence and head in both
directions, `backward_chunk` over all chunks at once.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backward_chunk import make_backward_chunk
from pallas_kernels.backward_scan import make_backward_scan
from pallas_kernels.config import Config
from pallas_kernels.prepare import CHUNK, make_prepare

KEY_CHANNELS = 192  # at most
SMALLEST_BETA = 2.0**-40  # beta is divided by; a token that writes this little writes nothing


def unsupported_reason(k: jax.Array, scale: float) -> str | None:
    """Why inputs that `forward` takes have no backward kernels, or None. k: the keys, filled up."""
    if k.dtype != jnp.bfloat16:
        return f"the backward kernels take bfloat16, got {k.dtype}"
    if k.shape[-1] > KEY_CHANNELS:
        return f"the backward kernels have shared memory for {KEY_CHANNELS} key channels, got {k.shape[-1]}"
    return "the backward kernels divide by scale, which is 0" if scale == 0 else None


def backward(
    inputs: tuple[jax.Array, ...],
    initial_state: jax.Array | None,
    cotangents: tuple[jax.Array, jax.Array],
    *,
    scale: float,
    g_min: float | None,
    config: Config,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Gradients of q, k, v, g, beta and of the initial state, in the dtypes of the inputs.

    inputs: q, k, v, g, beta as in `forward`, in bfloat16 where it takes any 16 bits; cotangents: of o and the final
    state. Heads that share a key head are summed in float32, in a fixed order.
    """
    (B, T, H, K), (HV, V) = inputs[0].shape, inputs[2].shape[2:]
    do, dfinal = cotangents

    def whole(x: jax.Array) -> jax.Array:  # tokens of zeros leave the state as it is
        return jnp.pad(x, [(0, 0), (0, -T % CHUNK)] + [(0, 0)] * (x.ndim - 2)) if T % CHUNK else x

    q, k, v, g, beta = (whole(x) for x in inputs)
    g, beta = g.astype(jnp.float32), jnp.maximum(beta.astype(jnp.float32), SMALLEST_BETA)
    do = whole(do.astype(v.dtype))
    initial = jnp.zeros((B, HV, K, V), jnp.float32) if initial_state is None else initial_state.astype(jnp.float32)

    prepare = make_prepare(q.shape, v.shape, v.dtype, bounded=g_min is not None, inverse=True, interpret=interpret)
    prepared = prepare(q, k, v, g, beta)
    options: dict[str, Any] = {"scale": scale, "interpret": interpret}
    scan = make_backward_scan(v.shape, K, v.dtype, warpgroups=config.warpgroups, **options)
    S, dS, v_new, dv, dinitial = scan(*prepared, do, initial, dfinal.astype(jnp.float32) / scale)
    chunk = make_backward_chunk(q.shape, v.shape, v.dtype, **options)
    dq, dk, dg, dbeta = chunk(q, k, g, beta, do, v_new, dv, S, dS)

    if HV > H:
        dq, dk = (x.reshape(*x.shape[:2], H, HV // H, K).sum(3, dtype=jnp.float32) for x in (dq, dk))
    grads = tuple(dx[:, :T].astype(x.dtype) for dx, x in zip((dq, dk, dv, dg, dbeta), inputs, strict=True))
    return grads if initial_state is None else (*grads, dinitial.astype(initial_state.dtype))
