"""Vectors that other public implementations computed from raw inputs, in float32."""

import pathlib

import numpy as np
import pytest
import tolerances
from cases import IMPLEMENTATIONS, RAW_ARRAYS, run

GOLDEN = sorted((pathlib.Path(__file__).parent / "golden").glob("op_*.npz"))


def load(path):
    """(case, options, wanted results)."""
    data = dict(np.load(path))
    shape = data["final_state"].shape
    case = {n: data[n] for n in (*RAW_ARRAYS, "dfinal_state", "do") if n in data}
    case.setdefault("initial_state", np.zeros(shape, np.float32))
    bound, scale = float(data["lower_bound"]), float(data["beta_scale"])
    want = {n: data[n] for n in ("o", "final_state")} | {
        n: data[f"grad_{n}"] for n in RAW_ARRAYS if f"grad_{n}" in data
    }
    return case, {"lower_bound": None if np.isnan(bound) else bound, "negative_eigenvalues": scale == 2.0}, want


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_raw(path, implementation):
    case, options, want = load(path)
    got = run(case, implementation=implementation, **options)
    for name, x in want.items():
        tolerances.assert_close(got[name], x, tolerances.GOLDEN, name)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_activated(path, implementation):
    """The same from the activated decay and strength; the L2 norm stays outside."""
    case, options, want = load(path)
    data = np.load(path)
    unit = {n: case[n] / np.sqrt((case[n] ** 2).sum(-1, keepdims=True) + np.float32(1e-6)) for n in ("q", "k")}
    active = {n: case[n] for n in ("v", "initial_state", "do", "dfinal_state")} | unit
    got = run(active | {n: data[n] for n in ("g", "beta")}, implementation=implementation, g_min=options["lower_bound"])
    for name in ("o", "final_state", "v", "initial_state"):
        if name in want:
            tolerances.assert_close(got[name], want[name], tolerances.GOLDEN, name)


def test_every_vector_is_there():
    assert [path.stem for path in GOLDEN] == ["op_bounded", "op_bounded_saturated", "op_neg_eigval", "op_softplus"]
