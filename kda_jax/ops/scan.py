"""The definition of KDA: one token at a time."""

import jax
import jax.numpy as jnp

from kda_jax.ops.gates import Decay, l2_normalize, write_strength
from kda_jax.ops.packing import Packing, select_valid
from kda_jax.ops.types import (
    Beta,
    Keys,
    LogDecay,
    Queries,
    State,
    StepBeta,
    StepLogDecay,
    StepQueries,
    StepValues,
    Values,
    state_dtype,
)

_einsum = jax.tree_util.Partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def step(
    q: StepQueries, k: StepQueries, v: StepValues, g: StepLogDecay, beta: StepBeta, state: State, scale: float
) -> tuple[StepValues, State]:
    """One token: decay, correct by the delta rule, write, read; everything in the state's dtype.

    S <- Diag(exp g) S;   S <- S + beta k (v - S^T k)^T;   o = scale * S^T q
    """
    q, k, v, g, beta = (x.astype(state.dtype) for x in (q, k, v, g, beta))
    q, k = (jnp.repeat(x, v.shape[-2] // x.shape[-2], axis=-2) for x in (q, k))
    state = jnp.exp(g)[..., None] * state
    error = v - _einsum("bhkv,bhk->bhv", state, k)
    state = state + _einsum("bh,bhk,bhv->bhkv", beta, k, error)
    return scale * _einsum("bhkv,bhk->bhv", state, q), state


def kda_token(
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
) -> tuple[StepValues, State]:
    """`kda_jax.kda_step`, or `kda_raw_step` if there is a `decay`: o in v's dtype, the new state in that of the old."""
    if decay is not None:
        q, k, g, beta = l2_normalize(q), l2_normalize(k), decay(g), write_strength(beta, negative_eigenvalues)
    o, new_state = step(q, k, v, g, beta, state.astype(state_dtype(state.dtype)), scale)
    return o.astype(v.dtype), new_state.astype(state.dtype)


def kda_scan(
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecay,
    beta: Beta,
    *,
    scale: float,
    initial_state: State,
    packing: Packing | None = None,
) -> tuple[Values, State]:
    """The recurrence of `kda_jax.kda` by `jax.lax.scan` over tokens; the arguments are `kda`'s, already validated.

    Memory of its gradient is one state a token, so it serves as the definition and for short inputs.
    """

    def token(states, inputs):
        q, k, v, g, beta, reset, slot = inputs
        state = states if slot is None else jax.lax.dynamic_index_in_dim(states, slot, keepdims=True)
        state = state if reset is None else jnp.where(reset[:, None, None, None], 0, state)
        o, state = step(q, k, v, g, beta, state, scale)
        return state if slot is None else jax.lax.dynamic_update_index_in_dim(states, state[0], slot, 0), o

    reset = None if packing is None or packing.reset is None else packing.reset.T
    slot = None if packing is None else packing.slot
    inputs = [jnp.moveaxis(x, 1, 0) for x in select_valid(packing, q, k, v, g, beta)]
    final_state, o = jax.lax.scan(token, initial_state, (*inputs, reset, slot))
    (o,) = select_valid(packing, jnp.moveaxis(o, 0, 1).astype(v.dtype))
    return o, final_state
