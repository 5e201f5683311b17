"""Root-mean-square normalisation: Flax's `RMSNorm`, and the head-wise gated one on a mixer's output."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kda_jax.ops.types import state_dtype

EPSILON = 1e-5  # of every RMSNorm, added to the mean square: the published models' value


class GatedRMSNorm(nnx.RMSNorm):
    """y = x * rsqrt(mean x^2 + eps) * scale * activation(gate), over each head's channels (Kimi Linear, section 4).

    Args:
      features: channels V of a head; all heads share `scale` [V].
      activation: of the gate, sigmoid as published.
      epsilon: added to the mean square.
      param_dtype: of `scale`.
    """

    def __init__(
        self,
        features: int,
        *,
        activation: Callable[[Array], Array] = jax.nn.sigmoid,
        epsilon: float = EPSILON,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        super().__init__(features, epsilon=epsilon, param_dtype=param_dtype, rngs=rngs)
        self.activation = activation

    def __call__(
        self, x: Float[Array, "B T HV V"], gate: Float[Array, "B T HV V"] | None = None
    ) -> Float[Array, "B T HV V"]:
        """Computed in float32, returned in x's dtype; without a gate, the norm alone."""
        assert self.scale is not None  # only Flax's own may have none
        y = x.astype(state_dtype(x.dtype))
        # Flax scales the root first, of which XLA makes two kernels on GPUs instead of one.
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        y = y * self.scale[...].astype(y.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
        y = y if gate is None else y * self.activation(gate.astype(y.dtype))
        return y.astype(x.dtype)
