"""Packed sequences: `segment_ids` and `cu_seqlens` become one plan that every implementation reads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from kda_jax.ops.types import CuSeqlens, SegmentIds, TokenMask


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["valid", "reset", "slot", "cu_seqlens"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Packing:
    """Where the sequences of a packed batch are.

    Attributes:
      valid: [B, T], the token belongs to a sequence; any other leaves the state alone and gives a zero output.
      reset: [B, T], the state before the token is zero: a later sequence of a row begins here.
      slot: [T], the sequence that owns the token's state, or None when a row has one state (`segment_ids`).
      cu_seqlens: [N + 1], given with `slot`.
    """

    valid: TokenMask
    reset: TokenMask | None
    slot: Int[Array, " T"] | None = None
    cu_seqlens: CuSeqlens | None = None

    def marks(self) -> Int[Array, "B T"]:
        """`valid` and `reset` in one: 0 for padding, 1 where the state before the token is zero, 2 elsewhere."""
        mark = 2 if self.reset is None else jnp.where(self.reset, 1, 2)
        return jnp.where(self.valid, mark, 0).astype(jnp.int32)


def select_valid(packing: Packing | None, *arrays: Array) -> tuple[Array, ...]:
    """The arrays with the rows of padding tokens set to zero, by select, so that nothing in them reaches a gradient."""
    if packing is None:
        return arrays
    return tuple(jnp.where(packing.valid.reshape(*packing.valid.shape, *(1,) * (x.ndim - 2)), x, 0) for x in arrays)


def plan_segments(segment_ids: SegmentIds) -> Packing:
    """The plan of `segment_ids`: a sequence begins where the id differs from the last id that was not padding."""
    valid = segment_ids != 0
    last = jax.lax.cummax(jnp.where(valid, jnp.arange(segment_ids.shape[1])[None], 0), axis=1)
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0)))
    previous = jnp.take_along_axis(segment_ids, before, axis=1)  # where there is none, of token 0: padding or itself
    return Packing(valid, valid & (previous != 0) & (segment_ids != previous))


def plan_cu_seqlens(cu_seqlens: CuSeqlens, num_tokens: int) -> Packing:
    """The plan of `cu_seqlens` for one row of `num_tokens`; equal neighbours are empty sequences."""
    token = jnp.arange(num_tokens)
    slot = jnp.searchsorted(cu_seqlens, token, side="right") - 1
    valid = (slot >= 0) & (slot < cu_seqlens.shape[0] - 1)
    return Packing(valid[None], None, jnp.clip(slot, 0, max(cu_seqlens.shape[0] - 2, 0)), cu_seqlens)


def check_cu_seqlens(cu_seqlens: np.ndarray, num_tokens: int) -> None:
    """Raises ValueError where a concrete `cu_seqlens` decreases or leaves the row."""
    if np.any(np.diff(cu_seqlens) < 0) or cu_seqlens[0] < 0 or cu_seqlens[-1] > num_tokens:
        raise ValueError(
            f"cu_seqlens must not decrease and must stay within [0, T] = [0, {num_tokens}], got {cu_seqlens}"
        )


@functools.partial(jax.tree_util.register_dataclass, data_fields=["source", "target", "slot", "spans"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Alignment:
    """The tokens of packed sequences moved so that each sequence begins a chunk.

    Attributes:
      source: [A], the token that aligned position a holds, or a number past T of its own; A is a multiple of the chunk.
      target: [T], the aligned position of each token, or for one of no sequence a number past A of its own.
      slot: [A // C], the sequence that each chunk belongs to.
      spans: [N, 2], the first chunk and the number of chunks of each sequence.
    """

    source: Int[Array, " A"]
    target: Int[Array, " T"]
    slot: Int[Array, " A//C"]
    spans: Int[Array, "N 2"]

    def gather(self, x: Shaped[Array, "1 T *rest"], between: float = 0) -> Shaped[Array, "1 A *rest"]:
        """The tokens of x in their aligned positions, `between` them where there is none."""
        return _take(x, self.source, between)

    def restore(self, x: Shaped[Array, "1 A *rest"]) -> Shaped[Array, "1 T *rest"]:
        """The tokens of aligned x in their own positions, zeros where a token belongs to no sequence."""
        return _take(x, self.target, 0)


def _take(x: Array, index: Array, missing: float) -> Array:
    """x[:, index], `missing` past the end. No index occurs twice, so that the gradient needs no atomic sums."""
    return x.at[:, index].get(mode="fill", fill_value=missing, unique_indices=True)


def align(cu: CuSeqlens, slot: Int[Array, " T"], chunk_size: int) -> Alignment:
    """The alignment of packed sequences to chunks: at most T // C + N chunks, whatever the lengths."""
    num_tokens, num_sequences = slot.shape[0], cu.shape[0] - 1
    lengths = -(-jnp.diff(cu) // chunk_size)
    ends = jnp.cumsum(lengths)  # the chunk after each sequence's last
    starts = ends - lengths
    chunk = jnp.arange(num_tokens // chunk_size + num_sequences)
    owner = jnp.minimum(jnp.searchsorted(ends, chunk, side="right"), num_sequences - 1)
    first = cu[owner] + (chunk - starts[owner]) * chunk_size
    source = first[:, None] + jnp.arange(chunk_size)[None]
    valid = (source < cu[owner + 1][:, None]).reshape(-1)
    position, token = jnp.arange(valid.shape[0]), jnp.arange(num_tokens)
    source = jnp.where(valid, source.reshape(-1), num_tokens + position)
    target = starts[slot] * chunk_size + token - cu[slot]
    target = jnp.where((cu[0] <= token) & (token < cu[-1]), target, position.shape[0] + token)
    return Alignment(source, target, owner, jnp.stack([starts, lengths], axis=1))
