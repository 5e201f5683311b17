"""Every kernel at the shapes that matter, for a compiler's report without a GPU: cases() -> (name, function, [(shape,
dtype), ...]).
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from pallas_kernels.activation import Activation
from pallas_kernels.backward_chunk import make_backward_chunk
from pallas_kernels.backward_scan import make_backward_scan
from pallas_kernels.config import SHARED_KEYS, STAGES, Config
from pallas_kernels.decode import decode
from pallas_kernels.fused import make_fused
from pallas_kernels.grouped_product import grouped_product_mosaic
from pallas_kernels.inputs import Problem, Raw
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.overlapped import make_overlapped
from pallas_kernels.prepare import make_prepare
from pallas_kernels.scan import make_scan

Case = tuple[str, Any, list[tuple[tuple[int, ...], Any]]]
SEGMENTS = ((128, 128), (256, 256))  # channels of the kernels that are compiled with segments too


def cases() -> Iterator[Case]:
    B, T, H, f32 = 1, 8192, 32, jnp.float32
    for dtype, K, V in (
        (jnp.bfloat16, 128, 128),
        (jnp.bfloat16, 64, 64),
        (jnp.bfloat16, 128, 256),
        (jnp.bfloat16, 192, 128),
        (jnp.bfloat16, 256, 256),
        (jnp.float16, 128, 128),
    ):
        label = f"{jnp.dtype(dtype).name} {K} {V}"
        qk, v = (B, T, H, K), (B, T, H, V)
        inputs = [(qk, dtype), (qk, dtype), (v, dtype), (qk, f32), ((B, T, H), f32)]
        state = ((B, H, K, V), f32)
        variants = [(False, False), (True, False), (False, True), (True, True)]
        for bounded, segments in variants[: 1 if dtype == jnp.float16 else 4 if (K, V) in SEGMENTS else 2]:
            raw = Raw(Activation(-5.0 if bounded else None, True), dtype, T)
            gates, marks = [(qk, dtype), ((B, T, H), f32)], [((B, T), f32)] * segments
            raw_inputs = [*inputs[:3], *gates, *marks, ((H,), f32), ((H, K), f32)]
            for given, arrays in ((None, inputs + marks), (raw, raw_inputs)):
                name = label + " bounded" * bounded + ", segments" * segments + " raw" * (given is not None)
                problem = Problem(qk, v, dtype, bounded, given, segments)
                yield f"prepare {name}", make_prepare(problem), arrays
                if V <= 128 and K <= SHARED_KEYS:
                    options = {"scale": K**-0.5, "has_state": True}
                    yield f"overlapped {name}", make_overlapped(problem, **options), [*arrays, state]
                    yield f"fused {name}", make_fused(problem, **options), [*arrays, state]
        prepared = [((B * H, T, c), dtype) for c in (K, K, K, V, 64)] + [((B * H, T // 64, K), f32)]
        one = Config(stages=STAGES[K])
        for config in [one, Config(2, 2)][: V // 64 if K <= SHARED_KEYS else 1]:
            scan = make_scan(B, v, K, dtype, scale=K**-0.5, config=config, has_state=True)
            yield f"scan {label}, {config}", scan, [((B, 3), jnp.int32), *prepared, state]
            if (K, V) == (128, 128):
                scan = make_scan(B, v, K, dtype, scale=K**-0.5, config=config, every=2)
                yield f"scan {label}, {config}, states", scan, [((B, 3), jnp.int32), *prepared]
        maps = make_scan(B, v, K, dtype, scale=K**-0.5, config=one, outputs=False)
        yield f"scan {label}, maps", maps, [((B, 3), jnp.int32), *prepared]
    yield from backward_cases()
    yield from decode_cases()
    yield from latent_cases()
    yield from grouped_cases()


def backward_cases() -> Iterator[Case]:
    for K, V in ((128, 128), (64, 64), (128, 256), (192, 128), (256, 192), (256, 256)):
        for segments in (False, True)[: 1 + ((K, V) in SEGMENTS)]:
            yield from backward_cases_of(K, V, segments)


def backward_cases_of(K: int, V: int, segments: bool) -> Iterator[Case]:
    B, T, H, dtype, f32 = 1, 8192, 32, jnp.bfloat16, jnp.float32
    label = f"{jnp.dtype(dtype).name} {K} {V}" + ", segments" * segments
    qk, v, states = (B, T, H, K), (B, T, H, V), ((B * H, T // 64, V, K), dtype)
    inputs, marks = [(qk, dtype), (qk, dtype), (v, dtype), (qk, f32), ((B, T, H), f32)], [((B, T), f32)] * segments
    problem = Problem(qk, v, dtype, False, segments=segments)
    yield f"prepare and inverse {label}", make_prepare(problem, inverse=True), inputs + marks
    prepared = [((B * H, T, c), dtype) for c in (K, K, K, V, 64)]
    prepared += [((B * H, T // 64, K), f32), ((B * H, T, 64), dtype), (v, dtype)]
    for warpgroups in (1, 2)[: V // 64 if K <= SHARED_KEYS else 1]:
        scan = make_backward_scan(B, v, K, dtype, scale=K**-0.5, warpgroups=warpgroups, segments=segments)
        arrays = [((B, 3), jnp.int32), *prepared, *[((B, H, K, V), f32)] * 2, *marks]
        yield f"backward scan {label}, {warpgroups} warpgroups", scan, arrays
    chunk = make_backward_chunk(problem, scale=K**-0.5)
    chunked = [*[(v, dtype)] * 3, states, states, *marks]
    yield f"backward chunk {label}", chunk, [*inputs[:2], *inputs[3:], *chunked]
    for bound, tokens in ((None, T), (-5.0, T), (-5.0, T - 3))[: 2 if segments or K != V else 3]:
        raw = Raw(Activation(bound, True), dtype, tokens)
        problem = Problem(qk, v, dtype, bound is not None, raw, segments)
        name = f"{label}{' bounded' * (bound is not None)}{', ragged' * (tokens < T)} raw"
        gates, parameters = [(qk, dtype), ((B, T, H), f32)], [((H,), f32), ((H, K), f32)]
        arrays = [*inputs[:3], *gates, *marks, *parameters]
        yield f"prepare and inverse {name}", make_prepare(problem, inverse=True), arrays
        chunk = make_backward_chunk(problem, scale=K**-0.5)
        arrays = [*inputs[:2], *gates, *chunked, *parameters, ((B * H, 2, T), f32)]
        yield f"backward chunk {name}", chunk, arrays


def decode_cases() -> Iterator[Case]:
    """The step, raw: from a softplus decay, whose activation takes the most registers."""
    B, H, dtype, f32 = 64, 32, jnp.bfloat16, jnp.float32
    step = functools.partial(decode, scale=1.0, activation=Activation(None, True))
    for K, V, state in (
        (128, 128, f32),
        (128, 128, dtype),
        (64, 64, f32),
        (96, 32, f32),
        (192, 256, dtype),
        (256, 96, f32),
    ):
        inputs = [((B, H, K), dtype), ((B, H, K), dtype), ((B, H, V), dtype), ((B, H, K), dtype), ((B, H), dtype)]
        parameters = [((H,), f32), ((H, K), f32)]
        yield f"decode {K} {V}, {jnp.dtype(state).name} state", step, [*inputs, ((B, H, K, V), state), *parameters]


def latent_cases() -> Iterator[Case]:
    """A small model's latents, Kimi Linear's with all its heads, and the widest."""
    B, S = 64, 4096
    for dtype, H, R, C in (
        (jnp.bfloat16, 16, 256, 288),
        (jnp.bfloat16, 32, 512, 576),
        (jnp.float16, 96, 512, 640),
    ):
        attend = functools.partial(latent_attention, value_channels=R, scale=1.0)
        inputs = [((B, H, C), dtype), ((B, S, C), dtype), ((B, 2), jnp.int32)]
        yield f"latents {jnp.dtype(dtype).name} {H} {C}", attend, inputs


def grouped_cases() -> Iterator[Case]:
    """Kimi Linear's experts at 64 and at 4096 tokens."""
    E, D, F, dtype = 256, 2304, 1024, jnp.bfloat16
    for M in (512, 32768):
        yield f"grouped {M}", grouped_product_mosaic, [((M, D), dtype), ((E, D, F), dtype), ((E,), jnp.int32)]
