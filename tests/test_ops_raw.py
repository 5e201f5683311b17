"""Raw inputs: L2 norm, decay and write strength applied inside, with the gradient of every raw input and parameter."""

import jax
import numpy as np
import pytest
import reference
import tolerances
from cases import IMPLEMENTATIONS, check, make, make_raw, oracle, run

import kda_jax
from kda_jax.ops import gates

every = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
bounds = pytest.mark.parametrize("lower_bound", [None, -5.0])


@every
@bounds
@pytest.mark.parametrize(
    ("dtype", "negative_eigenvalues"), [("float32", False), ("float32", True), ("bfloat16", True), ("float16", False)]
)
def test_every_gradient(rng, implementation, dtype, lower_bound, negative_eigenvalues):
    """A_log and dt_bias belong to value heads and to their channels: HV != H, all different."""
    case = make_raw(rng, dtype=dtype)
    got = run(case, implementation=implementation, lower_bound=lower_bound, negative_eigenvalues=negative_eigenvalues)
    check(got, oracle(case, lower_bound=lower_bound, beta_scale=1.0 + negative_eigenvalues), dtype)


@every
@bounds
def test_float64(rng, x64, implementation, lower_bound):
    case = make_raw(rng, dtype="float64")
    check(
        run(case, implementation=implementation, lower_bound=lower_bound),
        oracle(case, lower_bound=lower_bound),
        "float64",
    )


@every
@bounds
@pytest.mark.parametrize("shift", [0.0, 12.0, -12.0])
def test_trained_speeds(rng, implementation, lower_bound, shift):
    """exp(A_log) = 201 with a projection of 13 is -2661 a token, or a bounded decay that rests on its bound."""
    case = make_raw(rng, speed=(0.01, 201.0))
    case["g_raw"] = (case["g_raw"] + shift).astype(np.float32)
    check(run(case, implementation=implementation, lower_bound=lower_bound), oracle(case, lower_bound=lower_bound))


@every
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bounded_decay_saturated_throughout(rng, implementation, dtype):
    """64 tokens at -5 span 315: what is masked only after its exponential is NaN in the gradient."""
    case = make_raw(rng, dtype=dtype)
    case["g_raw"] = np.asarray(30 + 0 * case["g_raw"], case["g_raw"].dtype)
    got = run(case, implementation=implementation, lower_bound=-5.0, negative_eigenvalues=True)
    want = oracle(case, lower_bound=-5.0, beta_scale=2.0)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in got.values())
    gates_grads = (
        "g_raw",
        "A_log",
        "dt_bias",
    )  # multiples of 1 - sigmoid, which float32 rounds to 0 where the oracle has 1e-13
    check(got, {n: x for n, x in want.items() if n not in gates_grads}, dtype)
    for n in gates_grads:
        assert np.abs(got[n].astype(np.float64) - want[n]).max() < 1e-5


@every
@bounds
def test_equals_activated_inputs(rng, implementation, lower_bound):
    case = make_raw(rng)
    wide = {n: np.asarray(x, np.float64) for n, x in case.items()}
    active = case | {n: np.asarray(reference.l2_normalize(wide[n]), np.float32) for n in ("q", "k")}
    active["g"] = np.asarray(reference.decay(wide["g_raw"], wide["A_log"], wide["dt_bias"], lower_bound), np.float32)
    active["beta"] = np.asarray(reference.sigmoid(wide["beta_raw"]), np.float32)
    del active["g_raw"], active["beta_raw"]
    got = run(case, implementation=implementation, lower_bound=lower_bound)
    want = run(active, implementation=implementation, g_min=lower_bound)
    for n in ("o", "final_state", "v", "initial_state"):
        tolerances.assert_close(got[n], want[n], tolerances.gradient("v", "float32"), n)


@every
@pytest.mark.parametrize("size", [0.0, 1e-4, 1e-2])
def test_zero_and_tiny_keys(rng, implementation, size):
    """Epsilon is inside the root: a zero row writes nothing, a tiny one less than a unit, and gradients are finite."""
    case = make_raw(rng)
    for n in ("q", "k"):
        case[n][:, ::3] *= np.float32(size)
    check(run(case, implementation=implementation), oracle(case))


def test_bias_is_added_once_and_per_channel(rng):
    """Moving a bias equals moving that head's and channel's projection alone."""
    case = make_raw(rng, T=9)
    delta = rng.normal(size=case["dt_bias"].shape).astype(np.float32)
    by_bias = run(case | {"dt_bias": case["dt_bias"] + delta}, implementation="chunk")
    by_projection = run(case | {"g_raw": case["g_raw"] + delta}, implementation="chunk")
    check(by_bias, by_projection)
    assert tolerances.error(run(case, implementation="chunk")["o"], by_bias["o"]) > 1e-3


def test_raw_and_activated_default_to_the_same_scale(rng):
    case = make(rng, T=5, B=1, H=1, HV=1, K=9)
    unit, large = case["q"], np.float32(1e4)
    raw = gates.Decay(np.zeros(1, np.float32), np.full((1, 9), -1e4, np.float32))
    arguments = (case["k"] * large, case["v"], np.zeros_like(case["g"]), np.full_like(case["beta"], 50))
    got, _ = jax.jit(kda_jax.kda_raw)(unit * large, *arguments, raw)
    want, _ = jax.jit(kda_jax.kda)(unit, case["k"], case["v"], np.zeros_like(case["g"]), np.ones_like(case["beta"]))
    tolerances.assert_close(got, want, tolerances.FORWARD["float32"])
