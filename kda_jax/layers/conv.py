"""Depthwise causal convolution over the last few tokens of the same sequence (Kimi Linear, section 4)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kda_jax.layers.sequences import number_sequences
from kda_jax.ops.types import SegmentIds

Tail = tuple[Float[Array, "B C"], ...]
"""The W - 1 inputs before a row's next one, oldest first: an array each, that a loop can overwrite in place."""


class ShortConvolution(nnx.Module):
    """y_t = silu(sum_j w_j x_{t-j}) over the `width` latest tokens of the sequence, channel by channel, without bias.

    Padding is as if it were not there: the tokens on its two sides are neighbours, its output is 0, the tail stays.

    Args:
      features: channels C.
      width: taps W; 0 leaves only the SiLU.
      dtype: of the computation, by default that of the input and the weight together.
      param_dtype: of the weight.

    Attributes:
      weight: [W, C]; row W - 1 multiplies the current token (the published order, transposed).

    Raises:
      ValueError: if `width` is negative.
    """

    def __init__(
        self,
        features: int,
        width: int = 4,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if width < 0:
            raise ValueError(f"width must be at least 0, got {width}")
        self.features, self.width, self.dtype = features, width, dtype
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "uniform", in_axis=0, out_axis=())
        self.weight = nnx.Param(init(rngs.params(), (width, features), param_dtype)) if width else None

    def init_tail(self, batch_size: int, dtype: DTypeLike) -> Tail:
        """What precedes a sequence: W - 1 zero tokens."""
        return tuple(jnp.zeros((batch_size, self.features), dtype) for _ in range(self.width - 1))

    def __call__(
        self, x: Float[Array, "B T C"], tail: Tail, segment_ids: SegmentIds | None = None
    ) -> tuple[Float[Array, "B T C"], Tail]:
        """The convolved tokens, and the last W - 1 inputs of the row's last sequence for the next call.

        Args:
          x: [B, T, C].
          tail: the W - 1 inputs before the row's first sequence.
          segment_ids: [B, T]; equal ids are one sequence, 0 is padding.
        """
        if self.weight is None:
            y = jax.nn.silu(x)
            return (y if segment_ids is None else jnp.where((segment_ids != 0)[..., None], y, 0)), tail
        x, weight = nnx.nn.dtypes.promote_dtype((x, self.weight[...]), dtype=self.dtype)
        tail_dtype = tail[0].dtype if tail else x.dtype
        tail = tuple(token.astype(x.dtype) for token in tail)
        extended = jnp.concatenate([*(token[:, None] for token in tail), x], axis=1)
        length = x.shape[1]
        if segment_ids is None or length <= 1:  # a single token continues the row's sequence, whatever its id
            taps = [extended[:, j : j + length] for j in range(self.width)]
            new_tail = [extended[:, length + j] for j in range(self.width - 1)]
            if segment_ids is not None:
                valid = jnp.any(segment_ids != 0, axis=1)[:, None]
                new_tail = [jnp.where(valid, new, old) for new, old in zip(new_tail, tail, strict=True)]
        else:
            taps, new_tail = _segment_taps(extended, segment_ids, self.width)
        y = jax.nn.silu(sum(tap * w[None, None] for tap, w in zip(taps, weight, strict=True)))
        y = y if segment_ids is None else jnp.where((segment_ids != 0)[..., None], y, 0)
        return y, tuple(token.astype(tail_dtype) for token in new_tail)


def _segment_taps(
    extended: Float[Array, "B W-1+T C"], segment_ids: SegmentIds, width: int
) -> tuple[list[Float[Array, "B T C"]], list[Float[Array, "B C"]]]:
    """For each of the `width` taps, oldest first, its token in the sequence or 0; and the new tail."""
    first = jnp.take_along_axis(segment_ids, jnp.argmax(segment_ids != 0, axis=1)[:, None], axis=1)
    owner = jnp.where(first == 0, 1, first)  # a row of nothing but padding keeps its tail
    ids = jnp.concatenate([jnp.repeat(owner, width - 1, axis=1), segment_ids], axis=1)
    valid, sequence = number_sequences(ids)
    size = ids.shape[1]
    position = jnp.arange(size)[None]
    latest = jax.lax.cummax(jnp.where(valid, position, -1), axis=1)
    following = jax.lax.cummin(jnp.where(valid, position, size), axis=1, reverse=True)
    before = jnp.pad(latest[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    after = jnp.pad(following[:, 1:], ((0, 0), (0, 1)), constant_values=size)

    source = target = jnp.where(valid, position, -1)
    end = latest[:, -1:]
    taps, tail = [], []
    for step in range(width):
        same = [(i >= 0) & (_at(sequence, i) == sequence) for i in (source, target)]
        taps.append(_move(extended, jnp.where(same[0], source, -1), jnp.where(same[1], target, -1))[:, width - 1 :])
        source = jnp.where(source < 0, -1, _at(before, source))
        target = jnp.where(target < 0, -1, _at(after, target))
        target = jnp.where(target == size, -1, target)
        if step < width - 1:
            kept = (end >= 0) & (_at(sequence, end) == sequence[:, -1:])
            token = jnp.take_along_axis(extended, jnp.maximum(end, 0)[..., None], 1)[:, 0]
            tail.append(jnp.where(kept, token, 0))
            end = jnp.where(end < 0, -1, _at(before, end))
    return taps[::-1], tail[::-1]


def _at(table: Int[Array, "B S"], index: Int[Array, "B R"]) -> Int[Array, "B R"]:
    return jnp.take_along_axis(table, jnp.maximum(index, 0), axis=1)


@jax.custom_vjp
def _move(x: Float[Array, "B S C"], source: Int[Array, "B S"], target: Int[Array, "B S"]) -> Float[Array, "B S C"]:
    """Row t of the result is x's row source[t], or 0 where that is -1; `target` is the inverse map.

    Knowing both makes the gradient a gather too, not a scatter.
    """
    return jnp.where((source >= 0)[..., None], jnp.take_along_axis(x, jnp.maximum(source, 0)[..., None], axis=1), 0)


def _move_fwd(x, source, target):
    return _move(x, source, target), (source, target)


def _move_bwd(maps, dy):
    source, target = maps
    return _move(dy, target, source), None, None


_move.defvjp(_move_fwd, _move_bwd)
