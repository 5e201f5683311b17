"""From checked arguments to what an implementation reads."""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from kda_jax.ops import validate
from kda_jax.ops.packing import Packing, plan_cu_seqlens, plan_segments
from kda_jax.ops.types import CuSeqlens, SegmentIds, State, state_dtype

SEQUENCE_DIMS = ("B T H K", "B T H K", "B T HV V", "B T HV K", "B T HV")
STEP_DIMS = ("B H K", "B H K", "B HV V", "B HV K", "B HV")


def plan(segment_ids: SegmentIds | None, cu_seqlens: CuSeqlens | None, num_tokens: int) -> Packing | None:
    """The packing plan of checked arguments, None for plain rows."""
    if segment_ids is not None:
        return plan_segments(segment_ids)
    return None if cu_seqlens is None else plan_cu_seqlens(jnp.asarray(cu_seqlens, jnp.int32), num_tokens)


def resolve_state(state: State | None, shape: tuple[int, ...], inputs: Sequence[Array]) -> State:
    """The initial state in the dtype of sums, zero by default, varying over the inputs' `shard_map` axes."""
    dtype = functools.reduce(jnp.promote_types, (state_dtype(x.dtype) for x in inputs))
    state = jnp.zeros(shape, dtype) if state is None else state.astype(dtype)
    axes = frozenset().union(*(jax.typeof(x).mat.varying for x in inputs)) - jax.typeof(state).mat.varying
    return jax.lax.pcast(state, tuple(axes), to="varying") if axes else state


def run_sequence(
    run: Callable,
    arrays: Mapping[str, Array],
    *,
    scale: float | None,
    initial_state: State | None,
    segment_ids: SegmentIds | None,
    cu_seqlens: CuSeqlens | None,
    **options,
) -> tuple[Array, ...]:
    """`run` on the inputs {"q", "k", "v", "g", "beta"}, activated or raw, checked here; `options` go to it unchanged.
    Whatever padding holds is left to `run`, which knows it from the plan.

    Returns:
      What `run` returns: o, the final state and, where it says so, the state after each chunk.
    """
    sizes = validate.check_inputs(arrays, SEQUENCE_DIMS)
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
    validate.check_packing(segment_ids, cu_seqlens, sizes)
    scale = validate.check_scale(scale, sizes)
    if initial_state is not None:
        validate.check_array("initial_state", initial_state, "N HV K V", sizes)
    state = resolve_state(initial_state, tuple(sizes[axis] for axis in ("N", "HV", "K", "V")), tuple(arrays.values()))
    if sizes["T"] == 0 or sizes["N"] == 0:
        chunks = -(-sizes["T"] // options["chunk_size"])
        return jnp.zeros_like(arrays["v"]), state, jnp.zeros((sizes["B"], chunks, *state.shape[1:]), state.dtype)
    packing = plan(segment_ids, cu_seqlens, sizes["T"])
    return run(*arrays.values(), scale=scale, initial_state=state, packing=packing, **options)
