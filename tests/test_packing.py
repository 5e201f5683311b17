"""Packed sequences equal separate ones, padding is inert, empty sequences pass their state through."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from cases import IMPLEMENTATIONS, check, check_same, make, make_raw, oracle, run

import kda_jax
from kda_jax.ops import packing

every = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
TOKENS = ("q", "k", "v", "g", "beta", "g_raw", "beta_raw", "do")


def runs(*lengths):
    """Ids of one row from (id, length) pairs."""
    return np.concatenate([np.full(n, i, np.int32) for i, n in lengths])


SEGMENTS = {
    "none": np.ones((2, 96)),
    "middle": [runs((1, 20), (0, 9), (2, 40), (0, 3), (3, 24)), runs((7, 33), (0, 31), (7, 32))],
    "left": [runs((0, 95), (4, 1)), runs((0, 17), (1, 79))],
    "right": [runs((4, 1), (0, 95)), runs((1, 64), (0, 32))],
    "both": [runs((0, 16), (1, 16), (2, 1), (3, 31), (0, 32)), runs((0, 96))],
    "short": [np.arange(1, 97), np.repeat(np.arange(48), 2)],
    "returning": [runs((1, 30), (2, 30), (1, 36)), runs((-3, 50), (1, 46))],
}
CU_SEQLENS = {  # few different lengths, so few programs
    "one": [0, 96, 96],
    "outside": [5, 40, 90],
    "empty first": [0, 0, 5],
    "empty last": [0, 5, 5],
    "all empty": [7, 7, 7],
    "several": [0, 1, 17, 64, 96],
    "empty between": [0, 64, 64, 80, 96],
    "empty around": [3, 3, 40, 41, 41],
    "no sequences": [0],
}


def packed(rng, kind, name, make=make, **options):
    """A case with the named packing."""
    options = {"T": 96, "decay": "mixed", "beta": "reflecting"} | options
    if kind == "segment_ids":
        return make(rng, **options) | {kind: np.asarray(SEGMENTS[name], np.int32)}
    cu_seqlens = np.asarray(CU_SEQLENS[name], np.int32)
    return make(rng, B=1, N=len(cu_seqlens) - 1, **options) | {kind: cu_seqlens}


both = pytest.mark.parametrize(
    ("kind", "name"), [("segment_ids", n) for n in SEGMENTS] + [("cu_seqlens", n) for n in CU_SEQLENS]
)


def belongs(case):
    """[B, T], whether a token is in a sequence."""
    if "segment_ids" in case:
        return case["segment_ids"] != 0
    token, cu = np.arange(case["v"].shape[1]), case["cu_seqlens"]
    return ((token >= cu[0]) & (token < cu[-1]))[None]


@every
@both
def test_packed_equals_the_oracle(rng, implementation, kind, name):
    case = packed(rng, kind, name)
    got = run(case, implementation=implementation)
    check(got, oracle(case))
    for array in ("o", "q", "k", "v", "g", "beta"):
        assert not got[array][~belongs(case)].any(), f"{array} outside every sequence"


@every
@pytest.mark.parametrize(("kind", "name"), [("segment_ids", "middle"), ("cu_seqlens", "empty around")])
def test_packed_float64(rng, x64, implementation, kind, name):
    case = packed(rng, kind, name, dtype="float64")
    check(run(case, implementation=implementation), oracle(case), "float64")


@every
@pytest.mark.parametrize(("kind", "name"), [("segment_ids", "middle"), ("cu_seqlens", "outside")])
def test_packed_dense_tiles(rng, implementation, kind, name):
    case = packed(rng, kind, name, decay="saturated")
    check(run(case, implementation=implementation, g_min=-5.0), oracle(case))


@every
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize(("kind", "name"), [("segment_ids", "middle"), ("cu_seqlens", "outside")])
def test_packed_raw(rng, implementation, kind, name, bound):
    """Padding has no part in the gradients of A_log and dt_bias."""
    case = packed(rng, kind, name, make=make_raw, decay="weak")
    check(run(case, implementation=implementation, lower_bound=bound), oracle(case, lower_bound=bound))


LENGTHS = (37, 22, 37)


@every
@pytest.mark.parametrize("kind", ["segment_ids", "cu_seqlens"])
def test_packed_equals_separate(rng, implementation, kind):
    """The library against itself, one sequence at a time; without `cu_seqlens` only the row's ends have a state."""
    if kind == "cu_seqlens":
        case = make(rng, B=1, T=96, N=3, decay="weak") | {kind: np.asarray([0, 37, 59, 96], np.int32)}
    else:
        case = make(rng, B=1, T=96, decay="weak") | {kind: np.repeat([[5, 2, 9]], LENGTHS, axis=1).astype(np.int32)}
    whole = run(case, implementation=implementation)
    for n, (start, length) in enumerate(zip((0, 37, 59), LENGTHS, strict=True)):
        piece = {name: case[name][:, start : start + length] for name in TOKENS if name in case}
        for name, owner in (("initial_state", 0), ("dfinal_state", 2)):
            own = case[name][[n]] if kind == "cu_seqlens" else case[name] * (n == owner)
            piece[name] = own.astype(np.float32)
        alone = run(piece, implementation=implementation)
        for name in ("o", "q", "k", "v", "g", "beta"):
            bound = tolerances.FORWARD["float32"] if name == "o" else tolerances.gradient(name, "float32")
            tolerances.assert_close(whole[name][:, start : start + length], alone[name], bound, name)
        for name in ("final_state", "initial_state"):
            if kind == "cu_seqlens" or n == (2 if name == "final_state" else 0):
                at = n if kind == "cu_seqlens" else 0
                tolerances.assert_close(whole[name][at], alone[name][0], tolerances.gradient("q", "float32"), name)


