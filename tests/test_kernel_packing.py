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
from tolerances import FORWARD, assert_close, gradient

from kda_jax.ops.prepare import plan, select_valid
from pallas_kernels.vjp import kda_mosaic

H, HV = 1, 2
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def half(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)


def inputs(rng, T, K, V, states):
    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k, v = (
        half(x)
        for x in (
            unit(rng.normal(size=(1, T, H, K))),
            unit(rng.normal(size=(1, T, H, K))),
            rng.normal(size=(1, T, HV, V)),
        )
    )
    return q, k, v, -0.1 * rng.random((1, T, HV, K)), rng.random((1, T, HV)), rng.normal(size=(states, HV, K, V)) / 3


def kernels(arrays, cotangents=None, **packing):
    """Through the plan and the zeroed padding, as `kda` calls them; with `cotangents` the gradients follow."""
    *tokens, state = [jnp.asarray(x, jnp.bfloat16 if i < 3 else jnp.float32) for i, x in enumerate(arrays)]
    packing = plan(packing.get("segment_ids"), packing.get("cu_seqlens"), tokens[2].shape[1])
    options = {"scale": tokens[0].shape[-1] ** -0.5, "packing": packing}
    function = functools.partial(kda_mosaic, interpret=plgpu.InterpretGPUParams(detect_races=True), **options)

    def run(*inputs):
        return function(*inputs[:5], initial_state=inputs[5])

    def differentiated(*inputs):
        results, pull = jax.vjp(run, *inputs)
        return *results, pull((jnp.asarray(cotangents[0], jnp.bfloat16), jnp.asarray(cotangents[1], jnp.float32)))

    return jax.jit(run if cotangents is None else differentiated)(*select_valid(packing, *tokens), state)


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


def test_sequences_with_their_own_states(rng, monkeypatch):
    """One ends where a chunk does, one is empty, one has a single token; rows behind the last belong to none."""
    monkeypatch.delattr("pallas_kernels.vjp.kda_chunk")  # the gradients are the kernels'
    cu = [0, 64, 64, 65, 130]
    arrays = inputs(rng, T=136, K=64, V=64, states=4)
    do, dstate = half(rng.normal(size=arrays[2].shape)), rng.normal(size=arrays[5].shape) / 3
    o, final_state, gradients = kernels(arrays, (do, dstate), cu_seqlens=jnp.asarray(cu))
    for n, (start, end) in enumerate(itertools.pairwise(cu)):
        tokens, own = slice(start, end), slice(n, n + 1)
        cotangents = {"do": do[:, tokens], "dfinal_state": dstate[own]}
        (want, last), expected = oracle(*(x[:, tokens] for x in arrays[:5]), arrays[5][own], **cotangents)
        assert_close(final_state[own], last, FORWARD["bfloat16"], f"state of sequence {n}")
        assert_close(gradients[5][own], expected[5], gradient("initial_state", "bfloat16"), f"dS of sequence {n}")
        if end > start:
            assert_close(o[:, tokens], want, FORWARD["bfloat16"], f"o of sequence {n}")
            for name, x, y in zip(NAMES, gradients, expected[:5], strict=False):
                assert_close(x[:, tokens], y, gradient(name, "bfloat16"), f"{name} of sequence {n}")
    assert not any(x[:, 130:].any() for x in (o, *gradients[:5]))


@pytest.mark.parametrize(("K", "V"), [(32, 96), (96, 32)])
def test_other_numbers_of_channels(rng, K, V):
    arrays = inputs(rng, T=70, K=K, V=V, states=1)
    o, final_state = kernels(arrays)
    want, last = oracle(*arrays)
    assert_close(o, want, FORWARD["bfloat16"], "o")
    assert_close(final_state, last, FORWARD["bfloat16"], "final_state")
