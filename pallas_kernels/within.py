"""Scores and decays inside the blocks of 16 tokens, for a group of channels at a time: exact for any decay, or dense
for a bounded one.

Both take q, k [64, GROUP] and e = exp(g) in float32, add to their totals, and return U, the decay from before
the block to a row, and D, from a row to the block's end. `finish` turns the totals into the block's scores of queries
(i >= j) and of keys (i > j), two arrays [64, 16].

Exact: runs of s rows grow to runs of 2 s by products, U of the second half times the first half's last U, D of the
first half times the second half's last U. A pair (i, j) is counted at the one level s = 1, 2, 4, 8 where i lies in
the second and j in the first half of a run of 2 s, as (q_i U_i) (k_j D_j) with both factors at most 1.

Dense: one product (q_i U_i) (k_j / U_j). With g >= -5 the exponents stay within 80 of 88 nats, in float32 and
bfloat16 alike.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import fragments as fr
from pallas_kernels import registers as rg

Totals = Any


def iota(dimension: int, columns: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (rg.ROWS, columns), dimension, layout=rg.LAYOUT)


def zeros(columns: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((rg.ROWS, columns), jnp.float32), rg.LAYOUT)


def decayed(x: jax.Array, factor: jax.Array, dtype: Any) -> jax.Array:
    """x factor, rounded once to the dtype of a product's operand."""
    return (x * factor).astype(dtype)


def _places() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Row and column within a half of a stacked array, and which are its query rows."""
    return iota(0, 16) & 7, iota(1, 16) & 7, (iota(0, 16) & 8) == 0


class Exact:
    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def start(self) -> Totals:
        return (zeros(16),) * 3, zeros(8), zeros(16)

    def add(
        self, totals: Totals, q: jax.Array, k: jax.Array, e: jax.Array, interpret: bool
    ) -> tuple[Totals, jax.Array, jax.Array]:
        levels, crossed, diagonal = totals
        kw = {"interpret": interpret}
        row = iota(0, q.shape[1])
        U, D = e, jnp.ones_like(e)
        own = k.astype(self.dtype)
        diagonal = fr.stacked_scores(diagonal, q.astype(self.dtype), own, own, **kw)
        added = []
        for s, total in zip((1, 2, 4), levels, strict=True):
            second = (row & s) == s
            F = jnp.where(second, U, D)
            kF = decayed(k, F, self.dtype)
            added.append(fr.stacked_scores(total, decayed(q, F, self.dtype), kF, kF, **kw))
            grown = F * fr.sibling_end(U, s, **kw)
            U, D = jnp.where(second, grown, U), jnp.where(second, D, grown)
        F = fr.by_half(D, U, **kw)
        kF = decayed(k, F, self.dtype)
        crossed = fr.crossed_scores(crossed, decayed(q, F, self.dtype), kF, kF, **kw)
        grown = F * fr.sibling_end(U, 8, **kw)
        return (tuple(added), crossed, diagonal), fr.by_half(U, grown, **kw), fr.by_half(grown, D, **kw)

    def finish(self, totals: Totals, interpret: bool) -> tuple[jax.Array, jax.Array]:
        levels, crossed, diagonal = totals
        r, c, queries = _places()
        stacked = jnp.where((r == c) & queries, diagonal, zeros(16))
        for bit, total in enumerate(levels):
            stacked = jnp.where((r > c) & (((r ^ c) >> bit) == 1), total, stacked)
        return fr.unstack(stacked, crossed, interpret=interpret)


class Dense:
    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def start(self) -> Totals:
        return zeros(16), zeros(8)

    def add(
        self, totals: Totals, q: jax.Array, k: jax.Array, e: jax.Array, interpret: bool
    ) -> tuple[Totals, jax.Array, jax.Array]:
        stacked, crossed = totals
        kw: dict[str, Any] = {"interpret": interpret}
        row = iota(0, q.shape[1])
        U = e
        for s in (1, 2, 4):
            U = jnp.where((row & s) == s, U * fr.sibling_end(U, s, **kw), U)
        U = fr.by_half(U, U * fr.sibling_end(U, 8, **kw), **kw)
        inverse = fr.reciprocal(U, **kw)
        left, right = (decayed(q, U, self.dtype), decayed(k, U, self.dtype)), decayed(k, inverse, self.dtype)
        totals = fr.stacked_scores(stacked, *left, right, **kw), fr.crossed_scores(crossed, *left, right, **kw)
        return totals, U, fr.block_end(U, **kw) * inverse

    def finish(self, totals: Totals, interpret: bool) -> tuple[jax.Array, jax.Array]:
        stacked, crossed = totals
        r, c, queries = _places()
        return fr.unstack(jnp.where((r > c) | ((r == c) & queries), stacked, zeros(16)), crossed, interpret=interpret)
