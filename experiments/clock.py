"""The speed of compiled programs, measured in turns."""

import dataclasses
import fcntl
import math
import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax import Array

ROUNDS = 15
SAMPLE_S = 0.02  # least duration of a sample: a short program runs several times in it, as it would in a model


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled function of JAX that does what is timed `repeats` times; another framework's is a subclass."""

    run: Callable[..., Any]
    compile_s: float
    temporary_bytes: int
    repeats: int = 1

    def prepare(self, arguments: Sequence[Array]) -> Sequence[Any]:
        """The arguments as `run` takes them."""
        return arguments

    def wait(self, results: Any) -> None:
        """Until they are there."""
        jax.block_until_ready(results)

    def fetch(self, results: Any) -> Any:
        """The results as arrays of JAX."""
        return results

    def __call__(self, *arguments: Array) -> Any:
        return self.fetch(self.run(*self.prepare(arguments)))


def build(function: Callable[..., Any], *arguments: Array | jax.ShapeDtypeStruct, repeats: int = 1) -> Program:
    """Compile for the shapes of the arguments."""
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    compile_s = time.perf_counter() - start
    memory = compiled.memory_analysis()
    assert memory is not None, "this backend does not tell the memory of a program"
    return Program(compiled, compile_s, memory.temp_size_in_bytes, repeats)


def repeated(function: Callable[..., Any], times: int) -> Callable[..., Any]:
    """A function of JAX that calls `function` so many times, one call after the other, and returns the last results."""
    if times == 1:
        return function

    def run(*arguments: Array) -> Any:
        smallest = min(range(len(arguments)), key=lambda i: arguments[i].size)

        def again(_: Array, carry: tuple[Array, Any]) -> tuple[Array, Any]:
            tied, results = carry
            # one element waits for the call before; of calls that wait for none, XLA would keep one
            nothing = 0 * jax.tree.leaves(results)[0].ravel()[0].astype(tied.dtype)
            tied = tied.ravel().at[0].add(nothing).reshape(tied.shape)
            return tied, function(*arguments[:smallest], tied, *arguments[smallest + 1 :])

        like = jax.eval_shape(function, *arguments)
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        return jax.lax.fori_loop(0, times, again, (arguments[smallest], start))[1]

    return run


Build = Callable[[], Program]


def build_all[Key: Hashable](
    beside: Mapping[Key, Build], alone: Mapping[Key, Build]
) -> Iterator[tuple[Key, Program | Exception]]:
    """Every program as it is ready, or the error of the one that failed; those `beside` in threads, since XLA compiles
    outside Python's lock, and meanwhile those `alone`, which use the device, one after the other.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {pool.submit(_attempt, build): key for key, build in beside.items()}
        for key, build in alone.items():
            yield key, _attempt(build)
        for future in as_completed(futures):
            yield futures[future], future.result()


def queue(path: str | None) -> Callable[[], None]:
    """Stand in line, at a file, with other processes that build; the function returned waits until none of them builds
    and none measures, and then lets none do so before this process ends. Without a file it does not wait.
    """
    if path is None:
        return lambda: None
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    fcntl.flock(file, fcntl.LOCK_SH)
    return lambda: fcntl.flock(file, fcntl.LOCK_EX)


def built(program: Program | Exception) -> Program:
    """The program; raises the error that came in its place."""
    if isinstance(program, Exception):
        raise program
    return program


def _attempt(build: Build) -> Program | Exception:
    try:
        return build()
    except Exception as error:
        logging.exception("a program was not built")
        return error


@dataclasses.dataclass(frozen=True)
class Sample:
    """A program with its arguments; `calls` calls in a row last `SAMPLE_S` or longer."""

    program: Program
    arguments: Sequence[Any]
    calls: int = 1

    def seconds(self) -> float:
        """What is timed, once, of several calls queued together."""
        start = time.perf_counter()
        for _ in range(self.calls):
            results = self.program.run(*self.arguments)
        self.program.wait(results)
        return (time.perf_counter() - start) / self.calls / self.program.repeats


def warm_up(program: Program | Exception, *arguments: Array) -> Sample:
    """Run twice, the second time to see how long it takes."""
    program = built(program)
    sample = Sample(program, program.prepare(arguments))
    sample.seconds()
    calls = math.ceil(SAMPLE_S / (sample.seconds() * program.repeats))
    return dataclasses.replace(sample, calls=calls)


def interleave[Key: Hashable](samples: Mapping[Key, Sample]) -> dict[Key, dict[str, float]]:
    """Median and minimum in ms over `ROUNDS` rounds, in each of which every sample has its turn."""
    times: dict[Key, list[float]] = {key: [] for key in samples}
    for _ in range(ROUNDS):
        for key, sample in samples.items():
            times[key].append(1e3 * sample.seconds())
    return {key: {"median_ms": statistics.median(ms), "min_ms": min(ms)} for key, ms in times.items()}
