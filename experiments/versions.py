"""What the benchmark compares: ways to compute KDA, their random inputs, the two programs timed, and their check."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments import clock
from kda_jax.ops.api import kda, kda_raw
from kda_jax.ops.gates import Decay, l2_normalize

Shape = tuple[int, int, int]  # B, T, H
Run = Callable[..., tuple[Array, Array]]

CHANNELS = 128  # K and V
LOWEST = -5.0  # the bound of the decay, which every version takes
GATES = {"fast": 0.0, "slow": -4.63}
INPUTS = (
    "seed 0; q, k, v, cotangent of o: N(0, 1); beta = sigmoid(N(0, 1)); g = -5 sigmoid(bias + N(0, 1)) with bias 0 "
    "(fast) or -4.63 (slow); activated versions take unit q and k, and g and beta in float32; raw ones what these come "
    "from, in the dtype of q"
)
ONE_CALL = 2**18  # tokens times heads from which a program is one pass
CHECKED = (1, 256)  # B, T: short enough for the recurrence's gradient, several chunks long

_HEADS = [0, -1]  # that are checked

# Relative root mean square allowed: o and state; gradients; those of g and beta. Why: tests/tolerances.py.
BOUNDS = {"float32": (1e-5, 1e-4, 1e-4), "bfloat16": (5e-3, 8e-3, 2e-2)}
RESULTS = {"o": 0, "final_state": 0, "dq": 1, "dk": 1, "dv": 1, "dg": 2, "dbeta": 2}

# What a version takes for q, k, v, g and beta: names of `draw`.
ACTIVATED = ("unit_q", "unit_k", "v", "g", "beta")
BOUNDED = ("q", "k", "v", "g_sigmoid", "beta_raw")  # g = -5 sigmoid(g_sigmoid)
UNBOUNDED = ("q", "k", "v", "g_softplus", "beta_raw")  # g = -softplus(g_softplus)
KINDS = {ACTIVATED: "activated", BOUNDED: "raw, bounded", UNBOUNDED: "raw, unbounded"}
# How the recurrence's arguments come from these.
_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "q": l2_normalize,
    "k": l2_normalize,
    "g_sigmoid": lambda x: LOWEST * jax.nn.sigmoid(x),
    "g_softplus": lambda x: -jax.nn.softplus(x),
    "beta_raw": jax.nn.sigmoid,
}


@dataclasses.dataclass(frozen=True)
class Version:
    """One way to compute KDA.

    Args:
      name: for the tables.
      run: (q, k, v, gate, beta) -> (o, final_state [B, H, K, V]).
      inputs: what `run` takes, `ACTIVATED`, `BOUNDED`, `UNBOUNDED` or a mixture of their names.
      heads_first: q, k, v, gate and o are [H, B, T, channels] and beta [H, B, T]; otherwise [B, T, H, ...].
      peer: it is not ours.
      passes: names of `PASSES` that it has, the first of which is the forward pass.
      build: makes a program of a pass and its arguments; None for a `run` in JAX.
    """

    name: str
    run: Run
    inputs: tuple[str, ...] = ACTIVATED
    heads_first: bool = False
    peer: bool = False
    passes: tuple[str, ...] = ("forward", "forward+backward")
    build: Callable[..., clock.Program] | None = None

    @property
    def kind(self) -> str:
        """The work that it shares with others, for comparison: of its gate, if it has one."""
        return next((kind for inputs, kind in KINDS.items() if inputs[3:4] == self.inputs[3:4]), "no gate")


def ours(implementation: str) -> list[Version]:
    """Without a promise about the decay; where it changes the algorithm, with one, and from either raw gate."""
    run = functools.partial(kda, implementation=implementation)
    if implementation == "scan":
        return [Version(implementation, run)]
    return [
        Version(implementation, run),
        Version(f"{implementation} g_min={LOWEST:g}", functools.partial(run, g_min=LOWEST)),
        Version(f"{implementation} raw", _raw(implementation, LOWEST), BOUNDED),
        Version(f"{implementation} raw", _raw(implementation, None), UNBOUNDED),
    ]


def _raw(implementation: str, lower_bound: float | None) -> Run:
    """`kda_raw` with A_log = dt_bias = 0."""

    def run(q: Array, k: Array, v: Array, x: Array, beta_raw: Array) -> tuple[Array, Array]:
        decay = Decay(jnp.zeros(x.shape[2]), jnp.zeros(x.shape[2:]), lower_bound)
        return kda_raw(q, k, v, x, beta_raw, decay, implementation=implementation)

    return run


def refusal(implementation: str, dtype: str) -> str | None:
    """Why `kda` does not take this implementation here, or None."""
    version = Version(implementation, functools.partial(kda, implementation=implementation))
    try:
        jax.eval_shape(lambda: forward(version)(*arguments(version, draw((*CHECKED, 1), "fast", dtype))))
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return None


def draw(shape: Shape, gate: str, dtype: str) -> dict[str, Array]:
    """Random inputs as in `INPUTS`, and the cotangent `do` of o."""
    return _draw(shape, dtype, GATES[gate])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draw(shape: Shape, dtype: str, bias: float) -> dict[str, Array]:
    *keys, last = jax.random.split(jax.random.key(0), 6)
    q, k, v, x, do = (jax.random.normal(key, (*shape, CHANNELS)) for key in keys)
    beta_raw, x = jax.random.normal(last, shape), x + bias
    g = LOWEST * jax.nn.sigmoid(x)
    rounded = {"q": q, "k": k, "unit_q": l2_normalize(q), "unit_k": l2_normalize(k), "v": v, "do": do}
    rounded |= {"g_sigmoid": x, "g_softplus": jnp.log(jnp.expm1(-g)), "beta_raw": beta_raw}
    return {n: array.astype(dtype) for n, array in rounded.items()} | {"g": g, "beta": jax.nn.sigmoid(beta_raw)}


def sizes(shape: Shape) -> dict[str, int]:
    """By their letters."""
    return dict(zip("BTHKV", (*shape, CHANNELS, CHANNELS), strict=True))


def arguments(version: Version, inputs: Mapping[str, Array]) -> list[Array]:
    """q, k, v, the gate, beta and do, in the version's layout."""
    names = (*version.inputs, "do")
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


