"""Bad arguments are refused at trace time, naming the argument and what was expected; nothing else runs instead."""

import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import kda_jax
from kda_jax.ops import api
from kda_jax.ops.gates import Decay

B, T, H, HV, K, V = 2, 6, 2, 4, 8, 5


def zeros(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


ARRAYS = {
    "q": zeros(B, T, H, K),
    "k": zeros(B, T, H, K),
    "v": zeros(B, T, HV, V),
    "g": zeros(B, T, HV, K),
    "beta": zeros(B, T, HV),
}
RAW = {("g_raw" if n == "g" else "beta_raw" if n == "beta" else n): x for n, x in ARRAYS.items()}
STEP = {n: zeros(x.shape[0], *x.shape[2:]) for n, x in ARRAYS.items()}
ONE_ROW = {n: zeros(1, *x.shape[1:]) for n, x in ARRAYS.items()}
DECAY = Decay(zeros(HV), zeros(HV, K))


def trace(function, arguments):
    """Trace without running: arrays abstract, all else static."""
    abstract = {n: x for n, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct | Decay)}
    static = {n: x for n, x in arguments.items() if n not in abstract}
    return jax.eval_shape(lambda arrays: function(**arrays, **static), abstract)


def refuse(error, words, function, arguments):
    """The call raises `error` with every one of `words` in its message."""
    with pytest.raises(error) as caught:
        trace(function, arguments)
    for word in words:
        assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w])", str(caught.value)), f"{word!r} not in: {caught.value}"


def test_the_good_arguments_are_good():
    assert [x.shape for x in trace(kda_jax.kda, ARRAYS)] == [(B, T, HV, V), (B, HV, K, V)]
    assert [x.shape for x in trace(kda_jax.kda_raw, RAW | {"decay": DECAY})] == [(B, T, HV, V), (B, HV, K, V)]
    step = trace(kda_jax.kda_step, STEP | {"state": zeros(B, HV, K, V)})
    assert [x.shape for x in step] == [(B, HV, V), (B, HV, K, V)]


SHAPES = [
    ("q", (T, H, K)),
    ("k", (B, T, H, K + 1)),
    ("k", (B, T + 1, H, K)),
    ("v", (B, T, HV)),
    ("v", (B, T + 1, HV, V)),
    ("v", (B + 1, T, HV, V)),
    ("g", (B, T, HV)),
    ("g", (B, T, HV, 1)),
    ("g", (B, T, H, K)),
    ("g", (B, T, HV, V)),
    ("beta", (B, T, H)),
    ("beta", (B, T, HV, 1)),
    ("beta", (B, T - 1, HV)),
    ("initial_state", (HV, K, V)),
    ("initial_state", (B, H, K, V)),
    ("initial_state", (B, HV, V, K)),
    ("initial_state", (B + 1, HV, K, V)),
]


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_wrong_shape(name, shape):
    refuse(ValueError, [name, str(shape)], kda_jax.kda, ARRAYS | {name: zeros(*shape)})


@pytest.mark.parametrize(("name", "shape"), [x for x in SHAPES if x[0] != "initial_state"])
def test_wrong_raw_shape(name, shape):
    name = {"g": "g_raw", "beta": "beta_raw"}.get(name, name)
    refuse(ValueError, [name, str(shape)], kda_jax.kda_raw, RAW | {"decay": DECAY, name: zeros(*shape)})


@pytest.mark.parametrize(
    ("name", "shape"), [("q", (B, 1, H, K)), ("g", (B, HV)), ("beta", (B, HV, 1)), ("state", (B, HV, V, K))]
)
def test_wrong_step_shape(name, shape):
    arguments = STEP | {"state": zeros(B, HV, K, V)} | {name: zeros(*shape)}
    refuse(ValueError, [name, str(shape)], kda_jax.kda_step, arguments)


def test_value_heads_that_key_heads_do_not_divide():
    arguments = ARRAYS | {"v": zeros(B, T, 3, V), "g": zeros(B, T, 3, K), "beta": zeros(B, T, 3)}
    refuse(ValueError, ["v", "HV=3", "H=2"], kda_jax.kda, arguments)
    arguments = ARRAYS | {"v": zeros(B, T, 0, V), "g": zeros(B, T, 0, K), "beta": zeros(B, T, 0)}
    refuse(ValueError, ["v", "HV=0"], kda_jax.kda, arguments)


