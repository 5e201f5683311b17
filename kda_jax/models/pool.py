"""Primitives of continuous batching: rows of a running batch addressed by slot, and checkpoints of shared prefixes.

A pool is a `Decoding` whose rows are slots. Every function here is one compiled program for all slots: a request joins
and leaves a running batch without a new one.
"""

import dataclasses
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kda_jax.layers.cache import AttentionCache, DeltaCache
from kda_jax.models.decoding import NOTHING, Decoder, Decoding
from kda_jax.models.hybrid import Cache
from kda_jax.models.sampling import GREEDY


def empty_pool(decoder: Decoder, num_slots: int, capacity: int, num_stop_tokens: int) -> Decoding:
    """`num_slots` rows at rest, each with room for `capacity` tokens."""
    return Decoding(
        cache=decoder.init_cache(num_slots, capacity),
        token=jnp.zeros(num_slots, jnp.int32),
        count=jnp.zeros(num_slots, jnp.int32),
        limit=jnp.zeros(num_slots, jnp.int32),
        key=jax.random.split(jax.random.key(0), num_slots),
        sampling=GREEDY.rows(num_slots),
        stop=jnp.full((num_slots, num_stop_tokens), NOTHING, jnp.int32),
    )


@functools.partial(jax.jit, donate_argnames="pool")
def join(pool: Decoding, slot: int | Array, row: Decoding) -> Decoding:
    """The pool with all of the one-row `row` in `slot`: nothing of what was there remains."""
    write = lambda whole, part: jax.lax.dynamic_update_index_in_dim(whole, part[0], slot, 0)  # noqa: E731
    return jax.tree.map(write, pool, row)


@functools.partial(jax.jit, donate_argnames="pool")
def leave(pool: Decoding, slot: int | Array) -> Decoding:
    """The pool with the row in `slot` at rest, whatever it still had to generate."""
    return dataclasses.replace(pool, limit=pool.limit.at[slot].set(pool.count[slot]))


@functools.partial(jax.jit, static_argnames="size")
def checkpoint(cache: Cache, start: int | Array, size: int) -> Cache:
    """A copy of what the latest `size` tokens of a one-row cache left behind, `start` tokens being before them.

    Of a linear mixer that is its state and convolution tails, one size however many tokens; of an attention layer the
    entries of these tokens alone, as a cache of capacity `size`. The rest of the prefix is in the checkpoints before.
    """
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)  # noqa: E731

    def take(layer):
        if isinstance(layer, DeltaCache):
            return layer
        return AttentionCache(tuple(map(cut, layer.entries)), cut(layer.sequence), layer.length)

    return tuple(map(take, cache))


@functools.partial(jax.jit, donate_argnames="cache")
def resume(cache: Cache, saved: Cache, start: int | Array) -> Cache:
    """The private one-row `cache`, which holds the `start` tokens before the checkpoint `saved`, with those of `saved`.

    `saved` stays as it is, for others.
    """
    put = lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis=1)  # noqa: E731

    def restore(layer, part):
        if isinstance(layer, DeltaCache):
            return part
        entries = tuple(put(*pair) for pair in zip(layer.entries, part.entries, strict=True))
        return AttentionCache(entries, put(layer.sequence, part.sequence), part.length)

    return tuple(restore(*pair) for pair in zip(cache, saved, strict=True))


class PrefixCache:
    """Checkpoints of prompts' beginnings, one for every whole chunk; the least recently used makes room, ends first.

    Args:
      chunk_size: tokens between checkpoints.
      max_checkpoints: how many are kept at most.
    """

    def __init__(self, chunk_size: int, max_checkpoints: int):
        self.chunk_size, self.max_checkpoints = chunk_size, max_checkpoints
        self._checkpoints: OrderedDict[bytes, Cache] = OrderedDict()

    def __len__(self) -> int:
        return len(self._checkpoints)

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """A digest of the first chunk, of the first two, and so on, as far as there are whole ones."""
        digest, keys = hashlib.sha256(), []
        for end in range(self.chunk_size, len(tokens) + 1, self.chunk_size):
            digest.update(np.asarray(tokens[end - self.chunk_size : end], np.int64).tobytes())
            keys.append(digest.digest())
        return keys

    def find(self, keys: Sequence[bytes]) -> list[Cache]:
        """The checkpoints of the longest prefix that has all of its own."""
        found: list[Cache] = []
        for key in keys:
            if key not in self._checkpoints:
                break
            found.append(self._checkpoints[key])
        self._use(keys[: len(found)])
        return found

    def add(self, keys: Sequence[bytes], saved: Cache) -> None:
        """Keep the checkpoint of the prefix that has the last of `keys`; those before are of its own prefixes."""
        self._checkpoints[keys[-1]] = saved
        self._use(keys)
        while len(self._checkpoints) > self.max_checkpoints:
            self._checkpoints.popitem(last=False)

    def _use(self, keys: Sequence[bytes]) -> None:
        """Beginnings last: they are of use without what follows, which is of none without them."""
        for key in reversed(keys):
            if key in self._checkpoints:
                self._checkpoints.move_to_end(key)