def build(version: Version, shape: Shape, name: str, dtype: str) -> clock.Program:
    """The program of a pass over inputs of that shape; of short ones on a GPU, in JAX, of several passes, since a call
    from the host takes it 0.1 ms.
    """

    def inputs() -> list[Array]:
        return arguments(version, draw(shape, next(iter(GATES)), dtype))

    if version.build is not None:
        return version.build(name, *inputs())
    repeats = max(1, ONE_CALL // math.prod(shape)) if jax.default_backend() == "gpu" else 1
    return clock.build(clock.repeated(PASSES[name](version), repeats), *jax.eval_shape(inputs), repeats=repeats)


@functools.cache
def recurrence(inputs: tuple[str, ...]) -> Version:
    """The definition: one token at a time."""

    def run(*arrays: Array) -> tuple[Array, Array]:
        activated = (_ACTIVATIONS.get(name, lambda x: x)(x) for name, x in zip(inputs, arrays, strict=True))
        return kda(*activated, implementation="scan")

    return Version("recurrence", run, inputs)


@functools.cache
def _want(inputs: tuple[str, ...], shape: Shape, gate: str, dtype: str) -> tuple[np.ndarray, ...]:
    """The recurrence's results in float64 for `_HEADS`; on the CPU, where one token at a time is no slower."""
    given = arguments(recurrence(inputs), draw(shape, gate, dtype))
    exact = [np.asarray(x[:, :, _HEADS]).astype(np.float64) for x in given]
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return jax.device_get(jax.jit(forward_backward(recurrence(inputs)))(*exact))


def errors(version: Version, program: clock.Program, shape: Shape, gate: str, dtype: str) -> dict[str, float]:
    """Relative root mean square error of `RESULTS` against the recurrence in float64 on the same rounded inputs.

    program: the version's for that shape, of which the first and the last head are looked at. Gradients are those of
    what the version takes: "dg" of a raw gate, where it takes that.
    """
    got = program(*arguments(version, draw(shape, gate, dtype)))
    found = {}
    # Of a forward pass alone there are fewer.
    for name, result, b in zip(RESULTS, got, _want(version.inputs, shape, gate, dtype), strict=False):
        axis = 1 if name == "final_state" else 0 if version.heads_first else 2
        a = np.moveaxis(np.asarray(result).astype(np.float64), axis, 0)[_HEADS]
        b = np.moveaxis(b, 1 if name == "final_state" else 2, 0)
        error = float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)))
        found[name] = error if math.isfinite(error) else math.inf
    return found


def beyond_bounds(version: Version, found: Mapping[str, float], dtype: str) -> list[str]:
    """Those of `errors` that are too large, in words; a peer's may be four times ours, as it may round elsewhere."""
    bounds = {name: BOUNDS[dtype][kind] * (4 if version.peer else 1) for name, kind in RESULTS.items()}
    return [f"{name} {size:.1e} (at most {bounds[name]:.0e})" for name, size in found.items() if size > bounds[name]]
