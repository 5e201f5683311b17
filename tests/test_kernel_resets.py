"""Segments of rows whose bounded decay keeps its dense tiles: the kernels, interpreted, against the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.experimental.pallas import mosaic_gpu as plgpu
from tolerances import FORWARD, assert_close, gradient

from kda_jax import Decay
from kda_jax.ops.packing import plan_segments
from pallas_kernels.config import Config
from pallas_kernels.vjp import kda_mosaic, kda_raw_mosaic

T, H, HV, K, V = 150, 1, 2, 64, 64
OUTPUTS = ("o", "final_state")
NAMES = ("q", "k", "v", "g", "beta", "initial_state")
RAW = ("q", "k", "v", "g_raw", "beta_raw", "A_log", "dt_bias", "initial_state")


def segments():
    """New ones at the start and at the end of a block, inside, one token after another, at a chunk's end and start, at
    every token of a whole block and more; padding at some of their ends, and behind the last.
    """
    ids = np.ones(T, int)
    for start in (16, 21, 40, 41, 42, 63, 64, *range(78, 99), 106, 127):
        ids[start:] += 1
    ids[[20, 104, 105, 125]] = ids[146:] = 0
    return ids[None]


def draw(rng, raw):
    """The first head decays by e^-5 at every token, or by next to nothing less; the second anyhow. Every other segment
    is so loud that what is left of it at e^-5 would drown the next.
    """
    shapes = [(1, T, *s) for s in ((H, K), (H, K), (HV, V), (HV, K), (HV,), (HV, V))]
    q, k, v, g, beta, do = (rng.normal(size=s) for s in shapes)
    loud = np.where(segments() % 2, 1, 100)[..., None, None]
    v, do = loud * v, loud * do
    if raw:
        g[:, :, 0] += 20
        parameters = [np.array([0.5, -0.5]), rng.normal(size=(HV, K))]
    else:
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        g[:, :, 0], g[:, :, 1], beta = -5, -5 * rng.random((1, T, K)) ** 4, rng.random(beta.shape)
        parameters = []
    state, dstate = (rng.normal(size=(1, HV, K, V)) / 3 for _ in range(2))
    gate = jnp.bfloat16 if raw else jnp.float32
    tokens = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)] + [jnp.asarray(x, gate) for x in (g, beta)]
    full = [jnp.asarray(x, jnp.float32) for x in (*parameters, state)]
    return (*tokens, *full), (jnp.asarray(do, jnp.bfloat16), jnp.asarray(dstate, jnp.float32))


def kernels(raw, ids, route="apart"):
    options = {"scale": K**-0.5, "packing": plan_segments(jnp.asarray(ids)), "config": Config(route=route)}
    options["interpret"] = plgpu.InterpretGPUParams(detect_races=route != "overlapped")

    def run(*inputs):
        *inputs, state = inputs
        if raw:
            return kda_raw_mosaic(*inputs[:5], Decay(*inputs[5:], -5.0), initial_state=state, **options)
        return kda_mosaic(*inputs, g_min=-5.0, initial_state=state, **options)

    return run


def oracle(raw, inputs, ids, **cotangents):
    *inputs, state = (np.asarray(x.astype(jnp.float32), np.float64) for x in inputs)
    function = functools.partial(reference.kda_raw, lower_bound=-5.0) if raw else reference.kda
    return function(*inputs, initial_state=state, segment_ids=ids, **cotangents)


def check(got, want, names, bound):
    """Of what belongs to tokens the quiet segments by themselves."""
    for name, x, y in zip(names, got, want, strict=True):
        of_tokens = x.shape[1:2] == (T,)
        for own in (segments()[0] % 2 == 1, segments()[0] % 2 == 0) if of_tokens else (slice(None),):
            at = (slice(None), own) if of_tokens else ()
            assert_close(np.asarray(x)[at], y[at], bound(name), name)


@pytest.fixture(autouse=True)
def dense(monkeypatch):
    monkeypatch.delattr("pallas_kernels.inputs.Exact")


@pytest.mark.parametrize("raw", [False, True], ids=["activated", "raw"])
@pytest.mark.parametrize("route", ["overlapped", "fused"])
def test_outputs(rng, route, raw):
    inputs, _ = draw(rng, raw)
    got = jax.jit(kernels(raw, segments(), route))(*inputs)
    check(got, oracle(raw, inputs, segments()), OUTPUTS, lambda name: FORWARD["bfloat16"])


def test_few_key_channels(rng):
    """Channels that fill up the kernels' know of no reset."""
    (q, k, v, g, beta, state), _ = draw(rng, raw=False)
    inputs = *(x[..., :5] for x in (q, k)), v, g[..., :5], beta, state[:, :, :5]
    got = jax.jit(kernels(False, segments()))(*inputs)
    want = oracle(False, inputs, segments(), scale=K**-0.5)
    check(got, want, OUTPUTS, lambda name: FORWARD["bfloat16"])


@pytest.mark.parametrize("raw", [False, True], ids=["activated", "raw"])
def test_gradients(rng, raw):
    inputs, (do, dstate) = draw(rng, raw)

    def step(inputs, cotangents):
        results, pull = jax.vjp(kernels(raw, segments()), *inputs)
        return results, pull(cotangents)

    got, gradients = jax.jit(step)(inputs, (do, dstate))
    cotangents = {"do": np.asarray(do.astype(jnp.float32)), "dfinal_state": np.asarray(dstate)}
    want, expected = oracle(raw, inputs, segments(), **cotangents)
    check(got, want, OUTPUTS, lambda name: FORWARD["bfloat16"])
    check(gradients, expected, RAW if raw else NAMES, lambda name: gradient(name, "bfloat16"))
