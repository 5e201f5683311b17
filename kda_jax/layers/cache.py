"""What a layer remembers between calls: the same type for a prefill, its continuation and decoding token by token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kda_jax.layers.conv import Tail
from kda_jax.layers.sequences import number_sequences
from kda_jax.ops.types import SegmentIds, State, TokenMask


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tails", "state"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class DeltaCache:
    """Memory of a `KimiDeltaAttention`: one size, however many tokens it has seen.

    Attributes:
      tails: of the convolutions on q, k and v, the last W - 1 inputs each, as arrays [B, channels].
      state: [B, HV, K, V], float32.
    """

    tails: tuple[Tail, ...]
    state: State

    @property
    def batch_size(self) -> int:
        return self.state.shape[0]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["entries", "sequence", "length"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class AttentionCache:
    """Memory of an attention layer: the entries of at most `capacity` tokens a row. Padding takes no place.

    Attributes:
      entries: one array [B, capacity, ...] for each thing a token leaves behind: keys and values, or MLA's latent.
      sequence: [B, capacity] int32, which of the row's sequences a place belongs to, from 1; 0 is an empty place.
      length: [B] int32, tokens so far; more than the capacity once a row has overflowed.
    """

    entries: tuple[Float[Array, "B S *entry"], ...]
    sequence: Int[Array, "B S"]
    length: Int[Array, " B"]

    @property
    def batch_size(self) -> int:
        return self.sequence.shape[0]

    @property
    def capacity(self) -> int:
        return self.sequence.shape[1]


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Where the tokens of a call stand.

    Attributes:
      valid: [B, T], not padding.
      sequence: [B, T], the row's sequence, counted as in the cache; for padding that of the token before it.
      position: [B, T], the token's place in its sequence, from 0.
    """

    valid: TokenMask
    sequence: Int[Array, "B T"]
    position: Int[Array, "B T"]

    def mask(self) -> Bool[Array, "B 1 T T"]:
        """Which token may see which: itself and the earlier ones of its own sequence."""
        same = self.sequence[:, :, None] == self.sequence[:, None, :]
        causal = jnp.tril(jnp.ones((same.shape[1],) * 2, bool))[None]
        return (same & causal & self.valid[:, None, :])[:, None]


def locate(segment_ids: SegmentIds | None, x: Float[Array, "B T D"], cache: AttentionCache | None = None) -> Tokens:
    """Where the tokens of x stand, the first sequence of a row continuing the last one in its cache.

    Raises:
      ValueError: if the call alone is longer than the cache.
    """
    if cache is not None and segment_ids is None and x.shape[1] > cache.capacity:
        raise ValueError(f"{x.shape[1]} tokens do not fit a cache of capacity {cache.capacity}; make a larger one")
    valid, number = number_sequences(jnp.ones(x.shape[:2], jnp.int32) if segment_ids is None else segment_ids)
    rank = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1  # among the call's own tokens
    start = jax.lax.cummax(jnp.where(jnp.diff(number, axis=1, prepend=0) > 0, rank, 0), axis=1)
    position = rank - start
    if cache is None:
        return Tokens(valid, number + 1, position)
    current = jnp.maximum(jnp.max(cache.sequence, axis=1), 1)[:, None]
    kept = jnp.sum(cache.sequence == current, axis=1, dtype=jnp.int32)[:, None]
    return Tokens(valid, number + current, jnp.where(number == 0, kept + position, position))


def append(
    cache: AttentionCache, entries: tuple[Float[Array, "B T *entry"], ...], tokens: Tokens
) -> tuple[AttentionCache, Bool[Array, "B 1 T S"]]:
    """The cache with the entries of a call's tokens added, and which place each token may see.

    Tokens past the capacity are counted but not stored.

    Raises:
      ValueError: for entries of another shape than the cache's, or if a row overflows, where that can be known: outside
        `jit`.
    """
    held, made = ([tuple(entry.shape[2:]) for entry in group] for group in (cache.entries, entries))
    if held != made:
        raise ValueError(f"the cache holds entries of shapes {held} a token, this layer's have {made}")
    rank = jnp.cumsum(tokens.valid.astype(jnp.int32), axis=1)
    place = cache.length[:, None] + rank - 1
    length = cache.length + jnp.sum(tokens.valid, axis=1, dtype=jnp.int32)
    if not isinstance(length, jax.core.Tracer) and bool(jnp.any(length > cache.capacity)):
        raise ValueError(f"the cache has capacity {cache.capacity} and would hold {int(jnp.max(length))} tokens")
    rows = jnp.arange(place.shape[0])[:, None]
    target = jnp.where(tokens.valid, place, cache.capacity)  # padding falls off the end

    def write(old: Array, new: Array) -> Array:
        return old.at[rows, target].set(new.astype(old.dtype), mode="drop")

    sequence = write(cache.sequence, tokens.sequence)
    stored = tuple(write(old, new) for old, new in zip(cache.entries, entries, strict=True))
    same = tokens.sequence[:, :, None] == sequence[:, None, :]
    causal = jnp.arange(cache.capacity)[None, None] <= place[:, :, None]
    return AttentionCache(stored, sequence, length), (same & causal)[:, None]


def window(cache: AttentionCache, tokens: Tokens) -> Int[Array, "B 2"]:
    """Start and stop of the places that the only token of a call may see, after `append`; 0 and 0 for padding."""
    valid, position = tokens.valid[:, 0], tokens.position[:, 0]
    ends = jnp.stack([cache.length - 1 - position, jnp.minimum(cache.length, cache.capacity)], axis=1)
    return jnp.where(valid[:, None], ends, 0)


def init_attention_cache(batch_size: int, capacity: int, entries: tuple[jax.ShapeDtypeStruct, ...]) -> AttentionCache:
    """An empty cache for entries of the given shapes (without batch and place) and dtypes.

    Raises:
      ValueError: if `capacity` is not positive.
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, got {capacity}")
    return AttentionCache(
        tuple(jnp.zeros((batch_size, capacity, *e.shape), e.dtype) for e in entries),
        jnp.zeros((batch_size, capacity), jnp.int32),
        jnp.zeros(batch_size, jnp.int32),
    )
