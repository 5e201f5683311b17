"""Every kernel at the shapes that matter, for a compiler's report without a GPU: cases() -> (name, function, [(shape, dtype), ...])."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from pallas_kernels.prepare import make_prepare
from pallas_kernels.scan import make_scan

bf16, f32 = jnp.bfloat16, jnp.float32


def cases() -> Iterator[tuple[str, Any, list[tuple[tuple[int, ...], Any]]]]:
    B, T, H = 1, 8192, 32
    for K, V in ((128, 128), (64, 64)):
        qk, v = (B, T, H, K), (B, T, H, V)
        inputs = [(qk, bf16), (qk, bf16), (qk, f32), ((B * H, T), f32)]
        yield f"prepare {K}", make_prepare(qk, qk, bf16, K**-0.5), inputs
        padded = (B * H, T)
        inputs = [((*padded, K), bf16)] * 3 + [((*padded, 128), bf16), ((B * H, T // 64, K), f32), (v, bf16)]
        for warpgroups in range(1, V // 64 + 1):
            scan = make_scan(B, T, H, K, V, bf16, warpgroups=warpgroups, stages=4 - warpgroups, has_state=True)
            yield f"scan {K} {V}, {warpgroups} warpgroups", scan, [*inputs, ((B, H, K, V), f32)]
