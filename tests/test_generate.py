"""Generation equals asking the model anew for every token, however prompts are cut, padded, packed and batched."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from flax import nnx
from generation_cases import CONFIG, VOCAB, assert_same, build, call, continue_greedily, prompts

from kda_jax.models import HybridLM
from kda_jax.models.decoding import NOTHING, Decoder, Request, begin, pieces
from kda_jax.models.generate import generate, stream
from kda_jax.models.sampling import Sampling

LENGTHS = (9, 1, 14, 6)


def test_prefill_decoding_chunks_and_packing_are_one(rng):
    """Logits of two prompts: whole, from a cache, in chunks, token by token, padded on the left, and packed."""
    model = build()
    a, b = prompts(rng, (16, 11))
    ids = np.array([[1] * 16, [0] * 5 + [1] * 11], np.int32)
    tokens = np.array([a, [3] * 5 + b], np.int32)
    want = np.asarray(call(model, tokens, ids)[0])[ids == 1]
    for name, size in {"prefill": 16, "chunks": 4, "decoding": 1}.items():
        cache, logits = model.init_cache(2, 20), []
        for start in range(0, 16, size):
            part = slice(start, start + size)
            piece, cache = call(model, tokens[:, part], ids[:, part], cache)
            logits.append(piece)
        tolerances.assert_close(np.concatenate(logits, axis=1)[ids == 1], want, 1e-5, name)
    packed = call(model, np.array([a + b], np.int32), np.array([[1] * 16 + [2] * 11], np.int32))[0]
    tolerances.assert_close(packed[0], want, 1e-5, "packed")


def test_greedy(rng):
    """Unequal prompts, prefilled in chunks of 4."""
    model = build()
    texts = prompts(rng, LENGTHS)
    want = [continue_greedily(model, text, 8) for text in texts]
    assert len({token for row in want for token in row}) > 3, "a model that always says the same tests little"
    assert generate(model, texts, max_new_tokens=8, chunk_size=4) == want


def test_stop_tokens(rng):
    """A row ends with its first stop token; the others go on."""
    model = build()
    texts = prompts(rng, LENGTHS)
    free = [continue_greedily(model, text, 8) for text in texts]
    stop = (free[0][3], free[2][1])
    want = [continue_greedily(model, text, 8, stop) for text in texts]
    assert len({len(row) for row in want}) > 1
    assert generate(model, texts, max_new_tokens=8, stop_tokens=stop, chunk_size=4) == want


def test_stream(rng):
    """The same tokens in bursts, of requests that differ in everything."""
    model = build()
    texts = prompts(rng, LENGTHS)
    limits = (8, 3, 1, 6)
    requests = [Request(text, limit) for text, limit in zip(texts, limits, strict=True)]
    bursts = list(stream(model, requests, burst=3, chunk_size=4))
    assert [burst.shape for burst in bursts] == [(4, 3)] * 3
    rows = np.concatenate(bursts, axis=1)
    for row, text, limit in zip(rows, texts, limits, strict=True):
        assert row.tolist() == continue_greedily(model, text, limit) + [NOTHING] * (9 - limit)
    first = next(stream(model, requests, burst=3, chunk_size=4))
    np.testing.assert_array_equal(first, bursts[0])


def test_sampled_rows(rng):
    """The seed decides; a row does not depend on the others."""
    model = build()
    texts = prompts(rng, LENGTHS)
    options = {"max_new_tokens": 8, "sampling": Sampling(1.0, top_k=9, top_p=0.9), "chunk_size": 4}
    tokens = generate(model, texts, seed=1, **options)
    assert tokens == generate(model, texts, seed=1, **options)
    assert tokens != generate(model, texts, seed=2, **options)
    changed = generate(model, [texts[0], *prompts(rng, LENGTHS[1:])], seed=1, **options)
    assert tokens[0] == changed[0]
    assert tokens[1:] != changed[1:]
    same = generate(model, [texts[0]] * 4, seed=1, **options)
    assert len(set(map(tuple, same))) > 1, "rows draw numbers of their own"


def test_calls_alike_share_programs(rng, monkeypatch):
    """Other prompts, settings and seeds of similar lengths are not compiled again, nor are models of one structure."""
    options = {"max_new_tokens": 8, "chunk_size": 4}
    generate(build(), prompts(rng, LENGTHS), **options)

    def traced(*_, **__):
        raise AssertionError("compiled again")

    monkeypatch.setattr(HybridLM, "__call__", traced)
    monkeypatch.setattr(HybridLM, "init_cache", traced)
    generate(nnx.clone(build()), prompts(rng, (2, 14, 5, 1)), sampling=Sampling(0.7, top_p=0.5), seed=5, **options)


def test_left_padding_leaves_no_trace(rng):
    """The cache after padding and a prompt is that of the prompt, whatever tokens stand in the padding."""
    decoder = Decoder(build())
    text = np.array(prompts(rng, (6,)), np.int32)
    ids = np.array([[0] * 5 + [1] * 6], np.int32)
    caches = []
    for filler in (1, VOCAB - 1):
        padded = np.concatenate([np.full((1, 5), filler, np.int32), text], axis=1)
        caches.append(decoder.prefill(decoder.init_cache(1, 16), (padded, ids)))
    assert_same(*caches)
    plain = decoder.prefill(decoder.init_cache(1, 16), (text, None))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), caches[0], plain)
    nothing = decoder.prefill(decoder.init_cache(1, 16), (padded, np.zeros_like(ids)))
    assert_same(nothing, decoder.init_cache(1, 16))


def test_pieces():
    """Whole chunks, then a power of two; ids only where there is padding; the last token is left for the first step."""
    assert pieces([[5]], 4) == []
    found = pieces([range(1, 12), [7, 8, 9]], 4)
    assert [tokens.shape for tokens, _ in found] == [(2, 4), (2, 4), (2, 2)]
    np.testing.assert_array_equal(np.concatenate([tokens for tokens, _ in found], axis=1)[0], range(1, 11))
    np.testing.assert_array_equal(found[0][1], [[1, 1, 1, 1], [1, 1, 0, 0]])
    assert [ids is None for _, ids in pieces([range(11)], 4)] == [True, True, True]
    (_, first), (tokens, second) = pieces([range(8)], 4)
    assert first is None
    np.testing.assert_array_equal(second, [[1, 1, 1, 0]])
    assert tokens.shape == (1, 4)


def test_caches_are_decoded_in_place():
    """The compiled loop has the caches' own memory for its result and no copy of them beside it."""
    decoder = Decoder(build())
    capacity = 4096
    state = begin([Request([1], 2), Request([2], 2)], decoder.init_cache(2, capacity))
    size = sum(x.nbytes for x in jax.tree.leaves(state.cache))
    program = decoder._decode.lower(decoder._params, state, 8).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    entries = max(x.nbytes for x in jax.tree.leaves(state.cache))
    scores = 2 * CONFIG.num_heads * capacity * 4
    assert memory.temp_size_in_bytes < entries + 8 * scores


