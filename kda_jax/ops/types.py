"""The notation of the whole project, named once.

| symbol | meaning |
|--------|---------|
| B, T   | batch rows, tokens in a row |
| H, HV  | query/key heads, value heads; HV is a multiple of H and value head j reads key head j // (HV // H) |
| K, V   | key and value channels of a head |
| N      | sequences that own a state: N = B, or the number of packed sequences when `cu_seqlens` is given |
| C      | tokens in a chunk |

The recurrence of one head (Kimi Linear, arXiv 2510.26692, section 3), S in R^{K x V}:

    S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T          o_t = scale * S_t^T q_t
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

Queries = Float[Array, "B T H K"]
Keys = Float[Array, "B T H K"]
Values = Float[Array, "B T HV V"]
LogDecay = Float[Array, "B T HV K"]  # natural log, <= 0
Beta = Float[Array, "B T HV"]  # write strength, in [0, 1], or [0, 2] with negative eigenvalues
State = Float[Array, "N HV K V"]
SegmentIds = Int[Array, "B T"]  # equal ids are one sequence, 0 is padding
CuSeqlens = Int[Array, " N+1"]  # sequence n holds the tokens cu_seqlens[n] <= t < cu_seqlens[n + 1] of the only row
TokenMask = Bool[Array, "B T"]

StepQueries = Float[Array, "B H K"]
StepValues = Float[Array, "B HV V"]
StepLogDecay = Float[Array, "B HV K"]
StepBeta = Float[Array, "B HV"]


def state_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype of states, decays and sums for values of `dtype`: float32, or float64 for float64."""
    return jnp.promote_types(jnp.float32, dtype)


# What o, the final state and the states of chunks are called for policies of `jax.checkpoint`, where kernels made them.
RESULT_NAMES = ("kda_o", "kda_final_state", "kda_states")
