"""The comparison family against float64 recurrences: any decay, with or without delta rule, low-rank transitions."""

import functools

import jax
import numpy as np
import pytest
import reference
import tolerances
from cases import ARRAYS, check, make, named

from kda_jax.ops.linear import dplr_attention, linear_attention

LOW_RANK = ("q", "k", "v", "g", "a", "c", "initial_state")


@functools.cache
def differentiated(function, **options):
    """Jitted (arrays, cotangents) -> ((o, final_state), gradients)."""

    @jax.jit
    def run(arrays, cotangents, packing):
        def call(*arrays):
            return function(*arrays[:-1], initial_state=arrays[-1], **options, **packing)

        out, vjp = jax.vjp(call, *arrays)
        return out, vjp((cotangents[0].astype(out[0].dtype), cotangents[1]))

    return run


def run(case, names, function, **options):
    packing = {n: case[n] for n in ("segment_ids",) if n in case}
    cotangents = (case["do"], case["dfinal_state"])
    return named(names, differentiated(function, **options)(tuple(case[n] for n in names), cotangents, packing))


def without_delta_rule(case):
    """S' = Diag exp(g) S + beta k v^T: no low-rank part; beta belongs to the values."""
    wide = {n: np.asarray(x, np.float64) for n, x in case.items()}
    H, HV = wide["q"].shape[2], wide["v"].shape[2]
    q, k = (reference.repeat_heads(wide[n], HV) for n in ("q", "k"))
    beta, nothing = wide["beta"][..., None], np.zeros_like(q)
    out, (dq, dk, dv, dg, _, _, dstate) = reference.diagonal_plus_low_rank(
        *(q, k, beta * wide["v"], wide["g"], nothing, nothing, wide["initial_state"]),
        scale=q.shape[-1] ** -0.5,
        do=wide["do"],
        dfinal_state=wide["dfinal_state"],
    )
    dq, dk = (reference.sum_heads(x, H) for x in (dq, dk))
    return named(ARRAYS, (out, (dq, dk, beta * dv, dg, (dv * wide["v"]).sum(-1), dstate)))


def oracle(case, delta_rule):
    if not delta_rule:
        return without_delta_rule(case)
    return named(ARRAYS, reference.kda(**{n: x.astype(np.float64) for n, x in case.items()}))


def per_head(case):
    """The same decay for all channels of a head: (the library's case with g [B, T, HV], the oracle's)."""
    g = case["g"].mean(-1)
    return case | {"g": g}, case | {"g": np.broadcast_to(g[..., None], case["g"].shape)}


@pytest.mark.parametrize("delta_rule", [True, False])
@pytest.mark.parametrize("decay", ["weak", "mixed", "twenty"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decay_per_channel(rng, dtype, decay, delta_rule):
    """KDA, or gated linear attention."""
    case = make(rng, decay=decay, beta="reflecting", dtype=dtype)
    check(run(case, ARRAYS, linear_attention, delta_rule=delta_rule), oracle(case, delta_rule), dtype)


@pytest.mark.parametrize("delta_rule", [True, False])
@pytest.mark.parametrize("decay", ["weak", "mixed"])
def test_decay_per_head(rng, decay, delta_rule):
    """Gated DeltaNet, or Mamba-2."""
    case, full = per_head(make(rng, decay=decay, beta="reflecting"))
    got, want = run(case, ARRAYS, linear_attention, delta_rule=delta_rule), oracle(full, delta_rule)
    check(got, want | {"g": want["g"].sum(-1)})


@pytest.mark.parametrize("delta_rule", [True, False])
def test_no_decay_and_no_strength(rng, delta_rule):
    """DeltaNet, or plain linear attention: both gates left out."""
    case = make(rng, decay="none")
    case["beta"] = np.ones_like(case["beta"])
    want = oracle(case, delta_rule)
    got = run(case | {"g": None, "beta": None}, ARRAYS, linear_attention, delta_rule=delta_rule)
    check(got, {n: x for n, x in want.items() if n not in ("g", "beta")})


@pytest.mark.parametrize("delta_rule", [True, False])
def test_float64(rng, x64, delta_rule):
    case, full = per_head(make(rng, dtype="float64"))
    want = oracle(full, delta_rule)
    check(run(case, ARRAYS, linear_attention, delta_rule=delta_rule), want | {"g": want["g"].sum(-1)}, "float64")


def test_packed_without_delta_rule(rng):
    """A new segment begins from zero here as well."""
    case = make(rng)
    ids = np.repeat([[1, 0, 2], [0, 3, 3]], (70, 11, 49), axis=1).astype(np.int32)
    o = np.asarray(run(case | {"segment_ids": ids}, ARRAYS, linear_attention, delta_rule=False)["o"])
    alone = {
        n: case[n][:1, 81:] if case[n].ndim > 2 and n not in ("initial_state", "dfinal_state") else case[n][:1]
        for n in case
    }
    alone["initial_state"] = np.zeros_like(alone["initial_state"])
    tolerances.assert_close(o[:1, 81:], without_delta_rule(alone)["o"], tolerances.FORWARD["float32"])
    assert not o[ids == 0].any()


def low_rank(rng, dtype="float32", T=130):
    """A case with any a and c of norm below one."""
    case = make(rng, HV=2, dtype=dtype, T=T)
    a, c = (reference.l2_normalize(rng.normal(size=case["q"].shape)) * size for size in (0.9, 0.7))
    return case | {"a": a.astype(case["q"].dtype), "c": c.astype(case["q"].dtype)}


@pytest.mark.parametrize("T", [130, 1])
def test_low_rank_transition(rng, T):
    case = low_rank(rng, T=T)
    check(run(case, LOW_RANK, dplr_attention), low_rank_oracle(case))


def test_low_rank_transition_float64(rng, x64):
    case = low_rank(rng, "float64")
    check(run(case, LOW_RANK, dplr_attention), low_rank_oracle(case), "float64")


def low_rank_oracle(case):
    arrays = [case[n] for n in ("q", "k", "v", "g", "c", "a", "initial_state")]
    cotangents = {n: case[n].astype(np.float64) for n in ("do", "dfinal_state")}
    out, (dq, dk, dv, dg, dc, da, dstate) = reference.diagonal_plus_low_rank(
        *arrays, scale=case["q"].shape[-1] ** -0.5, **cotangents
    )
    return named(LOW_RANK, (out, (dq, dk, dv, dg, da, dc, dstate)))


@pytest.mark.parametrize(
    ("change", "name"),
    [({"g": (2, 9, 3)}, "g"), ({"g": (2, 9)}, "g"), ({"beta": (2, 9, 2)}, "beta"), ({"v": (2, 9, 3, 5)}, "v")],
)
def test_wrong_shapes(change, name):
    shapes = {"q": (2, 9, 2, 8), "k": (2, 9, 2, 8), "v": (2, 9, 4, 5), "g": (2, 9, 4), "beta": (2, 9, 4)} | change
    arrays = [np.zeros(shape, np.float32) for shape in shapes.values()]
    with pytest.raises(ValueError, match=rf"\b{name} must|HV=3"):
        linear_attention(*arrays)


def test_wrong_low_rank_shapes():
    arrays = [np.zeros((1, 4, 2, 8), np.float32)] * 5
    with pytest.raises(ValueError, match=r"\bc must have shape .*K=8.*\(1, 4, 2, 7\)"):
        dplr_attention(*arrays, np.zeros((1, 4, 2, 7), np.float32))
