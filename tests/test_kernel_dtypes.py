"""What the kernels round to bfloat16: float32, and float16 for gradients. In the interpreter, with its race detector,
against the float64 oracle; and which implementation the public functions choose.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu
from lowering import lower
from tolerances import FORWARD, assert_close, gradient

from kda_jax import Decay, KimiDeltaAttention, kda, kda_raw, kda_with_states
from pallas_kernels import support
from pallas_kernels.vjp import kda_mosaic, kda_raw_mosaic

NAMES = ("q", "k", "v", "g", "beta", "initial_state")
RAW = ("q", "k", "v", "g_raw", "beta_raw", "A_log", "dt_bias", "initial_state")
T, H, HV, K, V = 70, 1, 2, 64, 64


def draw(rng, dtype, size):
    """Inputs with write strengths of 0 and of next to nothing, and cotangents of the size."""

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k = (unit(rng.normal(size=(1, T, H, K))) for _ in range(2))
    v, do = (rng.normal(size=(1, T, HV, V)) for _ in range(2))
    g, beta = -0.1 * rng.random((1, T, HV, K)) * np.array([[1.0], [9.0]]), rng.random((1, T, HV))
    beta[:, ::9], beta[:, 4::9] = 0.0, 10.0 ** rng.uniform(-9, -5, beta[:, 4::9].shape)
    state, dstate = (rng.normal(size=(1, HV, K, V)) / 8 for _ in range(2))
    half, full = (q, k, v, size * do), (g, beta, state, size * dstate)
    q, k, v, do = (jnp.asarray(x, dtype) for x in half)
    g, beta, state, dstate = (jnp.asarray(x, jnp.float32) for x in full)
    return (q, k, v, g, beta, state), (do, dstate)


def draw_raw(rng, dtype):
    """Projections in the dtype, gates too, and parameters of each head."""
    (q, k, v, g, beta, state), cotangents = draw(rng, dtype, 1.0)
    projections = 3 * q, 2 * k, v, *(jnp.asarray(rng.normal(size=x.shape), dtype) for x in (g, beta))
    parameters = (jnp.asarray(x, jnp.float32) for x in (np.array([-1.0, 1.0]), rng.normal(size=(HV, K))))
    return (*projections, *parameters, state), cotangents


@functools.cache
def step(raw):
    options = {"scale": K**-0.5, "interpret": plgpu.InterpretGPUParams(detect_races=True)}

    def run(*inputs):
        *tokens, state = inputs
        if raw:
            *tokens, A_log, dt_bias = tokens
            return kda_raw_mosaic(*tokens, Decay(A_log, dt_bias, -5.0), initial_state=state, **options)
        return kda_mosaic(*tokens, initial_state=state, **options)

    def differentiated(inputs, cotangents):
        results, pull = jax.vjp(run, *inputs)
        return results, pull(cotangents)

    return jax.jit(differentiated)


def check(inputs, cotangents):
    raw = len(inputs) == len(RAW)
    results, gradients = step(raw)(inputs, cotangents)
    exact, (do, dstate) = ([np.asarray(x, np.float64) for x in arrays] for arrays in (inputs, cotangents))
    options = {"initial_state": exact.pop(), "do": do, "dfinal_state": dstate}
    want, expected = reference.kda_raw(*exact, lower_bound=-5.0, **options) if raw else reference.kda(*exact, **options)
    for name, x, y, dtype in zip(("o", "final_state"), results, want, (inputs[2].dtype, jnp.float32), strict=True):
        assert x.dtype == dtype
        assert_close(x, y, FORWARD["bfloat16"], name)
    for name, x, y, like in zip(RAW if raw else NAMES, gradients, expected, inputs, strict=True):
        assert x.dtype == like.dtype
        assert_close(x, y, gradient(name, "bfloat16"), name)


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_gradients_of_float16(rng, monkeypatch, size):
    """float16 itself would be off by 0.4 in dbeta where beta is next to nothing."""
    monkeypatch.delattr("pallas_kernels.vjp.kda_chunk")  # they are the kernels'
    check(*draw(rng, jnp.float16, size))


def test_gradients_of_raw_float16(rng, monkeypatch):
    monkeypatch.delattr("pallas_kernels.vjp.kda_chunk")
    check(*draw_raw(rng, jnp.float16))


def test_float32(rng, monkeypatch):
    monkeypatch.delattr("pallas_kernels.vjp.kda_chunk")
    check(*draw(rng, jnp.float32, 1.0))


def test_raw_float32(rng, monkeypatch):
    monkeypatch.delattr("pallas_kernels.vjp.kda_chunk")
    check(*draw_raw(rng, jnp.float32))


def specs(dtype, k_dtype=None):
    """q, k, v, gate and beta."""
    qk, gate = (1, 256, 2, 64), (1, 256, 2, 64)
    shapes = [(qk, dtype), (qk, k_dtype or dtype), (qk, dtype), (gate, jnp.float32), (gate[:3], jnp.float32)]
    return [jax.ShapeDtypeStruct(*s) for s in shapes]


def raw(*x, **options):
    return kda_raw(*x, Decay(jnp.zeros(2), jnp.zeros((2, 64))), **options)


FUNCTIONS = {"kda": kda, "kda_raw": raw, "kda_with_states": kda_with_states}
FORWARD_KERNELS, BACKWARD_KERNELS = 2, 3


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(support, "_unsupported_device", lambda: None)


def count(function, arguments):
    return lower(function, arguments).count("custom_call @mosaic_gpu")


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_float32_is_rounded_by_name_alone(hopper, function):
    def kernels(implementation, dtype=jnp.float32):
        return count(functools.partial(function, implementation=implementation), specs(dtype))

    assert kernels(None) == kernels(("chunk", "mosaic_gpu")) == 0
    assert kernels("mosaic_gpu") == kernels(("mosaic_gpu", "chunk")) == FORWARD_KERNELS
    assert kernels(None, jnp.bfloat16) == FORWARD_KERNELS  # what needs no rounding needs no name


@pytest.mark.parametrize(("implementation", "kernels"), [(None, 0), ("mosaic_gpu", FORWARD_KERNELS + BACKWARD_KERNELS)])
@pytest.mark.parametrize("function", [kda, raw], ids=["kda", "kda_raw"])
def test_gradients_of_float32(hopper, function, implementation, kernels):
    def loss(*x):
        return sum(jnp.sum(y) for y in function(*x, implementation=implementation))

    assert count(jax.value_and_grad(loss, tuple(range(5))), specs(jnp.float32)) == kernels


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("dtypes", [(jnp.float64,), (jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)])
def test_no_other_dtype_is_rounded(hopper, function, dtypes):
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match=r"must share a dtype of .*'float32'"):
        jax.eval_shape(functools.partial(function, implementation="mosaic_gpu"), *specs(*dtypes))


@pytest.mark.parametrize(("implementation", "kernels"), [(None, 0), ("mosaic_gpu", FORWARD_KERNELS)])
def test_a_layer_in_float32(hopper, implementation, kernels):
    layer = nnx.eval_shape(lambda: KimiDeltaAttention(32, 2, 64, implementation=implementation, rngs=nnx.Rngs(0)))
    graph, parameters = nnx.split(layer)
    run = functools.partial(lambda parameters, x: nnx.merge(graph, parameters)(x)[0])
    assert count(run, (parameters, jax.ShapeDtypeStruct((1, 256, 32), jnp.float32))) == kernels
