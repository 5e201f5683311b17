"""What the benchmark measures of decoding: one token of many sequences, by the bytes of state that it moves."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments import clock, versions
from experiments.commands import one_line
from kda_jax.ops.decode import kda_raw_step
from kda_jax.ops.gates import Decay

Size = tuple[int, int]  # sequences, heads
Run = Callable[..., tuple[Array, Array]]

STEPS = 64  # in one program, the state in place
CHECKED: Size = (2, 3)
BOUNDS = {"float32": 1e-5, "bfloat16": 5e-3}


@dataclasses.dataclass(frozen=True)
class Step:
    """One way to compute `kda_raw_step` with A_log = dt_bias = 0.

    Args:
      name: for the tables.
      state: dtype of the state.
      run: (state, q, k, v, gate, beta) -> (state, o).
      build: makes a program that returns the same, from its arguments; None for a `run` in JAX.
      peer: it is not ours.
    """

    name: str
    state: str
    run: Run
    build: Callable[..., clock.Program] | None = None
    peer: bool = False


def _ours(implementation: str | None) -> Run:
    def run(state: Array, *inputs: Array) -> tuple[Array, Array]:
        q, k, v, g_raw, beta_raw = inputs
        decay = Decay(jnp.zeros(state.shape[1]), jnp.zeros(state.shape[1:3]))
        o, new_state = kda_raw_step(q, k, v, g_raw, beta_raw, decay, state, implementation=implementation)
        return new_state, o

    return run


def ours() -> list[Step]:
    """Plain, and what a user gets; with the state in either dtype."""
    names = {"scan": "scan", "default": None}
    return [Step(name, dtype, _ours(names[name])) for name in names for dtype in BOUNDS]


@functools.cache
def copies() -> Sequence[Step]:
    """The floor: the states read and written."""
    return [Step("copy", dtype, lambda state, *_: (-state, jnp.zeros(()))) for dtype in BOUNDS]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def draw(size: Size, dtype: str, state_dtype: str) -> list[Array]:
    """A state and raw inputs of one token, all N(0, 1)."""
    K = V = versions.CHANNELS
    shapes = ((K, V), (K,), (K,), (V,), (K,), ())
    keys = jax.random.split(jax.random.key(0), len(shapes))
    state, *inputs = (jax.random.normal(key, size + shape) for key, shape in zip(keys, shapes, strict=True))
    return [state.astype(state_dtype), *(x.astype(dtype) for x in inputs)]


def build(step: Step, size: Size, dtype: str) -> clock.Program:
    """The program that takes `STEPS` steps, or one at `CHECKED`."""

    def inputs() -> list[Array]:
        return draw(size, dtype, step.state)

    if step.build is not None:
        return step.build(*inputs())
    repeats = 1 if size == CHECKED else STEPS

    def run(state: Array, *inputs: Array) -> tuple[Array, Array]:
        o = jax.eval_shape(step.run, state, *inputs)[1]
        carry = state, jnp.zeros(o.shape, o.dtype)
        return jax.lax.fori_loop(0, repeats, lambda _, carry: step.run(carry[0], *inputs), carry)

    return clock.build(run, *jax.eval_shape(inputs), repeats=repeats)


def errors(step: Step, program: clock.Program, dtype: str) -> dict[str, float]:
    """Relative root mean square errors against the step in float64 on the same rounded inputs, of `CHECKED` size."""
    arguments = draw(CHECKED, dtype, step.state)
    got = program(*arguments)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        want = jax.device_get(jax.jit(_ours("scan"))(*(np.asarray(x).astype(np.float64) for x in arguments)))
    found = {}
    for name, a, b in zip(("state", "o"), got, want, strict=True):
        found[name] = float(np.sqrt(np.mean((np.asarray(a).astype(np.float64) - b) ** 2) / np.mean(b**2)))
    return found


def beyond_bounds(step: Step, found: dict[str, float], dtype: str) -> list[str]:
    """Those of `errors` that are too large, in words."""
    bounds = {"state": BOUNDS[step.state], "o": max(BOUNDS[step.state], BOUNDS[dtype])}
    return [
        f"{name} {size:.1e} (at most {bounds[name]:.0e})" for name, size in found.items() if not size <= bounds[name]
    ]


def measure(
    steps: Sequence[Step], programs: Mapping[Any, clock.Program | Exception], size: Size, dtype: str
) -> Iterator[dict[str, Any]]:
    """All steps and the copies, by their programs; TB/s counts the bytes of the states, read and written."""
    states = {name: draw(size, dtype, name) for name in BOUNDS}
    samples = {}
    for step in (*copies(), *steps):
        try:
            samples[step] = clock.warm_up(programs[step, size], *states[step.state])
        except Exception as error:
            yield {"measurement": "decode", **what(step, size), "error": one_line(error)}
    times = clock.interleave(samples)
    floor = {step.state: row["median_ms"] for step, row in times.items() if step in copies()}
    for step, row in times.items():
        moved = 2 * states[step.state][0].nbytes
        speeds = {"TB/s": moved / row["median_ms"] / 1e9, "of_copy": floor[step.state] / row["median_ms"]}
        yield {"measurement": "decode", **what(step, size), **row, **speeds}


def what(step: Step, size: Size) -> dict[str, Any]:
    """They two, in a line."""
    return {"version": step.name, "peer": step.peer, "state": step.state, "sequences": size[0], "H": size[1]}