def test_dtype_of_a_cache_is_kept():
    """A bfloat16 state stays one, in a prefill and in decoding."""
    decoder = Decoder(build())
    cache = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, decoder.init_cache(1, 16))
    dtypes = [x.dtype for x in jax.tree.leaves(cache)]
    cache = decoder.prefill(cache, (np.ones((1, 4), np.int32), None))
    assert [x.dtype for x in jax.tree.leaves(cache)] == dtypes
    state = jax.eval_shape(lambda state: decoder.decode(state, 2)[0], begin([Request([1], 2)], cache))
    assert [x.dtype for x in jax.tree.leaves(state.cache)] == dtypes


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ([], 3, "a prompt must have at least one token"),
        ([1], 0, "max_new_tokens must be at least 1, got 0"),
        ([1, VOCAB, 2], 3, f"prompt has the token {VOCAB}; the model's are 0 to {VOCAB - 1}"),
        ([-1], 3, "prompt has the token -1"),
    ],
)
def test_request_errors(prompt, limit, message):
    with pytest.raises(ValueError, match=message):
        generate(build(), [[1], prompt], max_new_tokens=limit)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt", [1.7, 2], r"prompt must be a list of integers that int32 holds, got \[1.7, 2\]"),
        ("prompt", [[1], [2]], "prompt must be a list of integers"),
        ("prompt", "ab", "prompt must be a list of integers"),
        ("prompt", 5, "prompt must be a list of integers that int32 holds, got 5"),
        ("max_new_tokens", "5", "max_new_tokens must be an integer that int32 holds, got '5'"),
        ("max_new_tokens", 2.5, "max_new_tokens must be an integer that int32 holds, got 2.5"),
        ("stop_tokens", [2**40], "stop_tokens must be a list of integers that int32 holds"),
        ("seed", 2**32, "seed must be an integer that uint32 holds"),
        ("seed", -1, "seed must be an integer that uint32 holds"),
        ("sampling", Sampling(1.0, 2**40), "sampling.top_k must be an integer that int32 holds"),
        ("sampling", 0.8, r"sampling must be a Sampling, got 0.8"),
        ("sampling", Sampling(None), r"sampling.temperature must be a number, got None"),
        ("sampling", Sampling(1.0, top_p="0.9"), r"sampling.top_p must be a number, got '0.9'"),
        ("sampling", Sampling(np.ones(2)), r"sampling.temperature must be a number, got array"),
    ],
)
def test_requests_that_would_stop_others_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Request([1], 2), **{field: value})


@pytest.mark.parametrize("value", [0, 2.5])
@pytest.mark.parametrize("name", ["burst", "chunk_size"])
def test_stream_errors_come_at_the_call(name, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got {value}"):
        stream(build(), [Request([1], 3)], **{name: value})


def test_no_prompts():
    assert generate(build(), [], max_new_tokens=3) == []
