"""The oracle itself: gradients against finite differences, values against vectors from other public implementations."""

import pathlib

import numpy as np
import pytest
import reference
import tolerances

GOLDEN = sorted((pathlib.Path(__file__).parent / "golden").glob("op_*.npz"))


def finite_difference(function, arrays, index, direction, cotangents, step=1e-5):
    """Directional derivative of sum(out * cotangent) along `direction` in argument `index`."""
    values = []
    for sign in (1, -1):
        moved = list(arrays)
        moved[index] = moved[index] + sign * step * direction
        values.append(sum((x * c).sum() for x, c in zip(function(*moved), cotangents, strict=True)))
    return (values[0] - values[1]) / (2 * step)


def assert_gradients(rng, function, arrays):
    """Every hand-derived gradient equals a central difference along a random direction."""
    cotangents = [rng.normal(size=x.shape) for x in function(*arrays)]
    _, grads = function(*arrays, do=cotangents[0], dfinal_state=cotangents[1])
    for index, (x, grad) in enumerate(zip(arrays, grads, strict=True)):
        direction = rng.normal(size=x.shape)
        want = finite_difference(function, arrays, index, direction, cotangents)
        np.testing.assert_allclose((grad * direction).sum(), want, rtol=1e-6, atol=1e-7, err_msg=f"argument {index}")


SEGMENTS = np.array([[0, 3, 3, 0, 3, 5, 5, 0, 0], [0] * 9, [1, 1, 2, 2, 2, 1, 1, 1, 1]])


@pytest.mark.parametrize("segment_ids", [None, SEGMENTS], ids=["whole", "packed"])
def test_gradients_are_finite_differences(rng, segment_ids):
    q, k = rng.normal(size=(2, 3, 9, 2, 3)) / 2
    arrays = [
        q,
        k,
        rng.normal(size=(3, 9, 4, 5)),
        -rng.random((3, 9, 4, 3)),
        2 * rng.random((3, 9, 4)),
        rng.normal(size=(3, 4, 3, 5)),
    ]
    assert_gradients(rng, lambda *x, **options: reference.kda(*x, segment_ids=segment_ids, **options), arrays)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_raw_gradients_are_finite_differences(rng, lower_bound):
    q, k = rng.normal(size=(2, 1, 9, 2, 3))
    gates = [rng.normal(size=(1, 9, 4, 3)), rng.normal(size=(1, 9, 4)), rng.normal(size=4), rng.normal(size=(4, 3))]
    arrays = [q, k, rng.normal(size=(1, 9, 4, 5)), *gates, rng.normal(size=(2, 4, 3, 5))]
    options = {"lower_bound": lower_bound, "beta_scale": 2.0, "cu_seqlens": [1, 4, 8]}
    assert_gradients(rng, lambda *x, **more: reference.kda_raw(*x, **options, **more), arrays)


def test_low_rank_gradients_are_finite_differences(rng):
    q, k, a, b = rng.normal(size=(4, 2, 6, 2, 3)) / 2
    arrays = [q, k, rng.normal(size=(2, 6, 2, 5)), -rng.random((2, 6, 2, 3)), a, b, rng.normal(size=(2, 2, 3, 5))]
    assert_gradients(rng, lambda *x, **options: reference.diagonal_plus_low_rank(*x, scale=0.5, **options), arrays)


def test_delta_rule_is_a_low_rank_transition(rng):
    q, k = rng.normal(size=(2, 1, 7, 2, 3)) / 2
    v, g, beta, s = (
        rng.normal(size=(1, 7, 2, 5)),
        -rng.random((1, 7, 2, 3)),
        rng.random((1, 7, 2, 1)),
        rng.normal(size=(1, 2, 3, 5)),
    )
    got = reference.diagonal_plus_low_rank(q, k, beta * v, g, np.exp(g) * k, -beta * k, s, scale=3.0)
    for x, want in zip(got, reference.kda(q, k, v, g, beta[..., 0], s, scale=3.0), strict=True):
        np.testing.assert_allclose(x, want, rtol=1e-12)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_agrees_with_other_implementations(path):
    data = np.load(path)
    bound = float(data["lower_bound"])
    names = ("q", "k", "v", "g_raw", "beta_raw", "A_log", "dt_bias", "initial_state")
    (o, final_state), grads = reference.kda_raw(
        *(data.get(name) for name in names),
        lower_bound=None if np.isnan(bound) else bound,
        beta_scale=float(data["beta_scale"]),
        do=data["do"],
        dfinal_state=data["dfinal_state"],
    )
    got = {"o": o, "final_state": final_state} | {
        f"grad_{n}": x for n, x in zip(names, grads, strict=True) if f"grad_{n}" in data
    }
    for name, x in got.items():
        tolerances.assert_close(x, data[name], tolerances.GOLDEN, name)