@every
@pytest.mark.parametrize(("kind", "name"), [("segment_ids", "middle"), ("cu_seqlens", "several")])
def test_sequences_do_not_see_each_other(rng, implementation, kind, name):
    """Another second sequence changes nothing, bitwise, in the first and the third."""
    case = packed(rng, kind, name, decay="weak")
    second = slice(29, 69) if kind == "segment_ids" else slice(1, 17)
    changed = {n: x.copy() for n, x in case.items()}
    for n in ("q", "k", "v", "g", "beta", "do"):
        changed[n][0, second] = make(rng, T=96, decay="one")[n][0, second]
    before, after = (run(c, implementation=implementation) for c in (case, changed))
    for n in ("o", "q", "k", "v", "g", "beta"):
        other = np.delete(np.arange(96), np.r_[second])
        np.testing.assert_array_equal(before[n][0, other], after[n][0, other], err_msg=n)
        assert (before[n][0, second] != after[n][0, second]).any()
    rows = [0] if kind == "segment_ids" else [0, 2, 3]
    check_same(
        {n: before[n][rows] for n in ("final_state", "initial_state")},
        {n: after[n][rows] for n in ("final_state", "initial_state")},
    )


@every
@pytest.mark.parametrize("name", [n for n in CU_SEQLENS if "empty" in n])
def test_empty_sequences_pass_their_state_through(rng, implementation, name):
    case = packed(rng, "cu_seqlens", name)
    got, empty = run(case, implementation=implementation), np.diff(case["cu_seqlens"]) == 0
    np.testing.assert_array_equal(got["final_state"][empty], case["initial_state"][empty])
    np.testing.assert_array_equal(got["initial_state"][empty], case["dfinal_state"][empty])


@every
@pytest.mark.parametrize("make", [make, make_raw], ids=["activated", "raw"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("segment_ids", "middle"), ("segment_ids", "left"), ("segment_ids", "right"), ("cu_seqlens", "outside")],
)
def test_poisoned_padding(rng, implementation, kind, name, make):
    """Whatever stands in the padding, nothing changes, bitwise, and its own gradients are zero."""
    case = packed(rng, kind, name, make=make, decay="weak")
    padding, poisoned = ~belongs(case), dict(case)
    for n in TOKENS:
        if n in case:
            poisoned[n] = case[n].copy()
            poisoned[n][padding] = rng.choice([-1e30, 1e30], poisoned[n][padding].shape)
    clean, got = (run(c, implementation=implementation) for c in (case, poisoned))
    check_same(got, clean)
    for n in TOKENS[:-1]:
        if n in got:
            assert not got[n][padding].any(), n


