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
from reference import kda_raw as raw_oracle
from tolerances import FORWARD, assert_close, gradient

from kda_jax import Decay
from kda_jax.ops.prepare import plan
from pallas_kernels.vjp import kda_mosaic, kda_raw_mosaic

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
    """Through the plan, as `kda` calls them; with `cotangents` the gradients follow."""
    *tokens, state = [jnp.asarray(x, jnp.bfloat16 if i < 3 else jnp.float32) for i, x in enumerate(arrays)]
    packing = plan(packing.get("segment_ids"), packing.get("cu_seqlens"), tokens[2].shape[1])
    options = {"scale": tokens[0].shape[-1] ** -0.5, "packing": packing}
    function = functools.partial(kda_mosaic, interpret=plgpu.InterpretGPUParams(detect_races=True), **options)

    def run(*inputs):
        return function(*inputs[:5], initial_state=inputs[5])

    def differentiated(*inputs):
        results, pull = jax.vjp(run, *inputs)
        return *results, pull((jnp.asarray(cotangents[0], jnp.bfloat16), jnp.asarray(cotangents[1], jnp.float32)))

    return jax.jit(run if cotangents is None else differentiated)(*tokens, state)


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


def test_gradients_of_moved_tokens_are_gathers(rng):
    """XLA's own adjoint of a gather is a scatter, which is several times slower."""
    arrays = inputs(rng, T=128, K=64, V=64, states=2)
    cotangents = arrays[2], arrays[5]
    program = str(jax.make_jaxpr(lambda cu: kernels(arrays, cotangents, cu_seqlens=cu))(jnp.asarray([0, 30, 128])))
    assert "gather" in program
    assert "scatter" not in program


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


RAW = ("q", "k", "v", "g_raw", "beta_raw", "A_log", "dt_bias", "initial_state")


@pytest.mark.parametrize(("kind", "lower_bound"), [("cu_seqlens", -5.0), ("segment_ids", -1.0), ("segment_ids", None)])
def test_raw_projections(rng, monkeypatch, kind, lower_bound):
    """Padding keeps the state whatever a projection of zeros decays to, and a reset leaves nothing of it whatever the
    bound; the gradients of the decay's parameters are those of the sequences alone.
    """
    monkeypatch.delattr("pallas_kernels.vjp.l2_normalize")  # nothing is activated outside the kernels
    K, V, cu = 64, 64, [0, 40, 70] if kind == "segment_ids" else [0, 40, 40, 70]
    ids = np.repeat([2, 0, 3, 0], [40, 2, 30, 3])
    tokens = np.arange(73) if kind == "cu_seqlens" else np.flatnonzero(ids)
    T, states = (73, 3) if kind == "cu_seqlens" else (len(ids), 1)
    packing = plan(*((ids[None], None) if kind == "segment_ids" else (None, jnp.asarray(cu))), T)
    shapes = [(1, T, *s) for s in ((H, K), (H, K), (HV, V), (HV, K), (HV,), (HV, V))]
    *projections, do = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in shapes)
    parameters = np.array([-1.0, 1.0]), rng.normal(size=(HV, K)), rng.normal(size=(states, HV, K, V)) / 3
    inputs = [*projections, *(jnp.asarray(x, jnp.float32) for x in parameters)]
    dstate = jnp.asarray(rng.normal(size=(states, HV, K, V)) / 3, jnp.float32)

    def run(*inputs):
        *tokens, A_log, dt_bias, state = inputs
        options = {"scale": 0.1, "packing": packing, "interpret": plgpu.InterpretGPUParams(detect_races=True)}
        return kda_raw_mosaic(*tokens, Decay(A_log, dt_bias, lower_bound), initial_state=state, **options)

    def differentiated(*inputs):
        results, pull = jax.vjp(run, *inputs)
        return results, pull((do, dstate))

    (o, final_state), got = jax.jit(differentiated)(*inputs)
    wide = [np.asarray(x.astype(jnp.float32)) for x in (*inputs, do, dstate)]
    *wide, A_log, dt_bias, state, do, dstate = wide
    sums = [0.0, 0.0]
    for n, (start, end) in enumerate(itertools.pairwise(cu)):
        at, last = tokens[start:end], end == cu[-1]
        if kind == "cu_seqlens":
            before, after = state[n : n + 1], dstate[n : n + 1]
        else:
            before, after = state * (n == 0), dstate * last
        options = {"lower_bound": lower_bound, "scale": 0.1, "initial_state": before, "dfinal_state": after}
        results, want = raw_oracle(*(x[:, at] for x in wide), A_log, dt_bias, do=do[:, at], **options)
        sums = [total + x for total, x in zip(sums, want[5:7], strict=True)]
        if kind == "cu_seqlens" or last:
            own = slice(n, n + 1) if kind == "cu_seqlens" else slice(None)
            assert_close(final_state[own], results[1], FORWARD["bfloat16"], f"state of sequence {n}")
        if kind == "cu_seqlens" or n == 0:
            assert_close(got[7][n : n + 1], want[7], gradient("initial_state", "bfloat16"), f"dS of sequence {n}")
        if end > start:
            assert_close(o[:, at], results[0], FORWARD["bfloat16"], f"o of sequence {n}")
            for name, x, y in zip(RAW, got, want[:5], strict=False):
                assert_close(x[:, at], y, gradient(name, "bfloat16"), f"{name} of sequence {n}")
    for name, x, y in zip(RAW[5:], got[5:], sums, strict=False):
        assert_close(x, y, gradient(name, "bfloat16"), name)
    outside = np.setdiff1d(np.arange(T), tokens[: cu[-1]])
    assert not any(x[:, outside].any() for x in (o, *got[:5]))


@pytest.mark.parametrize(("K", "V"), [(32, 96), (96, 32), (200, 32)])
def test_other_numbers_of_channels(rng, K, V):
    arrays = inputs(rng, T=70, K=K, V=V, states=1)
    o, final_state = kernels(arrays)
    want, last = oracle(*arrays)
    assert_close(o, want, FORWARD["bfloat16"], "o")
    assert_close(final_state, last, FORWARD["bfloat16"], "final_state")
