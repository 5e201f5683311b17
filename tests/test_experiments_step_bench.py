"""The benchmark of a training step: what its line holds, its count of operations, and what it refuses."""

import json

import jax
import pytest
from flax import nnx

from experiments import step_bench
from experiments.errors import ConfigError
from kda_jax.models import HybridLM
from kda_jax.models.hybrid import parameter_counts


def test_line(monkeypatch):
    monkeypatch.setattr(step_bench, "ROUNDS", 2)
    [row] = json.loads(json.dumps(list(step_bench.run(step_bench.parse("tiny", 4, 2))), allow_nan=False))
    assert row["tokens"] == 4 * 32
    assert 0 < row["min_ms"] <= row["median_ms"] < 1e3 * row["compile_s"]
    assert row["tokens_a_second"] == pytest.approx(1e3 * row["tokens"] / row["median_ms"])
    assert row["TFLOP/s"] == pytest.approx(row["tokens_a_second"] * row["operations_a_token"] / 1e12)
    assert row["mfu"] is None
    assert row["losses"] == sorted(row["losses"], reverse=True)  # the same tokens again and again


def test_header(monkeypatch):
    """It says what is measured, and with which of XLA's flags."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_some=false")
    header = json.loads(json.dumps(step_bench.header(step_bench.parse("tiny", 4, 2))))
    assert header["config"] == {"size": "tiny", "rows": 4, "micro_batches": 2, "length": 32, "rounds": 10}
    assert header["xla_flags"] == "--xla_some=false"


def test_micro_batches_take_the_same_step():
    _, config = step_bench.SIZES["tiny"]
    tokens = jax.random.randint(jax.random.key(0), (4, 9), 0, config.vocab_size)
    once, twice = (step_bench.Trainer(config, n) for n in (1, 2))
    for _ in range(2):
        assert once(tokens) == pytest.approx(twice(tokens), rel=1e-5)


def test_operations_of_the_large_model():
    """Weights that multiply a token, the causal half of the scores, three products with the state; twice that back."""
    length, config = step_bench.SIZES["1.3b"]
    count = parameter_counts(nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0))))[1]
    assert 1.2e9 < count < 1.4e9
    per_token = 2 * count + 6 * 16 * (length / 2) * 2 * (128 + 128) + 18 * 16 * 3 * 2 * 128 * 128
    assert step_bench.operations(config, count, length) == 3 * per_token


def test_an_error_is_a_line(monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(step_bench, "Trainer", fail)
    [row] = step_bench.run(step_bench.Settings("tiny", 4, 2))
    assert row["error"] == "RuntimeError: out of memory"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1b", 8, 2), "--size=1b: give one of 1.3b, tiny"),
        ((None, 8, 3), "--micro_batches=3: give a divisor of --rows=8"),
    ],
    ids=str,
)
def test_wrong_flags(arguments, message):
    with pytest.raises(ConfigError, match=message):
        step_bench.parse(*arguments)
