"""Residual streams: the running sum, and Kimi K3's attention over the sums of earlier blocks of layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kda_jax.layers.norm import EPSILON
from kda_jax.ops.types import state_dtype


class AttentionResidual(nnx.Module):
    """What a sublayer reads: a mixture of the sources, chosen token by token (Kimi K3, attention residuals):

        y = sum_i p_i x_i        p = softmax_i(w^T RMSNorm(x_i))

    over the sums x_i of the finished blocks of layers and of the unfinished one. At first w = 0: the plain mean.

    Args:
      features: width D of the stream.
      param_dtype: of the norm's scale and of w. The mixture is computed in float32.
    """

    def __init__(self, features: int, *, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(features, epsilon=EPSILON, param_dtype=param_dtype, rngs=rngs)
        self.proj = nnx.Linear(
            features, 1, use_bias=False, kernel_init=nnx.initializers.zeros, param_dtype=param_dtype, rngs=rngs
        )

    def __call__(self, sources: tuple[Float[Array, "B T D"], ...]) -> Float[Array, "B T D"]:
        x = jnp.stack(sources)
        wide = x.astype(state_dtype(x.dtype))
        weights = jax.nn.softmax(self.proj(self.norm(wide)), axis=0)
        return jnp.sum(weights * wide, axis=0).astype(x.dtype)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["total", "blocks"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Stream:
    """What the layers so far have written.

    Attributes:
      total: [B, T, D], the sum of the embedding and of what sublayers wrote, since the latest block began; None at a
        block's start.
      blocks: the totals of the finished blocks, the embedding alone first; empty for plain residuals.
    """

    total: Float[Array, "B T D"] | None
    blocks: tuple[Float[Array, "B T D"], ...] = ()

    def read(self, mixture: AttentionResidual | None) -> Float[Array, "B T D"]:
        """The input of the next sublayer: by attention where there are blocks to attend to, the total otherwise."""
        assert self.total is not None  # a block's first sublayer reads before the block begins
        return self.total if mixture is None or not self.blocks else mixture((*self.blocks, self.total))

    def add(self, y: Float[Array, "B T D"]) -> "Stream":
        """The stream after a sublayer has written y."""
        return Stream(y if self.total is None else self.total + y, self.blocks)

    def begin_block(self) -> "Stream":
        """The stream with its total among the finished blocks."""
        assert self.total is not None
        return Stream(None, (*self.blocks, self.total))