@pytest.mark.parametrize("name", [*ARRAYS, "initial_state"])
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_wrong_dtype(name, dtype):
    shape = ARRAYS[name].shape if name in ARRAYS else (B, HV, K, V)
    refuse(TypeError, [name, dtype], kda_jax.kda, ARRAYS | {name: zeros(*shape, dtype=dtype)})


@pytest.mark.parametrize("name", [*ARRAYS, "initial_state", "segment_ids", "cu_seqlens"])
@pytest.mark.parametrize("value", [[1.0, 2.0], "text"])
def test_what_is_no_array(name, value):
    refuse(TypeError, [name, repr(value)], kda_jax.kda, (ONE_ROW if name == "cu_seqlens" else ARRAYS) | {name: value})


OPTIONS = [
    ("g_min", -5.1, ValueError),
    ("g_min", 0.0, ValueError),
    ("g_min", 1.0, ValueError),
    ("g_min", float("nan"), ValueError),
    ("g_min", "bounded", TypeError),
    ("chunk_size", 0, ValueError),
    ("chunk_size", 48, ValueError),
    ("chunk_size", -16, ValueError),
    ("chunk_size", 64.0, TypeError),
    ("scale", "auto", TypeError),
    ("scale", True, TypeError),
    ("implementation", "cuda", ValueError),
    ("implementation", ("chunk", "cuda"), ValueError),
    ("implementation", (), ValueError),
]


@pytest.mark.parametrize(("name", "value", "error"), OPTIONS)
def test_wrong_option(name, value, error):
    refuse(error, [name, repr(value)], kda_jax.kda, ARRAYS | {name: value})


def test_scale_must_not_be_traced():
    """It is part of the program, as a kernel's is."""
    refuse(TypeError, ["scale"], kda_jax.kda, ARRAYS | {"scale": zeros()})


PACKINGS = [
    (ARRAYS, "segment_ids", zeros(T, dtype=jnp.int32), ValueError, "(6,)"),
    (ARRAYS, "segment_ids", zeros(B, T + 1, dtype=jnp.int32), ValueError, "(2, 7)"),
    (ARRAYS, "segment_ids", zeros(B, T), TypeError, "float32"),
    (ARRAYS, "segment_ids", zeros(B, T, dtype=bool), TypeError, "bool"),
    (ONE_ROW, "cu_seqlens", zeros(1, 3, dtype=jnp.int32), ValueError, "(1, 3)"),
    (ONE_ROW, "cu_seqlens", zeros(3), TypeError, "float32"),
    (ONE_ROW, "cu_seqlens", zeros(0, dtype=jnp.int32), ValueError, "0"),
    (ONE_ROW, "cu_seqlens", np.array([0, 4, 3]), ValueError, "[0 4 3]"),
    (ONE_ROW, "cu_seqlens", np.array([0, 7]), ValueError, "[0 7]"),
    (ONE_ROW, "cu_seqlens", np.array([-1, 6]), ValueError, "[-1  6]"),
    (ARRAYS, "cu_seqlens", np.array([0, 6]), ValueError, "B=2"),
]


@pytest.mark.parametrize(("arrays", "name", "value", "error", "word"), PACKINGS)
def test_wrong_packing(arrays, name, value, error, word):
    refuse(error, [name], kda_jax.kda, arrays | {name: value})
    with pytest.raises(error, match=re.escape(word)):
        trace(kda_jax.kda, arrays | {name: value})


def test_concrete_jax_cu_seqlens_are_checked_as_numpy_ones():
    arrays = {n: jnp.zeros(x.shape) for n, x in ONE_ROW.items()}
    with pytest.raises(ValueError, match=r"cu_seqlens.*\[0 4 3\]"):
        kda_jax.kda(**arrays, cu_seqlens=jnp.array([0, 4, 3]))


def test_one_state_a_sequence():
    arguments = ONE_ROW | {"cu_seqlens": np.array([0, 3, 6]), "initial_state": zeros(1, HV, K, V)}
    refuse(ValueError, ["initial_state", "(1, 4, 8, 5)", "N=2"], kda_jax.kda, arguments)


