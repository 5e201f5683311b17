"""The decoding benchmark: what its lines hold, what it refuses, and that its caches are as after a prompt."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from experiments import decode_bench, metrics
from experiments.errors import ConfigError
from kda_jax.layers import AttentionCache, DeltaCache
from kda_jax.models.decoding import Decoder, Request, begin


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(decode_bench, "STEPS", 2)
    monkeypatch.setattr(decode_bench, "ROUNDS", 3)


def test_lines_and_table(tmp_path):
    settings = decode_bench.parse("tiny", ["full", "hybrid"], ["32", "8"], None)
    rows = json.loads(json.dumps(list(decode_bench.run(settings)), allow_nan=False))
    assert [(row["model"], row["context"]) for row in rows] == [(m, c) for m in ("full", "hybrid") for c in (8, 32)]
    full, hybrid = rows[1], rows[3]
    assert (full["attention_bytes_a_token"], hybrid["attention_bytes_a_token"]) == (4 * 12 * 4, 12 * 4)
    assert full["cache_bytes"] == 2 * 256 * 4 * (12 + 1) * 4 + 4 * 2 * 4
    for row in rows:
        assert 0 < row["min_ms_a_token"] <= row["ms_a_token"] < 1e3 * row["first_sample_s"]
        assert row["tokens_a_second"] == pytest.approx(2e3 / row["ms_a_token"])
    lines = decode_bench.table([*rows, {**hybrid, "context": 64, "error": "too large"}]).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert [row[:2] for row in cells] == [[str(c), m] for c in (8, 32) for m in ("full", "hybrid")] + [["64", "hybrid"]]
    ratio = full["ms_a_token"] / hybrid["ms_a_token"]
    assert cells[3][4:] == [
        f"{hybrid['ms_a_token']:.2f}",
        f"{hybrid['ms_a_token'] / rows[2]['ms_a_token']:.2f}",
        f"{hybrid['tokens_a_second']:,.0f}",
        f"{ratio:.2f}",
    ]
    assert cells[4][4] == "failed"
    header = decode_bench.header(settings)
    log = metrics.Log(tmp_path / "out.jsonl", header, 0)
    log.append(rows)
    log.close()
    assert metrics.read(tmp_path / "out.jsonl")[1] == rows
    assert header["config"] == {"size": "tiny", "models": ["full", "hybrid"], "contexts": [8, 32], "batch": 2} | {
        "steps": 2,
        "rounds": 3,
    }


def test_the_cache_is_as_after_a_prompt():
    """One sequence of the given length in every row, on which decoding goes on."""
    model = decode_bench.random_model(
        dataclasses.replace(decode_bench.SIZES["tiny"], pattern=("kda", "mla"), num_layers=2)
    )
    shapes = jax.eval_shape(lambda: model.init_cache(2, 12))
    cache = decode_bench.filled_cache(shapes, 9)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), cache) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    delta, attention = cache
    assert isinstance(delta, DeltaCache)
    assert isinstance(attention, AttentionCache)
    assert all(jnp.std(x) > 0.5 for x in jax.tree.leaves((delta, attention.entries)))
    assert attention.sequence.tolist() == [[1] * 9 + [0] * 3] * 2
    state, tokens = Decoder(model).decode(begin([Request([1], 2)] * 2, cache), 2)
    assert jnp.all(tokens >= 0)
    assert state.cache[1].length.tolist() == [11, 11]
    assert state.cache[1].sequence.tolist() == [[1] * 11 + [0]] * 2
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state.cache))


def test_what_does_not_fit_says_so(monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_in_use": 0, "bytes_limit": 2**30}

    monkeypatch.setattr(decode_bench.jax, "devices", lambda: [Device()])
    model = decode_bench.random_model(dataclasses.replace(decode_bench.SIZES["tiny"], pattern=("mla",)))
    row = decode_bench.measure(model, 2**30, 2)
    assert row["error"] == "the cache does not fit the 1 GiB that JAX may use"


def test_size_of_the_full_cache():
    """64 rows of 131,072 tokens with attention in all layers fit an H200 beside the weights."""
    config = dataclasses.replace(decode_bench.SIZES["1.3b"], pattern=("mla",))
    model = decode_bench.abstract_model(config)
    cache = jax.eval_shape(lambda: model.init_cache(64, 131328))
    assert 100 < decode_bench.size_in_bytes(cache) / 2**30 < 112


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1b", ["kda"], None, None), "--size=1b: give one of 1.3b, tiny"),
        ((None, ["mla"], None, None), "--models=mla: give some of full, hybrid, kda"),
        ((None, [], None, None), "--models=: give some of"),
        ((None, ["kda"], ["8", "-1"], None), "--contexts=8,-1: '-1' is not a positive number"),
    ],
    ids=str,
)
def test_wrong_flags(arguments, message):
    with pytest.raises(ConfigError, match=message):
        decode_bench.parse(*arguments)


def test_defaults_of_a_cpu():
    assert decode_bench.parse(None, ["kda"], None, None) == decode_bench.Settings("tiny", ["kda"], [64, 256], 2)
