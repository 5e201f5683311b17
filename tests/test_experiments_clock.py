"""The benchmark's clock: how often a program runs in a sample, and that runs wait for one another."""

import fcntl
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import clock


def test_short_programs_run_several_times_a_sample(monkeypatch):
    """On a clock that only the programs move, by 1 ms and 30 ms a call."""
    now = 0.0
    turns = []

    def program(ms):
        def run():
            nonlocal now
            now += ms / 1e3
            turns.append(ms)

        return clock.Program(run, 0.0, 0)

    monkeypatch.setattr(clock.time, "perf_counter", lambda: now)
    monkeypatch.setattr(clock, "SAMPLE_S", 0.0035)
    samples = {ms: clock.warm_up(program(ms)) for ms in (1, 30)}
    turns.clear()
    times = clock.interleave(samples)
    assert turns == [1, 1, 1, 1, 30] * clock.ROUNDS
    assert times == {ms: {"median_ms": pytest.approx(ms), "min_ms": pytest.approx(ms)} for ms in (1, 30)}


def test_repeated_calls_are_not_one():
    """The work stays inside the loop, though the arguments never change, and its last results are returned."""
    x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)

    def function(x):
        return x @ x, jnp.sin(x)

    program = clock.build(clock.repeated(function, 3), x, repeats=3)
    for got, want in zip(program(x), function(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    loop, once = program.run.as_text().split("\nENTRY")
    assert "dot_general" in loop
    assert "dot_general" not in once
    assert clock.repeated(function, 1) is function


def test_a_queue(tmp_path):
    """It waits for a run that builds; a run that comes later waits for it."""
    clock.queue(None)()
    path = str(tmp_path / "queue")
    with open(path, "w") as building:
        fcntl.flock(building, fcntl.LOCK_SH)
        waiting = threading.Thread(target=clock.queue(path), daemon=True)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(30)
    assert not waiting.is_alive()
    with open(path, "w") as later, pytest.raises(BlockingIOError):
        fcntl.flock(later, fcntl.LOCK_SH | fcntl.LOCK_NB)