def test_two_packings_at_once():
    """Neither is dropped in silence."""
    both = {"segment_ids": zeros(1, T, dtype=jnp.int32), "cu_seqlens": np.array([0, 6])}
    for function, arrays in (
        (kda_jax.kda, ONE_ROW),
        (kda_jax.kda_raw, {n: zeros(1, *x.shape[1:]) for n, x in RAW.items()}),
    ):
        arguments = arrays | both | ({"decay": DECAY} if function is kda_jax.kda_raw else {})
        refuse(ValueError, ["segment_ids", "cu_seqlens"], function, arguments)


@pytest.mark.parametrize(
    ("decay", "error", "words"),
    [
        (Decay(zeros(H), zeros(HV, K)), ValueError, ["A_log", "(2,)", "HV=4"]),
        (Decay(zeros(HV), zeros(HV)), ValueError, ["dt_bias", "(4,)"]),
        (Decay(zeros(HV), zeros(HV * K)), ValueError, ["dt_bias", "(32,)"]),
        (Decay(zeros(HV), zeros(HV, K, dtype=jnp.int32)), TypeError, ["dt_bias", "int32"]),
        ((1.0, 2.0), TypeError, ["decay", "tuple"]),
    ],
)
def test_wrong_decay(decay, error, words):
    refuse(error, words, kda_jax.kda_raw, RAW | {"decay": decay})


def test_unknown_keyword():
    refuse(TypeError, ["safe_gate"], kda_jax.kda, ARRAYS | {"safe_gate": True})
    refuse(TypeError, ["g_min"], kda_jax.kda_raw, RAW | {"decay": DECAY, "g_min": -5.0})


def test_errors_reach_through_jit_and_grad():
    arrays = {n: jnp.zeros(x.shape) for n, x in ARRAYS.items()} | {"g": jnp.zeros((B, T, HV))}
    with pytest.raises(ValueError, match=r"g must have shape .*K=8.*\(2, 6, 4\)"):
        jax.jit(jax.grad(lambda a: kda_jax.kda(**a)[0].sum()))(arrays)


@pytest.mark.parametrize("implementation", list(api._IMPLEMENTATIONS))
def test_a_name_runs_that_and_nothing_else(monkeypatch, implementation):
    """An error inside the named implementation is raised, not answered by another one."""
    ran = []
    for name in api._IMPLEMENTATIONS:

        def fail(*_, name=name, **__):
            ran.append(name)
            raise NotImplementedError(f"{name} refuses")

        monkeypatch.setitem(api._IMPLEMENTATIONS, name, fail)
    monkeypatch.setattr(api, "_unsupported_reason", lambda *_: None)
    with pytest.raises(NotImplementedError, match=f"{implementation} refuses"):
        trace(kda_jax.kda, ARRAYS | {"implementation": implementation})
    assert ran == [implementation]


def primitives(jaxpr):
    """Names of all primitives, inner programs included, with the lengths of scans."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, equation.params.get("length")
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from primitives(inner)


@pytest.mark.parametrize(
    ("implementation", "length"),
    [("scan", 450), ("chunk", 8), (None, 8), (("scan", "chunk"), 450), (["mosaic_gpu", "chunk"], 8)],
)
def test_which_implementation_ran(implementation, length):
    """Read from the program: the recurrence scans over 450 tokens, the chunk form over 8 chunks."""
    arrays = [zeros(B, 450, *x.shape[2:]) for x in ARRAYS.values()]
    program = jax.make_jaxpr(lambda *a: kda_jax.kda(*a, implementation=implementation))(*arrays)
    assert {n for name, n in primitives(program.jaxpr) if name == "scan"} & {8, 450} == {length}


@pytest.mark.parametrize("implementation", ["mosaic_gpu", ("mosaic_gpu",)])
def test_a_name_without_support_raises_its_reason(implementation):
    with pytest.raises(NotImplementedError, match=r"implementation 'mosaic_gpu': .*Hopper GPU is needed"):
        trace(kda_jax.kda, ARRAYS | {"implementation": implementation})


@pytest.mark.parametrize("implementation", ["chunk", "cuda", ("scan", "cuda"), ()])
def test_a_step_refuses_what_it_has_not(implementation):
    arguments = STEP | {"state": zeros(B, HV, K, V), "implementation": implementation}
    refuse(ValueError, ["implementation", repr(implementation), "scan"], kda_jax.kda_step, arguments)
