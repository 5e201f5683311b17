"""Packed sequences and filled-up channels through the kernels' public function, in the interpreter, against the float64
oracle run sequence by sequence; gradients too.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from reference import kda as oracle
from tolerances import FORWARD, assert_close

from kda_jax.ops.prepare import plan, select_valid
from pallas_kernels.vjp import kda_mosaic

H, HV = 1, 2


def inputs(rng, T, K, V, states):
    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def half(x):
        return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)

    q, k, v = (
        half(x)
        for x in (
            unit(rng.normal(size=(1, T, H, K))),
            unit(rng.normal(size=(1, T, H, K))),
            rng.normal(size=(1, T, HV, V)),
        )
    )
    return q, k, v, -0.1 * rng.random((1, T, HV, K)), rng.random((1, T, HV)), rng.normal(size=(states, HV, K, V)) / 3


def kernels(arrays, **packing):
    """Through the plan and the zeroed padding, as `kda` calls them."""
    *arrays, state = arrays
    arrays = [jnp.asarray(x, jnp.bfloat16 if i < 3 else jnp.float32) for i, x in enumerate(arrays)]
    packing = plan(packing.get("segment_ids"), packing.get("cu_seqlens"), arrays[2].shape[1])
    run = functools.partial(
        kda_mosaic,
        scale=arrays[0].shape[-1] ** -0.5,
        initial_state=jnp.asarray(state, jnp.float32),
        packing=packing,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    return jax.jit(run)(*select_valid(packing, *arrays))


def test_segments_of_a_row(rng):
    """Resets in the middle of chunks, padding between; the state of the first segment comes in, the last's goes out."""
    arrays = inputs(rng, T=140, K=64, V=64, states=1)
    ids = np.repeat([3, 0, 5, 2], [50, 7, 70, 13])[None]
    o, final_state = kernels(arrays, segment_ids=jnp.asarray(ids))
    state = arrays[5]
    for segment in (3, 5, 2):
        own = ids[0] == segment
        want, last = oracle(*(x[:, own] for x in arrays[:5]), state)
        assert_close(o[:, own], want, FORWARD["bfloat16"], f"o of segment {segment}")
        state = np.zeros_like(state)
    assert_close(final_state, last, FORWARD["bfloat16"], "final_state")


def test_sequences_with_their_own_states(rng):
    """One ends where a chunk does, one is empty, one has a single token; rows behind the last belong to none."""
    cu = [0, 64, 64, 65, 130]
    arrays = inputs(rng, T=136, K=64, V=64, states=4)
    o, final_state = kernels(arrays, cu_seqlens=jnp.asarray(cu))
    for n, (start, end) in enumerate(itertools.pairwise(cu)):
        want, last = oracle(*(x[:, start:end] for x in arrays[:5]), arrays[5][n : n + 1])
        if end > start:
            assert_close(o[:, start:end], want, FORWARD["bfloat16"], f"o of sequence {n}")
        assert_close(final_state[n : n + 1], last, FORWARD["bfloat16"], f"state of sequence {n}")


@pytest.mark.parametrize(("K", "V"), [(32, 96), (96, 32), (200, 32)])
def test_other_numbers_of_channels(rng, K, V):
    arrays = inputs(rng, T=70, K=K, V=V, states=1)
    o, final_state = kernels(arrays)
    want, last = oracle(*arrays)
    assert_close(o, want, FORWARD["bfloat16"], "o")
    assert_close(final_state, last, FORWARD["bfloat16"], "final_state")
