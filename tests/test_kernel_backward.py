"""The backward kernels in the interpreter, with its race detector, against the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from reference import kda as oracle
from tolerances import GATE_GRADIENT, IDENTICAL_KEYS, assert_close, gradient

from pallas_kernels.backward import backward
from pallas_kernels.config import Config
from pallas_kernels.vjp import kda_mosaic

NAMES = ("q", "k", "v", "g", "beta", "initial_state")
DECAYS = {
    "slow": lambda rng, shape: -5 / (1 + np.exp(4.6 + rng.normal(size=shape))),
    "saturated": lambda rng, shape: np.full(shape, -5.0),
    "mixed": lambda rng, shape: np.where(rng.random((*shape[:3], 1)) < 0.8, -0.05, -6e4) * rng.random(shape),
}


INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


@functools.cache
def kernels(config):
    def run(*arrays):
        *inputs, state, do, dstate = arrays
        options = {"scale": inputs[0].shape[-1] ** -0.5, "g_min": None, "config": config, "interpret": INTERPRET}
        return backward(tuple(inputs), state, (do, dstate), **options)

    return jax.jit(run)


def arrays(rng, decay, T, H, HV, K, V):
    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    heads = np.arange(1, 1 + HV)[:, None]  # no two heads alike
    q, k = (unit(rng.normal(size=(1, T, H, K))) for _ in range(2))
    v, do = (rng.normal(size=(1, T, HV, V)) for _ in range(2))
    g, beta = DECAYS[decay](rng, (1, T, HV, K)) / heads, rng.random((1, T, HV))
    beta[:, ::9] = 0.0
    state, dstate = (rng.normal(size=(1, HV, K, V)) / 3 for _ in range(2))
    half = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, do)]
    full = [jnp.asarray(x, jnp.float32) for x in (g, beta, state, dstate)]
    return [*half[:3], *full[:3], half[3], full[3]]


def check(inputs, run, bounds=None):
    got = run(*inputs)
    *exact, do, dstate = (np.asarray(x.astype(jnp.float32)) for x in inputs)
    _, want = oracle(*exact, do=do, dfinal_state=dstate)
    for name, x, y, of in zip(NAMES, got, want, inputs, strict=False):
        assert x.dtype == of.dtype
        assert_close(x, y, (bounds or {}).get(name, gradient(name, "bfloat16")), name)


@pytest.mark.parametrize("decay", DECAYS)
def test_grouped_heads_and_a_ragged_end(rng, decay):
    check(arrays(rng, decay, T=70, H=1, HV=2, K=64, V=64), kernels(Config()))


def test_bounded_decay_through_the_public_function(rng):
    def run(*arrays):
        *inputs, state, do, dstate = arrays
        function = functools.partial(kda_mosaic, scale=64**-0.5, g_min=-5.0, interpret=INTERPRET)
        return jax.vjp(lambda *x: function(*x[:5], initial_state=x[5]), *inputs, state)[1]((do, dstate))

    check(arrays(rng, "saturated", T=70, H=1, HV=2, K=64, V=64), jax.jit(run))


def test_two_warpgroups_two_parts_of_the_keys_and_more_chunks_than_stages(rng):
    check(arrays(rng, "slow", T=180, H=1, HV=1, K=128, V=128), kernels(Config(warpgroups=2, stages=2)))


def test_a_sequence_in_pieces(rng):
    """Of two, two and no chunks; what hardly fades must pass through all of them, both ways."""
    check(arrays(rng, "slow", T=200, H=1, HV=2, K=64, V=64), kernels(Config(pieces=6)))


@pytest.mark.parametrize(("K", "stages"), [(192, 2), (256, 1)])
def test_wide_keys(rng, K, stages):
    """Three parts of the keys; four, a state that the registers do not hold twice, and one stage."""
    check(arrays(rng, "slow", T=140, H=1, HV=1, K=K, V=64), kernels(Config(stages=stages)))


def test_identical_keys_that_forget_nothing(rng):
    """dv and dbeta are small differences of what goes through the states."""
    q, k, v, g, beta, *more = arrays(rng, "slow", T=180, H=1, HV=1, K=64, V=64)
    inputs = [q, jnp.broadcast_to(k[:, :1], k.shape), v, jnp.zeros_like(g), jnp.ones_like(beta), *more]
    check(inputs, kernels(Config()), {"v": IDENTICAL_KEYS[1.0, "bfloat16"], "beta": 1.5 * GATE_GRADIENT["bfloat16"]})
