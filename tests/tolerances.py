"""How far a result may be from the float64 oracle on the same (rounded) inputs, relative root mean square, and why."""

import numpy as np

# float64: both sides round at 1e-16; sums over some hundred tokens and the inverse leave about 1e-13.
# float32: the unit roundoff is 6e-8; sums of a chunk and the inverse leave about 1e-6, the backward ten times that.
# bfloat16: the oracle gets the same rounded inputs; what remains is the rounding of the outputs (2^-9 at most)
#   and of what an implementation rounds before a matrix product. dg and dbeta are differences of larger sums.
# float16: three bits more, but the same bounds, since an implementation may round its operands to either.
FORWARD = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 5e-3, "float16": 5e-3}
GRADIENT = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 8e-3, "float16": 8e-3}
GATE_GRADIENT = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}

# Identical keys, (beta, dtype): every write is a small difference of large terms. At beta 2 each one reflects, nothing
# is forgotten, and rounding the scores alone moves a chunk's result by 1e-4.
IDENTICAL_KEYS = {(1.0, "float32"): 1e-4, (2.0, "float32"): 1e-3, (1.0, "bfloat16"): 1e-2, (2.0, "bfloat16"): 1e-2}

GOLDEN = 1e-4  # float32 vectors that other implementations computed in float32

GATES = ("g", "beta", "g_raw", "beta_raw", "A_log", "dt_bias")


def gradient(name: str, dtype: str) -> float:
    """The bound for the gradient of one input."""
    return (GATE_GRADIENT if name in GATES else GRADIENT)[dtype]


def error(got, want) -> float:
    """Relative root mean square in float64; infinite where `got` is not finite, or where all should be zero and is not.

    What underflows in the dtype of `got` counts as zero: a gradient of exp(-300) is 0 in float32.
    """
    tiny = np.finfo(np.float64 if np.asarray(got).dtype == np.float64 else np.float32).tiny
    got, want = (
        np.where(np.abs(x) < tiny, 0.0, x) for x in (np.asarray(got).astype(np.float64), np.asarray(want, np.float64))
    )
    assert got.shape == want.shape, f"shape {got.shape}, want {want.shape}"
    if not np.isfinite(got).all():
        return np.inf
    size = np.sqrt(np.mean(want**2)) if want.size else 0.0
    difference = np.sqrt(np.mean((got - want) ** 2)) if want.size else 0.0
    return difference / size if size else (np.inf if difference else 0.0)


def assert_close(got, want, tolerance: float, name: str = "") -> None:
    """Fail with the name and the size of the error."""
    found = error(got, want)
    assert found <= tolerance, f"{name}: relative RMS {found:.2e} > {tolerance:.0e}"
