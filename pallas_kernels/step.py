"""The decode kernel as one function of JAX."""

import functools
from typing import Any, NamedTuple

import jax

from kda_jax.ops.gates import Decay
from kda_jax.ops.scan import kda_token
from kda_jax.ops.types import State, StepBeta, StepLogDecay, StepQueries, StepValues
from pallas_kernels.activation import Activation
from pallas_kernels.decode import decode
from pallas_kernels.mapping import as_varying, over_batch_and_heads


def kda_step_mosaic(
    q: StepQueries,
    k: StepQueries,
    v: StepValues,
    g: StepLogDecay,
    beta: StepBeta,
    state: State,
    decay: Decay | None = None,
    *,
    scale: float,
    negative_eigenvalues: bool = False,
    interpret: Any = None,
) -> tuple[StepValues, State]:
    """One token on Hopper, from activated inputs as `kda_jax.kda_step`, or with a `decay` from raw ones as
    `kda_jax.kda_raw_step` (Kimi Linear, arXiv 2510.26692, section 3).

    The new state takes the place of the old one where that is given away (`jax.jit(..., donate_argnums=...)`, a loop's
    carry) and is a new array otherwise. Differentiated, in either mode, this is the plain step in XLA.

    Args:
      interpret: `plgpu.InterpretGPUParams` to emulate the kernel on a CPU.

    Returns:
      o [B, HV, V] in v's dtype; the new state [B, HV, K, V] in the old one's.
    """
    return _step(_Static(float(scale), bool(negative_eigenvalues), interpret), q, k, v, g, beta, state, decay)


class _Static(NamedTuple):
    scale: float
    negative_eigenvalues: bool
    interpret: Any


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _step(static: _Static, *inputs: Any) -> tuple[jax.Array, jax.Array]:
    *arrays, decay = inputs
    axes, activation = "b h k, b h k, b j v, b j k, b j, b j k v", None
    if decay is not None:
        arrays += [decay.A_log, decay.dt_bias]
        axes, activation = axes + ", j, j k", Activation(decay.lower_bound, static.negative_eigenvalues)
    run = over_batch_and_heads(
        _local,
        (static.scale, activation, static.interpret),
        axes,
        "b j v, b j k v",
        value_heads_a_head=arrays[2].shape[1] // arrays[0].shape[1],
        partition=static.interpret is None,  # its callbacks have effects, which a partitioning rule does not take
    )
    return as_varying(run(*arrays), arrays)


def _local(static: tuple[float, Activation | None, Any], *inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    scale, activation, interpret = static
    return decode(*inputs, scale=scale, activation=activation, interpret=interpret)


@_step.defjvp
def _plain(static: _Static, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    plain = functools.partial(kda_token, scale=static.scale, negative_eigenvalues=static.negative_eigenvalues)
    return jax.jvp(plain, primals, tangents)
