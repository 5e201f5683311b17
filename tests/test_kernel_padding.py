"""Padding of rows with segments, through the public functions: whatever it holds reaches no other token, and no pass
over memory is spent on it; the kernels, interpreted or lowered.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from lowering import lower

import kda_jax
from kda_jax import Decay
from pallas_kernels import support, vjp
from pallas_kernels.config import Config

H, HV, K, V, T = 1, 2, 64, 64, 80
# Padding first, inside a block, over a whole block, up to a chunk's end, and last; a token alone after the first.
IDS = np.array([[0, 5, *[6] * 9, 0, 0, *[6] * 3, *[0] * 17, *[7] * 27, *[0] * 5, *[8] * 10, *[0] * 5]])
PADDING = IDS[0] == 0


def draw(rng, raw, filling=None):
    """Tokens, what is not of tokens, and the cotangents; `filling` in the padding of each array of tokens."""
    shapes = [(1, T, *s) for s in ((H, K), (H, K), (HV, V), (HV, K), (HV,), (HV, V))]
    q, k, v, g, beta, do = (rng.normal(size=s) for s in shapes)
    if not raw:
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        g, beta = -5 * rng.random(g.shape) ** 4, rng.random(beta.shape)
    more = [np.array([-1.0, 1.0]), rng.normal(size=(HV, K))] * raw
    state, dstate = (rng.normal(size=(1, HV, K, V)) / 3 for _ in range(2))
    *tokens, do = (
        np.asarray(x, jnp.bfloat16 if raw or i in (0, 1, 2, 5) else np.float32)
        for i, x in enumerate((q, k, v, g, beta, do))
    )
    for x in (*tokens, do):
        x[:, PADDING] = 0 if filling is None else np.resize(filling, x[:, PADDING].shape)
    return [jnp.asarray(x) for x in (*tokens, *(np.float32(x) for x in (*more, state)))], (
        jnp.asarray(do),
        jnp.float32(dstate),
    )


def operator(raw, g_min):
    def run(*inputs):
        *inputs, state = inputs
        options = {"initial_state": state, "segment_ids": jnp.asarray(IDS), "implementation": "mosaic_gpu"}
        if raw:
            return kda_jax.kda_raw(*inputs[:5], Decay(*inputs[5:], g_min), **options)
        return kda_jax.kda(*inputs, g_min=g_min, **options)

    return run


def differentiated(raw, g_min):
    def step(inputs, cotangents):
        results, pull = jax.vjp(operator(raw, g_min), *inputs)
        return *results, *pull(cotangents)

    return step


@pytest.fixture
def by_name(monkeypatch):
    """The kernels by their name on any device."""
    monkeypatch.setattr(support, "_unsupported_device", lambda: None)


@pytest.fixture
def interpreted(monkeypatch, by_name):
    """set(route) has them interpreted."""

    def set(route):
        options = {
            "interpret": plgpu.InterpretGPUParams(detect_races=route != "overlapped"),
            "config": Config(route=route),
        }
        for name in ("kda_mosaic", "kda_raw_mosaic"):
            monkeypatch.setattr(vjp, name, functools.partial(getattr(vjp, name), **options))

    return set


def check_clean(rng, run, raw):
    """NaN and infinities in padding: results are bit for bit those of zeros there, and exactly 0 at padding."""
    seed = rng.integers(2**32)
    want = run(*draw(np.random.default_rng(seed), raw))
    got = run(*draw(np.random.default_rng(seed), raw, [np.nan, np.inf, -np.inf, 3e38]))
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_array_equal(x, y, err_msg=str(i))
        assert np.isfinite(x).all()
        assert x.any()
        if x.shape[:2] == (1, T):
            assert not x[:, PADDING].any()


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(("route", "g_min"), [("overlapped", -5.0), ("fused", None)])
def test_outputs(rng, interpreted, route, raw, g_min):
    interpreted(route)
    run = jax.jit(operator(raw, g_min))
    check_clean(rng, lambda inputs, _: run(*inputs), raw)


@pytest.mark.parametrize(("raw", "g_min"), [(False, -5.0), (True, None), (True, -5.0)])
def test_gradients(rng, interpreted, raw, g_min):
    interpreted("apart")
    check_clean(rng, jax.jit(differentiated(raw, g_min)), raw)


@pytest.mark.parametrize("raw", [False, True])
def test_nothing_but_marks_is_selected_outside_the_kernels(rng, by_name, raw):
    program = lower(differentiated(raw, -5.0), draw(rng, raw))
    assert program.count("custom_call @mosaic_gpu") == 5
    shapes = re.findall(r"stablehlo\.select .*tensor<([\dx]+)x\w+>$", program, re.MULTILINE)
    assert max(math.prod(map(int, shape.split("x"))) for shape in shapes) == T


@pytest.mark.parametrize("raw", [False, True])
def test_the_backward_pass_keeps_the_arrays_of_the_caller_and_the_marks(rng, by_name, raw):
    inputs, _ = draw(rng, raw)
    program = jax.make_jaxpr(lambda *x: jax.tree.leaves(jax.vjp(operator(raw, -5.0), *x)[1]))(*inputs).jaxpr
    named = {e.outvars[0]: e.invars[0] for e in program.eqns if e.primitive.name == "name"}
    kept = {named.get(x, x) for x in program.outvars}
    assert kept >= set(program.invars)
    (marks,) = kept - set(program.invars)
    assert marks.aval.shape == (1, T)
