"""Inputs of every kind, and one way to run an implementation and the oracle on them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import reference
import tolerances

import kda_jax
from kda_jax.ops.gates import Decay

IMPLEMENTATIONS = ("scan", "chunk")
PACKINGS = ("segment_ids", "cu_seqlens")
ARRAYS = ("q", "k", "v", "g", "beta", "initial_state")
RAW_ARRAYS = ("q", "k", "v", "g_raw", "beta_raw", "A_log", "dt_bias", "initial_state")


def _mixed(rng, shape):
    """Tokens of -6e4 to -1e-4 among tokens of -0.01: what a trained softplus decay looks like."""
    strong = -np.exp(rng.uniform(np.log(1e-4), np.log(6e4), shape))
    return np.where(rng.random((*shape[:2], 1, 1)) < 0.3, strong, -0.01 * rng.random(shape))


# name -> log decay [B, T, HV, K]
DECAYS = {
    "none": lambda rng, shape: np.zeros(shape),
    "weak": lambda rng, shape: -0.1 * rng.random(shape) * np.arange(1, 1 + shape[2])[:, None],
    "one": lambda rng, shape: -np.ones(shape),
    "bounded": lambda rng, shape: -5 * rng.random(shape) ** np.arange(1, 1 + shape[2])[:, None],
    "saturated": lambda rng, shape: np.full(shape, -5.0),
    "twenty": lambda rng, shape: np.full(shape, -20.0),
    "three_hundred": lambda rng, shape: np.full(shape, -300.0),
    "2661": lambda rng, shape: -2661 * rng.random(shape),
    "mixed": _mixed,
}
BOUNDED = ("none", "weak", "one", "bounded", "saturated")

# name -> write strength [B, T, HV]
BETAS = {
    "unit": lambda rng, shape: reference.sigmoid(rng.normal(size=shape)),
    "reflecting": lambda rng, shape: rng.choice([0.0, 1e-6, 0.5, 1.0, 1.7, 2.0], shape),
}


def rounded(x, dtype):
    return np.asarray(x, jnp.dtype(dtype))


def wide(dtype):
    """The dtype of decays and states."""
    return "float64" if dtype == "float64" else "float32"


def make(
    rng, *, B=2, T=130, H=2, HV=4, K=24, V=16, N=None, decay="weak", beta="unit", dtype="float32", identical=False
):
    """Activated inputs, an initial state and random cotangents, rounded to `dtype`."""
    q, k = (rng.normal(size=(B, T, H, K)) for _ in range(2))
    if identical:
        k = np.broadcast_to(k[:, :1], k.shape) if T else k
    half = {
        "q": reference.l2_normalize(q),
        "k": reference.l2_normalize(k),
        "v": rng.normal(size=(B, T, HV, V)),
        "beta": BETAS[beta](rng, (B, T, HV)),
        "do": rng.normal(size=(B, T, HV, V)),
    }
    full = {"g": DECAYS[decay](rng, (B, T, HV, K))}
    for name in ("initial_state", "dfinal_state"):
        full[name] = rng.normal(size=(B if N is None else N, HV, K, V))
    return {n: rounded(x, dtype) for n, x in half.items()} | {n: rounded(x, wide(dtype)) for n, x in full.items()}


def make_raw(rng, *, speed=(0.3, 3.0), dtype="float32", **shape):
    """Raw inputs: q and k of any length, decay parameters of each head and channel; exp(A_log) in the range `speed`."""
    case = make(rng, dtype=dtype, **shape)
    heads, channels = case["g"].shape[2:]
    half = {name: 3 * rng.normal(size=case[name].shape) for name in ("q", "k")}
    half |= {"g_raw": rng.normal(size=case["g"].shape), "beta_raw": rng.normal(size=case["beta"].shape)}
    full = {"A_log": np.linspace(*np.log(speed), heads), "dt_bias": rng.normal(size=(heads, channels))}
    raw = {n: rounded(x, dtype) for n, x in half.items()} | {n: rounded(x, wide(dtype)) for n, x in full.items()}
    return {name: x for name, x in (case | raw).items() if name not in ("g", "beta")}


@functools.lru_cache(typed=True)
def operator(**options):
    """Jitted (arrays, cotangents, packing) -> ((o, final_state), gradients) of `kda`; one program a shape."""
    return _differentiated(
        lambda q, k, v, g, beta, s, **p: kda_jax.kda(q, k, v, g, beta, initial_state=s, **options, **p)
    )


@functools.lru_cache(typed=True)
def raw_operator(lower_bound=None, negative_eigenvalues=False, **options):
    """The same of `kda_raw`."""

    def call(q, k, v, g_raw, beta_raw, A_log, dt_bias, s, **p):
        decay = Decay(A_log, dt_bias, lower_bound)
        more = {"negative_eigenvalues": negative_eigenvalues} | options | p
        return kda_jax.kda_raw(q, k, v, g_raw, beta_raw, decay, initial_state=s, **more)

    return _differentiated(call)


def _differentiated(function):
    @jax.jit
    def run(arrays, cotangents, packing):
        out, vjp = jax.vjp(functools.partial(function, **packing), *arrays)
        return out, vjp((cotangents[0].astype(out[0].dtype), cotangents[1].astype(out[1].dtype)))

    return run


def named(names, out):
    """{"o", "final_state"} and the gradients by their inputs' names, as NumPy arrays."""
    (o, final_state), grads = out
    return {"o": o, "final_state": final_state} | dict(zip(names, grads, strict=True))


def run(case, **options):
    """Outputs and gradients of the library."""
    raw = "g_raw" in case
    names = RAW_ARRAYS if raw else ARRAYS
    function = (raw_operator if raw else operator)(**options)
    packing = {name: case[name] for name in PACKINGS if name in case}
    out = function(tuple(case[n] for n in names), (case["do"], case["dfinal_state"]), packing)
    return {name: np.asarray(x) for name, x in named(names, out).items()}


def oracle(case, **options):
    """Outputs and gradients of the float64 recurrence on the same rounded inputs."""
    raw = "g_raw" in case
    function = reference.kda_raw if raw else reference.kda
    return named(RAW_ARRAYS if raw else ARRAYS, function(**{n: _plain(x) for n, x in case.items()}, **options))


def _plain(x):
    return x if np.issubdtype(x.dtype, np.integer) else np.asarray(x, np.float64)


def check(got, want, dtype="float32", **tolerance):
    """Compare every result with its own bound; `tolerance` overrides one by name, and `default` all."""
    for name in want:
        bound = tolerances.FORWARD[dtype] if name in ("o", "final_state") else tolerances.gradient(name, dtype)
        tolerances.assert_close(got[name], want[name], tolerance.get(name, tolerance.get("default", bound)), name)


def check_same(got, want, names=None):
    """Bitwise equality."""
    for name in names or want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
