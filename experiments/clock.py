"""The speed of compiled programs, measured in turns."""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
from jax import Array

ROUNDS = 15
SAMPLE_S = 0.02  # least duration of a sample: a short program runs several times in it, as it would in a model


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled function."""

    run: Callable[..., Any]
    compile_s: float
    temporary_bytes: int


def build(function: Callable[..., Any], *arguments: Array | jax.ShapeDtypeStruct) -> Program:
    """Compile for the shapes of the arguments."""
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    compile_s = time.perf_counter() - start
    memory = compiled.memory_analysis()
    assert memory is not None, "this backend does not tell the memory of a program"
    return Program(compiled, compile_s, memory.temp_size_in_bytes)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A program with its arguments; `calls` calls in a row last `SAMPLE_S` or longer."""

    call: Callable[[], Any]
    calls: int


def warm_up(program: Program, *arguments: Array) -> Sample:
    """Run twice, the second time to see how long it takes."""
    call = functools.partial(program.run, *arguments)
    jax.block_until_ready(call())
    return Sample(call, math.ceil(SAMPLE_S / _seconds(call, 1)))


def _seconds(call: Callable[[], Any], calls: int) -> float:
    """Seconds a call, of several queued together."""
    start = time.perf_counter()
    for _ in range(calls):
        results = call()
    jax.block_until_ready(results)
    return (time.perf_counter() - start) / calls


def interleave[Key: Hashable](samples: Mapping[Key, Sample]) -> dict[Key, dict[str, float]]:
    """Median and minimum in ms a call over `ROUNDS` rounds, in each of which every sample has its turn."""
    times: dict[Key, list[float]] = {key: [] for key in samples}
    for _ in range(ROUNDS):
        for key, sample in samples.items():
            times[key].append(1e3 * _seconds(sample.call, sample.calls))
    return {key: {"median_ms": statistics.median(ms), "min_ms": min(ms)} for key, ms in times.items()}
