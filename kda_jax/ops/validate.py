"""Checks at trace time: every message names the argument, what it is and what was expected."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kda_jax.ops.gates import Decay, check_lower_bound
from kda_jax.ops.packing import check_cu_seqlens


def check_array(name: str, x: Array, dims: str, sizes: dict[str, int], kind: type = jnp.floating) -> None:
    """Raises unless `x` has the axes `dims` ("B T H K"); sizes seen for the first time are added to `sizes`."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name} must be an array of shape [{dims.replace(' ', ', ')}], got {type(x).__name__}: {x!r}")
    if not jnp.issubdtype(x.dtype, kind):
        raise TypeError(f"{name} must have a dtype of kind {kind.__name__}, got {x.dtype}")
    axes = dims.split()
    expected = "[" + ", ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in axes) + "]"
    if len(x.shape) != len(axes) or any(sizes.get(axis, n) != n for axis, n in zip(axes, x.shape, strict=True)):
        raise ValueError(f"{name} must have shape {expected}, got {tuple(x.shape)}")
    sizes.update(zip(axes, x.shape, strict=True))


def check_inputs(arrays: Mapping[str, Array], dims: Sequence[str]) -> dict[str, int]:
    """The sizes of all axes; raises unless q, k, v, g and beta (or their raw forms) agree on them."""
    sizes: dict[str, int] = {}
    for (name, x), axes in zip(arrays.items(), dims, strict=True):
        check_array(name, x, axes, sizes)
    for axis in ("K", "V"):
        if sizes[axis] == 0:
            raise ValueError(f"q, k and v must have at least one channel a head, got {axis}=0")
    H, HV = sizes["H"], sizes["HV"]
    if H == 0 or HV == 0 or HV % H:
        raise ValueError(f"v must have a positive multiple of k's heads: v has HV={HV}, k has H={H}")
    return sizes


def check_decay(decay: Decay, sizes: dict[str, int]) -> None:
    """Raises unless `decay` is a Decay with parameters for every value head and key channel."""
    if not isinstance(decay, Decay):
        raise TypeError(f"decay must be a kda_jax.Decay, got {type(decay).__name__}")
    check_array("decay.A_log", decay.A_log, "HV", sizes)
    check_array("decay.dt_bias", decay.dt_bias, "HV K", sizes)


def check_scale(scale: float | None, sizes: dict[str, int] | None = None) -> float:
    """The output's scale, K**-0.5 for None where `sizes` has K; raises unless it is a plain number."""
    if scale is None and sizes is not None:
        return sizes["K"] ** -0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float, np.number)):
        expected = "a Python number" if sizes is None else "None or a Python number"
        raise TypeError(f"scale must be {expected}, got {type(scale).__name__}: {scale!r}")
    return float(scale)


def check_packing(segment_ids: Array | None, cu_seqlens: Array | None, sizes: dict[str, int]) -> None:
    """Raises unless at most one kind of packing is given, with the right shape; sets the number of states N."""
    if segment_ids is not None and cu_seqlens is not None:
        raise ValueError("give segment_ids or cu_seqlens, not both")
    sizes["N"] = sizes["B"]
    if segment_ids is not None:
        check_array("segment_ids", segment_ids, "B T", sizes, jnp.integer)
    if cu_seqlens is not None:
        check_array("cu_seqlens", cu_seqlens, "N+1", sizes, jnp.integer)
        if sizes["B"] != 1:
            raise ValueError(f"cu_seqlens needs one row of packed tokens, B=1, got B={sizes['B']}")
        if sizes["N+1"] == 0:
            raise ValueError("cu_seqlens must have N + 1 >= 1 entries, got 0")
        if not isinstance(cu_seqlens, jax.core.Tracer):
            check_cu_seqlens(np.asarray(cu_seqlens), sizes["T"])
        sizes["N"] = sizes["N+1"] - 1


def check_chunking(chunk_size: int, g_min: float | None) -> None:
    """Raises unless `chunk_size` is a power of two and `g_min` a promise that the dense tile can use."""
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, (int, np.integer)):
        raise TypeError(f"chunk_size must be an int, got {type(chunk_size).__name__}: {chunk_size!r}")
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size must be a power of two, got {chunk_size!r}")
    check_lower_bound("g_min", g_min)
