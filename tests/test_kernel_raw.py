"""Raw projections through the kernels' public function, in the interpreter, against the float64 oracle."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.experimental.pallas import mosaic_gpu as plgpu
from tolerances import FORWARD, assert_close, gradient

from kda_jax import Decay
from pallas_kernels.config import STAGES, Config
from pallas_kernels.vjp import kda_raw_mosaic

# The interpreter waits for ever where XLA has fewer threads than a cluster has blocks. NPROC says how many it has.
FOUR_THREADS = pytest.mark.skipif(
    int(os.environ.get("NPROC", os.cpu_count() or 1)) < 4, reason="needs four threads: set NPROC=8"
)
NAMES = ("q", "k", "v", "g_raw", "beta_raw", "A_log", "dt_bias", "initial_state")
T, H, HV, V = 70, 1, 2, 64  # the tokens behind the end must not decay the state


def draw(rng, K, gate):
    """q and k of any length, gates in bfloat16 as a layer projects them or in float32, different parameters a head."""
    half = [rng.normal(size=(1, T, *s)) * 3 for s in ((H, K), (H, K), (HV, V), (HV, K), (HV,))]
    full = [np.array([-1.0, 2.0]), rng.normal(size=(HV, K)), rng.normal(size=(1, HV, K, V)) / 3]
    half = [jnp.asarray(x, dtype) for x, dtype in zip(half, [jnp.bfloat16] * 3 + [gate] * 2, strict=True)]
    return half + [jnp.asarray(x, jnp.float32) for x in full]


def cancelled(total, raw, lower_bound, **options):
    """How much larger the root of the summed squares of dA_log's terms is than their sum."""
    q, k, v, g_raw, beta_raw, A_log, dt_bias = (x.astype(np.float64) for x in raw)
    beta_scale = options.pop("beta_scale")
    x, g = g_raw + dt_bias, reference.decay(g_raw, A_log, dt_bias, lower_bound)
    inputs = reference.l2_normalize(q), reference.l2_normalize(k), v, g, beta_scale * reference.sigmoid(beta_raw)
    _, (_, _, _, dg, *_) = reference.kda(*inputs, **options)
    speed = np.exp(A_log)[:, None]
    terms = dg * (g if lower_bound is None else g * (1 - g / lower_bound) * speed * x)
    np.testing.assert_allclose(terms.sum((0, 1, 3)), total, rtol=1e-8)
    return np.sqrt((terms**2).sum() / (total**2).sum())


@pytest.mark.parametrize(
    ("lower_bound", "negative_eigenvalues", "K", "gate", "route"),
    # two and four blocks of 64 channels share the norm
    [
        (None, True, 64, "float32", "apart"),
        (-5.0, False, 128, "bfloat16", "overlapped"),
        pytest.param(None, False, 256, "bfloat16", "apart", marks=FOUR_THREADS),
    ],
)
def test_outputs_and_every_gradient(rng, lower_bound, negative_eigenvalues, K, gate, route):
    arrays = draw(rng, K, gate)
    do, dstate = rng.normal(size=(1, T, HV, V)), rng.normal(size=(1, HV, K, V))

    def run(*arrays):
        *inputs, A_log, dt_bias, state = arrays
        # of the hand-over between blocks the interpreter knows nothing
        interpret = plgpu.InterpretGPUParams(detect_races=route == "apart")
        config = Config(stages=STAGES[K], route=route)
        options = {"scale": 0.1, "initial_state": state, "config": config, "interpret": interpret}
        decay = Decay(A_log, dt_bias, lower_bound)
        return kda_raw_mosaic(*inputs, decay, negative_eigenvalues=negative_eigenvalues, **options)

    def step(*arrays):
        results, pull = jax.vjp(run, *arrays)
        return results, pull((jnp.asarray(do, jnp.bfloat16), jnp.asarray(dstate, jnp.float32)))

    got, gradients = jax.jit(step)(*arrays)
    *raw, state = (np.asarray(x.astype(jnp.float32)) for x in arrays)
    options = {"lower_bound": lower_bound, "beta_scale": 1.0 + negative_eigenvalues, "scale": 0.1}
    cotangents = {"do": np.asarray(jnp.asarray(do, jnp.bfloat16).astype(jnp.float32)), "dfinal_state": dstate}
    want, expected = reference.kda_raw(*raw, initial_state=state, **options, **cotangents)
    for name, x, y in zip(("o", "final_state"), got, want, strict=True):
        assert_close(x, y, FORWARD["bfloat16"], name)
    bounds = {name: gradient(name, "bfloat16") for name in NAMES}
    bounds["A_log"] *= max(1, cancelled(expected[5], raw, initial_state=state, **options, **cotangents))
    for name, x, y in zip(NAMES, gradients, expected, strict=True):
        assert_close(x, y, bounds[name], name)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_one_kernel(rng, lower_bound):
    *inputs, A_log, dt_bias, _ = draw(rng, 64, jnp.bfloat16)
    options = {"config": Config(route="fused"), "interpret": plgpu.InterpretGPUParams()}
    run = jax.jit(lambda *x: kda_raw_mosaic(*x, Decay(A_log, dt_bias, lower_bound), scale=0.1, **options))
    raw = [np.asarray(x.astype(jnp.float32)) for x in (*inputs, A_log, dt_bias)]
    want = reference.kda_raw(*raw, lower_bound=lower_bound, scale=0.1)
    for name, x, y in zip(("o", "final_state"), run(*inputs), want, strict=True):
        assert_close(x, y, FORWARD["bfloat16"], name)
