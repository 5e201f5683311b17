"""The public operator over one token: decoding."""

import jax.numpy as jnp

from kda_jax.ops import validate
from kda_jax.ops.api import Implementation, check_names
from kda_jax.ops.gates import Decay, l2_normalize, write_strength
from kda_jax.ops.prepare import STEP_DIMS
from kda_jax.ops.scan import step
from kda_jax.ops.types import State, StepBeta, StepLogDecay, StepQueries, StepValues, state_dtype


def kda_step(
    q: StepQueries,
    k: StepQueries,
    v: StepValues,
    g: StepLogDecay,
    beta: StepBeta,
    state: State,
    *,
    scale: float | None = None,
    implementation: Implementation = None,
) -> tuple[StepValues, State]:
    """One token of `kda` (Kimi Linear, arXiv 2510.26692, section 3):

        S <- Diag(exp g) S;   S <- S + beta k (v - S^T k)^T;   o = scale * S^T q

    Args:
      q, k: [B, H, K]; v: [B, HV, V]; g: [B, HV, K] log decay in nats, <= 0; beta: [B, HV].
      state: [B, HV, K, V], of any float dtype; the arithmetic is float32 at least.
      scale: of the output; K**-0.5 by default.
      implementation: None for the best that is supported, a name ("scan") or a sequence of names.

    Returns:
      o: [B, HV, V] in v's dtype.
      state: the new state, in the dtype of the old.

    Raises:
      ValueError, TypeError: at trace time, naming the argument, what it is and what was expected.
    """
    sizes = validate.check_inputs({"q": q, "k": k, "v": v, "g": g, "beta": beta}, STEP_DIMS)
    validate.check_array("state", state, "B HV K V", sizes)
    check_names(implementation, ("scan",))
    state = jnp.asarray(state)
    o, new_state = step(q, k, v, g, beta, state.astype(state_dtype(state.dtype)), validate.check_scale(scale, sizes))
    return o.astype(v.dtype), new_state.astype(state.dtype)


def kda_raw_step(
    q: StepQueries,
    k: StepQueries,
    v: StepValues,
    g_raw: StepLogDecay,
    beta_raw: StepBeta,
    decay: Decay,
    state: State,
    *,
    negative_eigenvalues: bool = False,
    scale: float | None = None,
    implementation: Implementation = None,
) -> tuple[StepValues, State]:
    """One token of `kda_raw`: `kda_step` of raw projections, shaped as the arguments of `kda_step`.

    The other arguments, the results and the errors are those of `kda_raw` and `kda_step`.
    """
    arrays = {"q": q, "k": k, "v": v, "g_raw": g_raw, "beta_raw": beta_raw}
    validate.check_decay(decay, validate.check_inputs(arrays, STEP_DIMS))
    return kda_step(
        l2_normalize(q),
        l2_normalize(k),
        v,
        decay(g_raw),
        write_strength(beta_raw, negative_eigenvalues),
        state,
        scale=scale,
        implementation=implementation,
    )
