"""Every implementation against the float64 recurrence: outputs, final state and the gradient of every input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tolerances
from cases import ARRAYS, BETAS, BOUNDED, DECAYS, IMPLEMENTATIONS, check, check_same, make, operator, oracle, run

import kda_jax

every = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
DTYPES = ("float32", "bfloat16", "float16")


@every
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_decay_and_strength(rng, implementation, dtype, decay, beta):
    case = make(rng, decay=decay, beta=beta, dtype=dtype)
    got = run(case, implementation=implementation)
    check(got, oracle(case), dtype)
    assert got["o"].dtype == case["v"].dtype
    assert got["final_state"].dtype == np.float32


@every
@pytest.mark.parametrize("decay", DECAYS)
def test_float64(rng, x64, implementation, decay):
    case = make(rng, decay=decay, beta="reflecting", dtype="float64")
    got = run(case, implementation=implementation)
    check(got, oracle(case), "float64")
    assert got["o"].dtype == got["final_state"].dtype == np.float64


@every
@pytest.mark.parametrize("decay", BOUNDED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_promised_bound(rng, implementation, dtype, decay):
    case = make(rng, decay=decay, beta="reflecting", dtype=dtype)
    check(run(case, implementation=implementation, g_min=-5.0), oracle(case), dtype)


@every
def test_promised_bound_float64(rng, x64, implementation):
    case = make(rng, decay="bounded", dtype="float64")
    check(run(case, implementation=implementation, g_min=-5.0), oracle(case), "float64")


@every
@pytest.mark.parametrize("g", [-1.0, -2.0, -2.5, -3.0, -4.0, -5.0])
@pytest.mark.parametrize("g_min", [None, -5.0])
def test_constant_decay_is_finite_and_right(rng, implementation, g_min, g):
    """An anchor in the middle of a chunk overflows at -5 and is silently wrong at -3."""
    case = make(rng, beta="reflecting")
    case["g"] = np.full_like(case["g"], g)
    check(run(case, implementation=implementation, g_min=g_min), oracle(case))


@every
@pytest.mark.parametrize("g_min", [None, -5.0])
def test_decay_gradient_of_every_row_when_saturated(rng, implementation, g_min):
    """At -5 the pairs i == j, if kept, drown the rest of dg: the mean over all rows would hide it."""
    case = make(rng, decay="saturated", beta="unit")
    case["dfinal_state"] = np.zeros_like(case["dfinal_state"])
    got, want = run(case, implementation=implementation, g_min=g_min), oracle(case)
    for t in range(130):
        tolerances.assert_close(got["g"][:, t], want["g"][:, t], tolerances.gradient("g", "float32"), f"dg, token {t}")


@every
@pytest.mark.parametrize("T", [0, 1, 15, 16, 17, 63, 64, 65, 127])
def test_any_number_of_tokens(rng, implementation, T):
    """A ragged tail is neither read past its end nor decays the state, forward and backward."""
    case = make(rng, T=T, decay="mixed", beta="reflecting", B=1, HV=2, H=1, K=16, V=8)
    check(run(case, implementation=implementation), oracle(case))


@every
def test_no_tokens_leave_the_state_alone(rng, implementation):
    case = make(rng, T=0, B=1, HV=2, H=1, K=16, V=8)
    got = run(case, implementation=implementation)
    check_same(got, {"final_state": case["initial_state"], "initial_state": case["dfinal_state"]})


@every
@pytest.mark.parametrize(
    ("H", "HV", "K", "V"), [(1, 1, 60, 100), (3, 3, 96, 32), (1, 4, 100, 60), (2, 6, 7, 130), (2, 2, 1, 1)]
)
def test_any_heads_and_channels(rng, implementation, H, HV, K, V):
    """K and V need not be equal or powers of two; value heads share keys."""
    case = make(rng, B=1, T=37, H=H, HV=HV, K=K, V=V, decay="mixed")
    check(run(case, implementation=implementation), oracle(case))


@pytest.mark.parametrize(("chunk_size", "g_min"), [(16, None), (32, None), (128, None), (32, -5.0)])
def test_every_chunk_size(rng, chunk_size, g_min):
    case = make(rng, T=143, B=1, H=1, HV=2, decay="mixed" if g_min is None else "saturated", beta="reflecting")
    check(run(case, implementation="chunk", chunk_size=chunk_size, g_min=g_min), oracle(case))


@every
def test_scale_of_any_number_type(rng, implementation):
    """An int is no special case, and 1 is not taken for a missing scale."""
    case = make(rng)
    check(run(case, implementation=implementation, scale=2), oracle(case, scale=2.0))
    arrays = tuple(case[n][:, :3] for n in ARRAYS[:5])
    for scale in (1, 1.0, np.float32(1)):
        o, _ = jax.jit(functools.partial(kda_jax.kda, implementation=implementation, scale=scale))(*arrays)
        tolerances.assert_close(o, reference.kda(*arrays, scale=1.0)[0], tolerances.FORWARD["float32"], repr(scale))


@every
def test_two_shapes_in_turn(rng, implementation):
    """Nothing chosen for one shape is reused for another."""
    first, second = (make(rng, B=1, T=37, H=1, HV=hv, K=k, V=v) for hv, k, v in ((1, 60, 100), (4, 100, 60)))
    for case in (first, second, first):
        check(run(case, implementation=implementation), oracle(case))


@every
def test_final_state_alone_has_gradients(rng, implementation):
    case = make(rng)
    case["do"] = np.zeros_like(case["do"])
    got, want = run(case, implementation=implementation), oracle(case)
    check(got, want)
    assert np.abs(want["initial_state"]).max() > 1e-6


@every
def test_missing_initial_state_is_zero(rng, implementation):
    case = make(rng)
    case["initial_state"] = np.zeros_like(case["initial_state"])
    arrays, cotangents = tuple(case[n] for n in ("q", "k", "v", "g", "beta")), (case["do"], case["dfinal_state"])
    call = operator(implementation=implementation)
    out, (*grads, missing) = call((*arrays, None), cotangents, {})
    want_out, want_grads = call((*arrays, case["initial_state"]), cotangents, {})
    assert missing is None
    for got, want in zip((*out, *grads), (*want_out, *want_grads[:-1]), strict=True):
        tolerances.assert_close(got, want, 1e-6)


@every
def test_zero_values_and_zero_strength(rng, implementation):
    """Without writes the state only decays; zero values still have gradients."""
    case = make(rng)
    case["g"] = np.full_like(case["g"], -1 / 16)
    case["v"], case["beta"] = np.zeros_like(case["v"]), case["beta"] * (rng.random(case["beta"].shape) < 0.5)
    check(run(case, implementation=implementation), oracle(case))
    case["beta"] = np.zeros_like(case["beta"])
    got = run(case, implementation=implementation)
    np.testing.assert_allclose(got["final_state"], case["initial_state"] * np.exp(-130 / 16), rtol=1e-5)
    check(got, oracle(case))


@every
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_decay_and_state_are_never_rounded(rng, implementation, dtype):
    """Without writes the final state is exp(sum g) S, to float32's precision whatever the inputs' dtype."""
    case = make(rng, dtype=dtype)
    case["beta"] = np.zeros_like(case["beta"])
    want = np.exp(case["g"].astype(np.float64).sum(1))[..., None] * case["initial_state"]
    got = run(case, implementation=implementation)["final_state"]
    tolerances.assert_close(got, want, tolerances.FORWARD["float32"])


@every
def test_no_decay_is_delta_net(rng, implementation):
    """g = 0 is not masked away: products of (I - beta k k^T) written out."""
    case = make(rng, decay="none")
    state = case["initial_state"][0, 0].astype(np.float64)
    for k, v, beta in zip(*(case[n][0, :, 0].astype(np.float64) for n in ("k", "v", "beta")), strict=True):
        state = (np.eye(len(k)) - beta * np.outer(k, k)) @ state + beta * np.outer(k, v)
    tolerances.assert_close(
        run(case, implementation=implementation)["final_state"][0, 0], state, tolerances.FORWARD["float32"]
    )


@every
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("g", [0.0, -1e-4, -0.05])
def test_identical_keys(rng, implementation, dtype, g, beta):
    """Powers of L reach 1e9 here while the inverse stays below 2: a Neumann series fails."""
    case = make(rng, identical=True, dtype=dtype)
    case["g"], case["beta"] = np.full_like(case["g"], g), np.full_like(case["beta"], beta)
    check(run(case, implementation=implementation), oracle(case), dtype, default=tolerances.IDENTICAL_KEYS[beta, dtype])


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_identical_keys_for_16384_tokens(rng, beta):
    """No decay: the errors of 256 chunks do not grow at beta 1, and add up at beta 2, where nothing is forgotten."""
    case = make(rng, B=1, T=16384, H=1, HV=1, K=8, V=4, decay="none", identical=True)
    case["beta"] = np.full_like(case["beta"], beta)
    check(run(case, implementation="chunk"), oracle(case), default=1e-4 if beta == 1 else 1e-2)


@pytest.mark.parametrize("g_min", [None, -5.0])
def test_saturated_for_4096_tokens(rng, g_min):
    case = make(rng, B=1, T=4096, H=1, HV=1, K=8, V=4, decay="saturated")
    check(run(case, implementation="chunk", g_min=g_min), oracle(case))


@every
def test_most_negative_decay_forgets(rng, implementation):
    """Any finite decay is exact: the largest float32 resets the state, with zero gradient and no NaN."""
    case = make(rng)
    case["g"][:, [0, 20, 129]] = -3e38
    check(run(case, implementation=implementation), oracle(case))


def test_dtype_of_outputs_follows_the_values(rng):
    case = make(rng, T=3)
    case["v"] = jnp.asarray(case["v"], jnp.bfloat16)
    assert run(case, implementation="chunk")["o"].dtype == jnp.bfloat16