@every
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_equals_unpadded(rng, implementation, side):
    """Padding neither writes the state nor decays it: a padded row of a batch is the row alone."""
    short = make(rng, B=1, T=86, decay="one")
    width = (10, 0) if side == "left" else (0, 10)
    long = {
        n: np.pad(x, ((0, 0), width) + ((0, 0),) * (x.ndim - 2), constant_values=-1) if n in TOKENS else x
        for n, x in short.items()
    }
    long["segment_ids"] = np.pad(np.ones((1, 86), np.int32), ((0, 0), width))
    got, want = run(long, implementation=implementation), oracle(short)
    check(
        {n: x[:, width[0] : width[0] + 86] if n in ("o", "q", "k", "v", "g", "beta") else x for n, x in got.items()},
        want,
    )


def test_segment_plan():
    plan = packing.plan_segments(jnp.array([[0, 4, 4, 0, 4, 2, 0, 4], [3, 3, 1, 0, 0, 1, 0, 0]]))
    np.testing.assert_array_equal(plan.valid, [[0, 1, 1, 0, 1, 1, 0, 1], [1, 1, 1, 0, 0, 1, 0, 0]])
    np.testing.assert_array_equal(plan.reset, [[0, 0, 0, 0, 0, 1, 0, 1], [0, 0, 1, 0, 0, 0, 0, 0]])


def test_cu_seqlens_plan():
    plan = packing.plan_cu_seqlens(jnp.array([1, 1, 3, 3, 4]), 6)
    np.testing.assert_array_equal(plan.valid, [[0, 1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(np.asarray(plan.slot)[1:4], [1, 1, 3])


@pytest.mark.parametrize("chunk_size", [1, 4, 16])
@pytest.mark.parametrize("name", [n for n in CU_SEQLENS if n != "no sequences"])
def test_alignment_is_a_bijection_on_the_tokens(name, chunk_size):
    """Every token has one place, its sequence begins a chunk, and each chunk holds one sequence."""
    cu = np.asarray(CU_SEQLENS[name])
    plan = packing.align(jnp.asarray(cu), packing.plan_cu_seqlens(jnp.asarray(cu), 96).slot, chunk_size)
    source, target = np.asarray(plan.source), np.asarray(plan.target)
    tokens = np.arange(cu[0], cu[-1])
    assert sorted(source[source < 96]) == tokens.tolist()
    assert sorted(target[target < len(source)]) == sorted(target[tokens])
    assert len(set(source)) == len(source)
    assert len(set(target)) == len(target)
    np.testing.assert_array_equal(source[target[tokens]], tokens)
    owner = np.searchsorted(cu, tokens, side="right") - 1
    np.testing.assert_array_equal(np.asarray(plan.slot)[target[tokens] // chunk_size], owner)
    np.testing.assert_array_equal(target[tokens] % chunk_size, (tokens - cu[owner]) % chunk_size)


@pytest.mark.parametrize("dtype", ["uint8", "uint32"])
def test_unsigned_cu_seqlens(rng, dtype):
    """Differences of unsigned numbers wrap: the plan must not."""
    case = make(rng, B=1, T=100, N=5)
    arrays = [case[name] for name in ("q", "k", "v", "g", "beta")]
    cu = np.array([0, 5, 40, 40, 70, 99])
    call = jax.jit(functools.partial(kda_jax.kda, chunk_size=16, initial_state=case["initial_state"]))
    want, got = (call(*arrays, cu_seqlens=jnp.asarray(cu, d)) for d in ("int32", dtype))
    assert all(jnp.array_equal(a, b) for a, b in zip(want, got, strict=True))
