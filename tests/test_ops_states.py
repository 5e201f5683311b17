"""The state after every chunk: a prefix cache resumes from any of them."""

import functools

import jax
import numpy as np
import pytest
import reference
import tolerances
from cases import ARRAYS, make, oracle

import kda_jax


def with_states(case, **options):
    options = {"implementation": "chunk"} | options
    call = functools.partial(kda_jax.kda_with_states, **options)
    return jax.jit(call)(*(case[n] for n in ARRAYS[:5]), initial_state=case["initial_state"])


@pytest.mark.parametrize(
    ("T", "chunk_size", "ends"), [(64, 16, [16, 32, 48, 64]), (37, 16, [16, 32, 37]), (9, 16, [9])]
)
def test_every_state_is_that_of_the_recurrence(rng, T, chunk_size, ends):
    case = make(rng, T=T, decay="mixed", beta="reflecting")
    o, final_state, states = with_states(case, chunk_size=chunk_size)
    assert states.shape[:2] == (2, len(ends))
    for chunk, end in enumerate(ends):
        head = {n: case[n][:, :end] for n in ("q", "k", "v", "g", "beta")}
        _, want = reference.kda(**head, initial_state=case["initial_state"])
        tolerances.assert_close(states[:, chunk], want, tolerances.FORWARD["float32"], f"state after {end} tokens")
    np.testing.assert_array_equal(states[:, -1], final_state)
    tolerances.assert_close(o, oracle(case)["o"], tolerances.FORWARD["float32"])


def test_a_state_resumes_the_sequence(rng):
    case = make(rng, T=64, decay="weak")
    o, final_state, states = with_states(case, chunk_size=16)
    tail = [case[n][:, 32:] for n in ARRAYS[:5]]
    rest, end = jax.jit(kda_jax.kda)(*tail, initial_state=states[:, 1])
    tolerances.assert_close(rest, o[:, 32:], tolerances.FORWARD["float32"])
    tolerances.assert_close(end, final_state, tolerances.FORWARD["float32"])


def test_states_of_packed_rows(rng):
    """A chunk's state is that of the segment that its last token belongs to."""
    case = make(rng, T=32)
    ids = np.repeat([[1, 2], [3, 3]], 16, axis=1).astype(np.int32)
    _, _, states = with_states(case, chunk_size=8, **{"segment_ids": ids})
    second = {n: case[n][:1, 16:24] for n in ("q", "k", "v", "g", "beta")}
    tolerances.assert_close(states[:1, 2], reference.kda(**second)[1], tolerances.FORWARD["float32"])


def test_no_tokens_have_no_states(rng):
    case = make(rng, T=0)
    o, final_state, states = with_states(case)
    assert (o.shape, states.shape) == (case["v"].shape, (2, 0, 4, 24, 16))
    np.testing.assert_array_equal(final_state, case["initial_state"])


@pytest.mark.parametrize("implementation", ["scan", "chunk"])
@pytest.mark.parametrize("T", [0, 9])
def test_one_wide_input_makes_the_state_wide(rng, x64, implementation, T):
    case = make(rng, T=T)
    arrays = [case[n] for n in ARRAYS[:5]]
    o, final_state = kda_jax.kda(arrays[0].astype(np.float64), *arrays[1:], implementation=implementation)
    assert (o.dtype, final_state.dtype) == (np.float32, np.float64)
