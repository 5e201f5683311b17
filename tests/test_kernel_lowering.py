"""Every kernel, and the public function, lowered for CUDA without a GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest
from aot_cases import cases
from lowering import lower

from kda_jax import Decay, kda_with_states
from kda_jax.ops.packing import plan_cu_seqlens, plan_segments
from pallas_kernels import support
from pallas_kernels.config import Config
from pallas_kernels.forward import forward
from pallas_kernels.vjp import kda_mosaic, kda_raw_mosaic


def lower_shapes(function, shapes):
    return lower(function, [jax.ShapeDtypeStruct(*s) for s in shapes])


@pytest.mark.parametrize(("name", "function", "shapes"), [pytest.param(*case, id=case[0]) for case in cases()])
def test_lowers_for_hopper(name, function, shapes):
    assert "mosaic_gpu" in lower_shapes(function, shapes)


@pytest.mark.parametrize(("route", "kernels"), [("apart", 2), ("overlapped", 1), ("fused", 1)])
@pytest.mark.parametrize("T", [1, 7, 20, 300, 1000])
def test_lowers_at_any_length(T, route, kernels):
    """The copies move rows in groups of eight: a length that is no multiple of that once did not lower."""
    qk, v = ((2, T, 2, 128), jnp.bfloat16), ((2, T, 4, 128), jnp.bfloat16)
    shapes = [qk, qk, v, ((2, T, 4, 128), jnp.float32), ((2, T, 4), jnp.float32), ((2, 4, 128, 128), jnp.float32)]
    function = functools.partial(forward, scale=1.0, g_min=None, config=Config(route=route))
    assert lower_shapes(lambda *x: function(x[:5], x[5]), shapes).count("custom_call @mosaic_gpu") == kernels


def test_states_lower_by_the_name_of_the_kernels(monkeypatch):
    """The public function reaches them; a state every two chunks of 300 tokens, and the last."""
    monkeypatch.setattr(support, "_unsupported_device", lambda: None)
    qk, gate = ((2, 300, 2, 64), jnp.bfloat16), ((2, 300, 4, 64), jnp.float32)
    shapes = [qk, qk, ((2, 300, 4, 128), jnp.bfloat16), gate, (gate[0][:3], jnp.float32)]
    text = lower_shapes(functools.partial(kda_with_states, chunk_size=128, implementation="mosaic_gpu"), shapes)
    assert text.count("custom_call @mosaic_gpu") == 2
    assert "tensor<2x3x4x64x128xf32>" in text.split("func.func public @main")[1].split("\n")[0].split("->")[1]
    with pytest.raises(NotImplementedError, match="must be a multiple of 64, got 32"):
        lower_shapes(functools.partial(kda_with_states, chunk_size=32, implementation="mosaic_gpu"), shapes)


@pytest.mark.parametrize("raw", [False, True])
def test_lowers_where_numbers_have_64_bits(raw):
    qk, gate = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.bfloat16), jnp.bfloat16 if raw else jnp.float32
    arrays = [qk] * 3 + [jax.ShapeDtypeStruct(s, gate) for s in (qk.shape, qk.shape[:3])]

    def loss(*x):
        decay = Decay(jnp.zeros(2, jnp.float32), jnp.zeros((2, 64), jnp.float32))
        o, state = kda_raw_mosaic(*x, decay, scale=1.0) if raw else kda_mosaic(*x, scale=1.0)
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(state)

    with jax.enable_x64(True):
        assert lower(jax.value_and_grad(loss, tuple(range(5))), arrays).count("custom_call @mosaic_gpu") == 4


@pytest.mark.parametrize(("heads", "kernels", "backward"), [(2, 3, 5), (64, 1, 3), (66, 2, 3), (96, 1, 3)])
def test_the_public_function_lowers_partitioned(heads, kernels, backward):
    """In pieces, overlapped, apart and fused; the interpreter's tests pass the partitioning by."""
    T = 32768
    qk, gate = ((1, T, heads, 64), jnp.bfloat16), ((1, T, heads, 64), jnp.float32)
    shapes = [qk, qk, qk, gate, (gate[0][:3], jnp.float32), ((1, heads, 64, 64), jnp.float32)]

    def loss(*x):
        o, state = kda_mosaic(*x[:5], scale=1.0, initial_state=x[5])
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(state)

    text = lower_shapes(jax.grad(loss, tuple(range(6))), shapes)
    assert text.count("custom_call @mosaic_gpu") == backward  # nothing of the forward is kept
    text = lower_shapes(lambda *x: kda_mosaic(*x[:5], scale=1.0, initial_state=x[5]), shapes)
    assert text.count("custom_call @mosaic_gpu") == kernels


@pytest.mark.parametrize("kind", ["segment_ids", "cu_seqlens"])
def test_packed_raw_projections_lower_partitioned(kind):
    """They reach the kernels as they are, forward and backward."""
    T, heads, f32 = 4096, 66, jnp.float32
    qk = ((1, T, heads, 64), jnp.bfloat16)
    packing = ((1, T) if kind == "segment_ids" else (4,), jnp.int32)
    shapes = [qk, qk, qk, qk, (qk[0][:3], jnp.bfloat16), ((heads,), f32), ((heads, 64), f32), packing]

    def run(*x):
        packing = plan_segments(x[7]) if kind == "segment_ids" else plan_cu_seqlens(x[7], T)
        o, state = kda_raw_mosaic(*x[:5], Decay(x[5], x[6], -5.0), scale=1.0, packing=packing)
        return jnp.sum(o.astype(f32)) + jnp.sum(state)

    assert lower_shapes(run, shapes).count("custom_call @mosaic_gpu") == 2
    assert lower_shapes(jax.grad(run, tuple(range(7))), shapes).count("custom_call @mosaic_gpu") == 3
