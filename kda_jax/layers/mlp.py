"""The gated feed-forward block."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class SwiGLU(nnx.Module):
    """y = W_down (silu(W_gate x) * (W_up x)), without biases.

    Args:
      in_features: width of x and y.
      hidden_features: width between.
      dtype, param_dtype: of the computation (by default that of x and the weights together) and of the weights.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.gate_proj = linear(in_features, hidden_features)
        self.up_proj = linear(in_features, hidden_features)
        self.down_proj = linear(hidden_features, in_features)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
