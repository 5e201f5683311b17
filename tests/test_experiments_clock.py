"""The benchmark's clock: how often a program runs in a sample, and that runs wait for one another."""

import fcntl
import threading

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
