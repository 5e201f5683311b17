"""What the benchmark compares: ways to compute KDA, their random inputs, the two programs timed, and their check."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kda_jax.ops.api import kda
from kda_jax.ops.gates import l2_normalize

Shape = tuple[int, int, int]  # B, T, H

CHANNELS = 128  # K and V
LOWEST = -5.0  # the bound of the decay, which every version takes
GATES = {"fast": 0.0, "slow": -4.63}
INPUTS = (
    "seed 0; q, k: N(0, 1) of unit length; v and the cotangent of o: N(0, 1); beta = sigmoid(N(0, 1)); "
    "g = -5 sigmoid(bias + N(0, 1)) with bias 0 (fast) or -4.63 (slow); g and beta in float32"
)
CHECKED: Shape = (1, 256, 2)  # short enough for the recurrence's gradient, several chunks long

# Relative root mean square allowed: o and state; gradients; those of g and beta. Why: tests/tolerances.py.
BOUNDS = {"float32": (1e-5, 1e-4, 1e-4), "bfloat16": (5e-3, 8e-3, 2e-2)}
RESULTS = {"o": 0, "final_state": 0, "dq": 1, "dk": 1, "dv": 1, "dg": 2, "dbeta": 2}


@dataclasses.dataclass(frozen=True)
class Version:
    """One way to compute KDA.

    Args:
      name: for the tables.
      run: (q, k, v, gate, beta) -> (o, final_state [B, H, K, V]).
      raw: `gate` is x where g = -5 sigmoid(x), and `run` activates it and L2-normalises q and k; otherwise it is g.
      heads_first: q, k, v, gate and o are [H, B, T, channels] and beta [H, B, T]; otherwise [B, T, H, ...].
      peer: it is not ours.
    """

    name: str
    run: Callable[..., tuple[Array, Array]]
    raw: bool = False
    heads_first: bool = False
    peer: bool = False


def _activate_first(run: Callable[..., tuple[Array, Array]]) -> Callable[..., tuple[Array, Array]]:
    """`run` for a raw gate and q and k of any length: the work that some peers cannot leave out."""
    return lambda q, k, v, x, beta: run(l2_normalize(q), l2_normalize(k), v, LOWEST * jax.nn.sigmoid(x), beta)


def ours(implementation: str) -> list[Version]:
    """Without a promise about the decay; where it changes the algorithm, with one, from activated and raw inputs."""
    run = functools.partial(kda, implementation=implementation)
    if implementation == "scan":
        return [Version(implementation, run)]
    promised = functools.partial(run, g_min=LOWEST)
    return [
        Version(implementation, run),
        Version(f"{implementation} g_min={LOWEST:g}", promised),
        Version(f"{implementation} g_min={LOWEST:g} raw", _activate_first(promised), raw=True),
    ]


def refusal(implementation: str, dtype: str) -> str | None:
    """Why `kda` does not take this implementation here, or None."""
    version = Version(implementation, functools.partial(kda, implementation=implementation))
    try:
        jax.eval_shape(lambda: forward(version)(*arguments(version, draw(CHECKED, "fast", dtype))))
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return None


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def draw(shape: Shape, gate: str, dtype: str) -> dict[str, Array]:
    """Random inputs as in `INPUTS`, the raw gate `x`, and the cotangent `do` of o."""
    *keys, last = jax.random.split(jax.random.key(0), 6)
    q, k, v, x, do = (jax.random.normal(key, (*shape, CHANNELS)) for key in keys)
    x = x + GATES[gate]
    rounded = {"q": l2_normalize(q), "k": l2_normalize(k), "v": v, "do": do}
    arrays = {name: array.astype(dtype) for name, array in rounded.items()}
    return arrays | {"x": x, "g": LOWEST * jax.nn.sigmoid(x), "beta": jax.nn.sigmoid(jax.random.normal(last, shape))}


def arguments(version: Version, inputs: Mapping[str, Array]) -> list[Array]:
    """q, k, v, the gate, beta and do, in the version's layout."""
    names = ("q", "k", "v", "x" if version.raw else "g", "beta", "do")
    return [jnp.moveaxis(inputs[name], 2, 0) if version.heads_first else inputs[name] for name in names]


def forward(version: Version) -> Callable[..., tuple[Array, ...]]:
    """(q, k, v, gate, beta, do) -> (o, final_state)."""
    return lambda *arrays: version.run(*arrays[:-1])


def forward_backward(version: Version) -> Callable[..., tuple[Array, ...]]:
    """(q, k, v, gate, beta, do) -> (o, final_state, dq, dk, dv, dgate, dbeta)."""

    def run(*arrays: Array) -> tuple[Array, ...]:
        *inputs, do = arrays
        o, pull, final_state = jax.vjp(version.run, *inputs, has_aux=True)
        return o, final_state, *pull(do)

    return run


PASSES = {"forward": forward, "forward+backward": forward_backward}


@functools.cache
def recurrence(raw: bool) -> Version:
    """The definition: one token at a time."""
    run = functools.partial(kda, implementation="scan")
    return Version("recurrence", _activate_first(run) if raw else run, raw=raw)


@functools.cache
def _program(version: Version) -> Callable[..., tuple[Array, ...]]:
    """Compiled once for all gates."""
    return jax.jit(forward_backward(version))


def errors(version: Version, gate: str, dtype: str) -> dict[str, float]:
    """Relative root mean square error of `RESULTS` against the recurrence in float64 on the same rounded inputs.

    Where the version takes a raw gate, "dg" is the gradient of that.
    """
    inputs = draw(CHECKED, gate, dtype)
    got = _program(version)(*arguments(version, inputs))
    definition = recurrence(version.raw)
    exact = [np.asarray(x).astype(np.float64) for x in arguments(definition, inputs)]
    with jax.enable_x64(True):
        want = jax.device_get(_program(definition)(*exact))
    found = {}
    for name, result, b in zip(RESULTS, got, want, strict=True):
        a = np.asarray(result).astype(np.float64)
        if version.heads_first and name != "final_state":
            a = np.moveaxis(a, 0, 2)
        error = float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)))
        found[name] = error if math.isfinite(error) else math.inf
    return found


def beyond_bounds(found: Mapping[str, float], dtype: str) -> list[str]:
    """Those of `errors` that are too large, in words."""
    bounds = {name: BOUNDS[dtype][kind] for name, kind in RESULTS.items()}
    return [f"{name} {found[name]:.1e} (at most {bounds[name]:.0e})" for name in RESULTS if found[name] > bounds[name]]
