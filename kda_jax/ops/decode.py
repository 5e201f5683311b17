"""The public operator over one token: decoding."""

import functools
from collections.abc import Callable

import jax.numpy as jnp

from kda_jax.ops import validate
from kda_jax.ops.api import Implementation, check_names, first_supported
from kda_jax.ops.gates import Decay
from kda_jax.ops.prepare import STEP_DIMS
from kda_jax.ops.scan import kda_token
from kda_jax.ops.types import State, StepBeta, StepLogDecay, StepQueries, StepValues


def _mosaic_gpu(*inputs, **options):
    from pallas_kernels.step import kda_step_mosaic

    return kda_step_mosaic(*inputs, **options)


# Best first: the order of `implementation=None`.
_IMPLEMENTATIONS: dict[str, Callable] = {"mosaic_gpu": _mosaic_gpu, "scan": kda_token}


def _unsupported_reason(name, inputs, state, decay):
    """Why the named implementation cannot run on these arrays here, or None."""
    if name != "mosaic_gpu":
        return None
    from pallas_kernels.support import unsupported_step_reason

    return unsupported_step_reason(inputs, state, decay)


def _run(implementation, arrays, state, decay, *, scale, negative_eigenvalues):
    """The first implementation that supports the arrays, checked here; from raw inputs if there is a `decay`."""
    sizes = validate.check_inputs(arrays, STEP_DIMS)
    validate.check_array("state", state, "B HV K V", sizes)
    options = {"scale": validate.check_scale(scale, sizes), "negative_eigenvalues": negative_eigenvalues}
    inputs, state = {name: jnp.asarray(x) for name, x in arrays.items()}, jnp.asarray(state)
    names = check_names(implementation, _IMPLEMENTATIONS)
    name = first_supported(names, functools.partial(_unsupported_reason, inputs=inputs, state=state, decay=decay))
    return _IMPLEMENTATIONS[name](*inputs.values(), state, decay, **options)


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
      implementation: None for the best that is supported, a name ("mosaic_gpu", "scan") for that or an error, or a
        sequence of names. On a Hopper GPU "mosaic_gpu" is one kernel that updates the state in place where it may: in a
        loop, or given away by `jax.jit(..., donate_argnames="state")`. Its derivatives are those of "scan".

    Returns:
      o: [B, HV, V] in v's dtype.
      state: the new state, in the dtype of the old.

    Raises:
      ValueError, TypeError: at trace time, naming the argument, what it is and what was expected.
      NotImplementedError: with the reason, where no implementation asked for supports the inputs.
    """
    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return _run(implementation, arrays, state, None, scale=scale, negative_eigenvalues=False)


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
    return _run(implementation, arrays, state, decay, scale=scale, negative_eigenvalues=negative_eigenvalues)
