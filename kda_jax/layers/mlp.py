"""The gated feed-forward block, and the two products of its gate and its values."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

Activation = Callable[[Float[Array, "*batch F"], Float[Array, "*batch F"]], Float[Array, "*batch F"]]
"""Of a gate and the values that it scales, of one shape."""


def swiglu(gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"]) -> Float[Array, "*batch F"]:
    """silu(gate) * up, as Kimi Linear."""
    return jax.nn.silu(gate) * up


@dataclasses.dataclass(frozen=True)
class SiTU:
    """beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta): a SwiGLU with bounds (Kimi K3).

    Attributes:
      beta: bound of the gate.
      linear_beta: bound of the values.

    Raises:
      ValueError: for a bound that is not above 0.
    """

    beta: float = 4.0
    linear_beta: float = 25.0

    def __post_init__(self) -> None:
        if min(self.beta, self.linear_beta) <= 0:
            raise ValueError(f"SiTU.beta and SiTU.linear_beta must be above 0, got {self}")

    def __call__(self, gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"]) -> Float[Array, "*batch F"]:
        gate = self.beta * jnp.tanh(gate / self.beta) * jax.nn.sigmoid(gate)
        return gate * (self.linear_beta * jnp.tanh(up / self.linear_beta))


class GatedMLP(nnx.Module):
    """y = W_down activation(W_gate x, W_up x), without biases.

    Args:
      in_features: width of x and y.
      hidden_features: width between.
      activation: `swiglu`, or a `SiTU`.
      dtype, param_dtype: of the computation (by default that of x and the weights together) and of the weights.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        activation: Activation = swiglu,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.activation = activation
        self.gate_proj = linear(in_features, hidden_features)
        self.up_proj = linear(in_features, hidden_features)
        self.down_proj = linear(hidden_features, in_features)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))
