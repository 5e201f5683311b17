"""Decay activations, write strength and L2 norm against their formulas, where naive forms fail, and in every dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tolerances

from kda_jax.ops import gates

BOUNDS = (None, -5.0, -0.25)
DTYPES = ("float32", "bfloat16", "float16")


def parameters(rng, heads=4, channels=6, speed=(0.05, 201.0)):
    """A different rate for every head and a different bias for every channel."""
    A_log = np.linspace(*np.log(speed), heads).astype(np.float32)
    return A_log, rng.normal(size=(heads, channels)).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lower_bound", BOUNDS)
def test_decay_and_its_gradients(rng, lower_bound, dtype):
    """Parameters of each value head and channel, speeds up to 201; g is float32 whatever the projection's dtype."""
    A_log, dt_bias = parameters(rng)
    g_raw = jnp.asarray(rng.normal(size=(2, 5, 4, 6)), dtype)
    g, vjp = jax.vjp(lambda *x: gates.Decay(*x[1:], lower_bound)(x[0]), g_raw, A_log, dt_bias)
    wide = [np.asarray(x, np.float64) for x in (g_raw, A_log, dt_bias)]
    assert g.dtype == jnp.float32
    tolerances.assert_close(g, reference.decay(*wide, lower_bound), 1e-6, "g")
    dg = rng.normal(size=g.shape).astype(np.float32)
    for name, got, want in zip(
        ("g_raw", "A_log", "dt_bias"), vjp(dg), reference.decay_adjoint(*wide, lower_bound, dg), strict=True
    ):
        tolerances.assert_close(got, want, tolerances.gradient(name, "float32" if name != "g_raw" else dtype), name)


@pytest.mark.parametrize("x", [-80.0, -30.0, -17.0, -15.0, 0.0, 30.0, 90.0, 2661.0])
def test_softplus_decay_far_from_zero(x):
    """log(1 + e^x) is 17 % off at -15 and 0 at -17; e^x overflows at 90."""
    zeros = jnp.zeros((1, 1))
    g, slope = jax.value_and_grad(lambda x: gates.softplus_decay(x.reshape(1, 1), zeros[0], zeros)[0, 0])(
        jnp.float32(x)
    )
    np.testing.assert_allclose(g, -np.logaddexp(0.0, x), rtol=1e-6)
    np.testing.assert_allclose(slope, -reference.sigmoid(x), rtol=1e-5)


@pytest.mark.parametrize("lower_bound", [-5.0, -1.0])
def test_bounded_decay_stays_in_its_bound(lower_bound):
    """However extreme the projection: the dense tiles rely on it."""
    g_raw = jnp.array([-3e38, -1e4, 0.0, 1e4, 3e38], jnp.float32).reshape(5, 1, 1)
    g = gates.bounded_decay(g_raw, jnp.log(201.0)[None], jnp.zeros((1, 1)), lower_bound)
    assert ((g >= lower_bound) & (g <= 0)).all()
    np.testing.assert_allclose(g[[0, 2, 4], 0, 0], [0.0, lower_bound / 2, lower_bound])


@pytest.mark.parametrize("bound", [-5.01, 0.0, 1.0, float("nan")])
def test_bound_out_of_range(bound):
    with pytest.raises(ValueError, match=r"lower_bound.*\[-5"):
        gates.Decay(jnp.zeros(1), jnp.zeros((1, 1)), bound)
    with pytest.raises(ValueError, match=r"lower_bound.*\[-5"):
        gates.bounded_decay(jnp.zeros((1, 1)), jnp.zeros(1), jnp.zeros((1, 1)), bound)


def test_decay_is_a_pytree_with_a_static_bound(rng):
    decay = gates.Decay(*parameters(rng), -5.0)
    leaves, structure = jax.tree.flatten(decay)
    assert [x.shape for x in leaves] == [(4,), (4, 6)]
    assert jax.tree.unflatten(structure, leaves).lower_bound == -5.0
    g_raw = rng.normal(size=(2, 4, 6)).astype(np.float32)
    tolerances.assert_close(jax.jit(lambda d, x: d(x))(decay, g_raw), decay(g_raw), 1e-6)
    grads = jax.grad(lambda d: d(g_raw).sum())(decay)
    assert isinstance(grads, gates.Decay)
    assert grads.lower_bound == -5.0


@pytest.mark.parametrize("negative_eigenvalues", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_write_strength(dtype, negative_eigenvalues):
    raw = jnp.asarray([-30.0, -3.0, 0.0, 3.0, 30.0], dtype)
    beta = gates.write_strength(raw, negative_eigenvalues)
    assert beta.dtype == jnp.float32
    want = (1 + negative_eigenvalues) * reference.sigmoid(np.asarray(raw, np.float64))
    np.testing.assert_allclose(beta, want, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.0, 1e-5, 1e-3, 1.0, 60.0])
def test_l2_norm_of_every_size(rng, dtype, size):
    """A zero row gives zeros and a finite gradient, 1e3 dy; a tiny row is shortened by the epsilon inside the root."""
    x = jnp.asarray(size * rng.normal(size=(3, 8)), dtype)
    dy = jnp.asarray(rng.normal(size=(3, 8)), dtype)
    y, vjp = jax.vjp(gates.l2_normalize, x)
    x, exact_dy = (np.asarray(a, np.float64) for a in (x, dy))
    assert y.dtype == jnp.dtype(dtype)
    tolerances.assert_close(y, reference.l2_normalize(x), 1e-6 if dtype == "float32" else 5e-3)
    tolerances.assert_close(
        vjp(dy)[0], reference.l2_normalize_adjoint(x, exact_dy), 1e-5 if dtype == "float32" else 8e-3
    )
