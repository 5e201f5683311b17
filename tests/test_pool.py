"""Slots of a running batch: what is written to one, or happens in one, leaves the others bit for bit as they were."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generation_cases import CONFIG, EXPERTS, assert_same, build, prompts

from kda_jax.models.decoding import NOTHING, Decoder, Request, begin, pieces
from kda_jax.models.pool import PrefixCache, checkpoint, empty_pool, join, leave, resume
from kda_jax.models.sampling import Sampling

CAPACITY = 24
STEPS = 3


def row(decoder, prompt, limit=9, **options):
    """A prefilled request, ready to join."""
    cache = decoder.init_cache(1, CAPACITY)
    for piece in pieces([prompt], 8):
        cache = decoder.prefill(cache, piece)
    return begin([Request(prompt, limit, **options)], cache, 2)


def rows_of(tree, rows):
    return jax.tree.map(lambda x: x[np.array(rows)], tree)


def full(decoder, texts):
    """A pool of four slots with requests in the first three."""
    pool = empty_pool(decoder, 4, CAPACITY, 2)
    for slot, text in enumerate(texts):
        pool = join(pool, slot, row(decoder, text))
    return pool


def test_a_slot_at_rest_never_changes(rng):
    """Neither when the others decode nor when one of them joins or leaves; a request that has left stays as it was."""
    decoder = Decoder(build())
    a, b, c, d = prompts(rng, (7, 9, 6, 8))
    pool = full(decoder, (a, b, c))
    empty = jax.device_get(rows_of(pool, [3]).cache)
    pool, first = decoder.decode(pool, STEPS)
    assert np.all(first[:3] >= 0)
    assert np.all(first[3] == NOTHING)
    pool = leave(pool, 1)
    left = jax.device_get(rows_of(pool, [1]).cache)
    pool, second = decoder.decode(pool, STEPS)
    assert (np.asarray(second) >= 0).all(axis=1).tolist() == [True, False, True, False]
    assert_same(rows_of(pool, [1]).cache, left)
    assert_same(rows_of(pool, [3]).cache, empty)
    pool = join(pool, 1, row(decoder, d))
    pool, third = decoder.decode(pool, STEPS)
    alone, tokens = decoder.decode(join(empty_pool(decoder, 4, CAPACITY, 2), 1, row(decoder, d)), STEPS)
    assert third[1].tolist() == tokens[1].tolist()
    assert_same(rows_of(pool, [1]), rows_of(alone, [1]))


@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_nan_stays_in_its_slot(config, rng):
    """A request whose cache is NaN leaves the others bit for bit unchanged, and nothing in its slot for the next."""
    decoder = Decoder(build(config))
    texts = prompts(rng, (7, 9, 6))
    after = {}
    for spoilt in (False, True):
        pool = full(decoder, texts)
        if spoilt:
            bad = row(decoder, texts[1], sampling=Sampling(1.0, top_k=3))
            nan = lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
            pool = join(pool, 1, dataclasses.replace(bad, cache=jax.tree.map(nan, bad.cache)))
        pool, tokens = decoder.decode(pool, STEPS)
        after[spoilt] = jax.device_get((rows_of(pool, [0, 2, 3]), tokens[np.array([0, 2, 3])]))
        assert np.isnan(pool.cache[0].state[1]).any() == spoilt
    assert_same(after[False], after[True])
    fresh = row(decoder, texts[1])
    pool, tokens = decoder.decode(join(pool, 1, fresh), STEPS)
    alone, want = decoder.decode(join(empty_pool(decoder, 4, CAPACITY, 2), 1, row(decoder, texts[1])), STEPS)
    assert tokens[1].tolist() == want[1].tolist()
    assert_same(rows_of(pool, [1]), rows_of(alone, [1]))


def test_checkpoints_resume_bit_for_bit(rng):
    """Two requests go on from the same checkpoints, each in its own row; the checkpoints stay as they are."""
    decoder = Decoder(build())
    (shared,) = prompts(rng, (17,))
    cache, saved = decoder.init_cache(1, CAPACITY), []
    for number, piece in enumerate(pieces([shared], 8)):
        cache = decoder.prefill(cache, piece)
        saved.append(checkpoint(cache, 8 * number, 8))
    assert len(saved) == 2
    before = jax.device_get(saved)
    for text in (shared, [*shared[:16], 1]):
        private = decoder.init_cache(1, CAPACITY)
        for number, part in enumerate(saved):
            private = resume(private, part, 8 * number)
        assert_same(private, cache)
        _, got = decoder.decode(begin([Request(text, 4)], private, 2), STEPS)
        _, want = decoder.decode(row(decoder, text, 4), STEPS)
        assert got.tolist() == want.tolist()
    assert_same(saved, before)
    partly = resume(decoder.init_cache(1, CAPACITY), saved[0], 0)
    assert_same(partly, decoder.prefill(decoder.init_cache(1, CAPACITY), pieces([shared], 8)[0]))


def test_prefix_cache():
    """The longest prefix with checkpoints throughout; the least recently used goes first, ends before beginnings."""
    prefixes = PrefixCache(chunk_size=2, max_checkpoints=3)
    keys = prefixes.keys([1, 2, 3, 4, 5, 6, 7])
    assert len(keys) == 3
    assert prefixes.keys([1, 2, 3, 9, 5, 6])[:1] == keys[:1]
    assert not set(prefixes.keys([1, 2, 3, 9, 5, 6])[1:]) & set(keys)
    assert prefixes.find(keys) == []
    for end, saved in enumerate("abc", 1):
        prefixes.add(keys[:end], saved)
    assert prefixes.find(keys) == ["a", "b", "c"]
    assert prefixes.find(prefixes.keys([1, 2, 3, 4])) == ["a", "b"]
    prefixes.add([b"other"], "d")
    assert len(prefixes) == 3
    assert prefixes.find(keys) == ["a", "b"], "the end of the longest goes first"
    prefixes.add([b"new"], "e")
    assert prefixes.find(keys) == ["a", "b"], "used since"
    for end, saved in enumerate("abcdef", 1):
        prefixes.add(prefixes.keys(range(12))[:end], saved)
    assert prefixes.find(prefixes.keys(range(12))) == ["a", "b", "c"], "a prompt does not push out its own beginning"
