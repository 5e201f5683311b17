"""What must hold without an oracle: causality, state passing, determinism; steps, scans and chunks are one operator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from cases import ARRAYS, BOUNDED, DECAYS, IMPLEMENTATIONS, check, check_same, make, make_raw, oracle, run

import kda_jax
from kda_jax.ops import gates

every = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
TOKENS = ("q", "k", "v", "g", "beta", "g_raw", "beta_raw", "do")
ANY_DECAY = [(decay, None) for decay in DECAYS] + [(decay, -5.0) for decay in BOUNDED]


def before(case, t):
    """The case with cotangents on the tokens before t alone."""
    do = case["do"].copy()
    do[:, t:] = 0
    return case | {"do": do, "dfinal_state": np.zeros_like(case["dfinal_state"])}


def assert_causal(case, other, t, **options):
    """Changing the tokens from t on leaves outputs before t, and gradients of a loss on them, bitwise as they were."""
    changed = {n: np.concatenate([x[:, :t], other[n][:, t:]], axis=1) if n in TOKENS else x for n, x in case.items()}
    first, second = (run(before(c, t), **options) for c in (case, changed))
    assert (first["final_state"] != second["final_state"]).any()
    np.testing.assert_array_equal(first["o"][:, :t], second["o"][:, :t], err_msg="o")
    for n in set(first) - {"o", "final_state"}:
        at = (slice(None), slice(None, t)) if n in TOKENS else ...
        np.testing.assert_array_equal(first[n][at], second[n][at], err_msg=f"gradient of {n}")
    return first


@every
@pytest.mark.parametrize("t", [1, 21, 113])
@pytest.mark.parametrize(("decay", "g_min"), ANY_DECAY)
def test_later_tokens_change_nothing_before(rng, implementation, decay, g_min, t):
    """No decay is anchored at a later token."""
    case, other = (make(rng, decay=decay, beta="reflecting") for _ in range(2))
    if (case["g"] == other["g"]).all():
        other["g"] = other["g"] * 0.5 - 0.1
    got = assert_causal(case, other, t, implementation=implementation, g_min=g_min)
    for n in ("q", "k", "v", "g", "beta"):
        assert not got[n][:, t:].any(), f"gradient of {n} from the future"
    for n in ("q", "v"):
        assert (np.abs(got[n][:, :t]).max((0, 2, 3)) > 0).all(), f"no gradient of {n} from the past"


@every
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_later_raw_tokens_change_nothing_before(rng, implementation, lower_bound):
    case, other = (make_raw(rng, speed=(0.3, 201.0)) for _ in range(2))
    assert_causal(case, other, 121, implementation=implementation, lower_bound=lower_bound)


@pytest.fixture(scope="module")
def split():
    """Jitted: the sequence in two calls, cut at a traced token by masking, and its gradients."""

    @functools.partial(jax.jit, static_argnames=("implementation", "g_min"))
    def call(case, at, implementation, g_min):
        first = jnp.broadcast_to(jnp.arange(case["q"].shape[1]) < at, case["q"].shape[:2]).astype(jnp.int32)
        kda = functools.partial(kda_jax.kda, implementation=implementation, g_min=g_min)

        def both(*arrays):
            o, state = kda(*arrays[:5], initial_state=arrays[5], segment_ids=first)
            rest, state = kda(*arrays[:5], initial_state=state, segment_ids=1 - first)
            return o + rest, state

        out, vjp = jax.vjp(both, *(case[n] for n in ARRAYS))
        return out, vjp((case["do"], case["dfinal_state"]))

    return call


@every
@pytest.mark.parametrize(("decay", "g_min"), [("mixed", None), ("saturated", -5.0)])
def test_state_passing_at_every_token(rng, split, implementation, decay, g_min):
    """Two calls, the second from the first's state, are one call: outputs, state and all gradients."""
    case = make(rng, B=1, T=35, H=1, HV=2, K=8, V=4, decay=decay)
    want = run(case, implementation=implementation, g_min=g_min)
    for at in range(36):
        (o, state), grads = split(case, at, implementation, g_min)
        check({"o": o, "final_state": state} | dict(zip(ARRAYS, grads, strict=True)), want)


@every
def test_prefill_in_two_calls(rng, implementation):
    """The state is [K, V] on both sides: K != V."""
    case = make(rng, B=1, T=35, H=1, HV=2, K=8, V=4)
    first, second = ({n: x[:, s] if n in TOKENS else x for n, x in case.items()} for s in (slice(16), slice(16, None)))
    head = run(first, implementation=implementation)
    tail = run(second | {"initial_state": head["final_state"]}, implementation=implementation)
    got = {"o": np.concatenate([head["o"], tail["o"]], 1), "final_state": tail["final_state"]}
    check(got, {n: oracle(case)[n] for n in got})


@every
def test_twenty_calls_are_bitwise_equal(rng, implementation):
    case = make(rng, decay="mixed")
    first = run(case, implementation=implementation)
    for _ in range(19):
        check_same(run(case, implementation=implementation), first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_are_the_scan_are_the_chunks(rng, dtype):
    """Decoding continues what prefilling began."""
    case = make(rng, decay="mixed", beta="reflecting", dtype=dtype)
    step, state, outputs = jax.jit(kda_jax.kda_step), case["initial_state"], []
    for t in range(130):
        o, state = step(*(case[n][:, t] for n in ("q", "k", "v", "g", "beta")), state)
        assert o.dtype == case["v"].dtype
        outputs.append(o)
    got = {"o": np.stack(outputs, 1), "final_state": state}
    check(got, {n: oracle(case)[n] for n in got}, dtype)
    for implementation in IMPLEMENTATIONS:
        want = run(case, implementation=implementation)
        tolerances.assert_close(state, want["final_state"], tolerances.FORWARD["float32"], implementation)
        tolerances.assert_close(got["o"], want["o"], tolerances.FORWARD[dtype], implementation)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_raw_steps_are_the_raw_sequence(rng, lower_bound):
    case = make_raw(rng, T=20)
    decay, state, outputs = gates.Decay(case["A_log"], case["dt_bias"], lower_bound), case["initial_state"], []
    step = jax.jit(kda_jax.kda_raw_step, static_argnames="negative_eigenvalues")
    for t in range(20):
        o, state = step(
            *(case[n][:, t] for n in ("q", "k", "v", "g_raw", "beta_raw")), decay, state, negative_eigenvalues=True
        )
        outputs.append(o)
    got = {"o": np.stack(outputs, 1), "final_state": state}
    check(got, {n: oracle(case, lower_bound=lower_bound, beta_scale=2.0)[n] for n in got})


def test_steps_have_gradients(rng):
    """One token through `kda_step`, every input."""
    case = make(rng, T=1)
    arrays = [case[n][:, 0] for n in ARRAYS[:5]]
    out, vjp = jax.vjp(kda_jax.kda_step, *arrays, case["initial_state"])
    *grads, dstate = vjp((case["do"][:, 0], case["dfinal_state"]))
    got = {"o": out[0][:, None], "final_state": out[1], "initial_state": dstate}
    check(got | {n: x[:, None] for n, x in zip(ARRAYS, grads, strict=False)}, oracle(case))


def test_the_default_is_the_chunk_form(rng):
    case = make(rng)
    check_same(run(case), run(case, implementation="chunk"))
