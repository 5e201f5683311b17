"""Scores and decays inside the blocks of 16 tokens, for a group of channels at a time: exact for any decay, or dense
for a bounded one.

Both take q, k [64, GROUP] and e = exp(g) in float32, add to their totals, and return U, the decay from before
the block to a row, and D, from a row to the block's end. `finish` turns the totals into the block's scores of queries
(i >= j) and of keys (i > j), two arrays [64, 16].

Exact: runs of s rows grow to runs of 2 s by products, U of the second half times the first half's last U, D of the
first half times the second half's last U. A pair (i, j) is counted at the one level s = 1, 2, 4, 8 where i lies in
the second and j in the first half of a run of 2 s, as (q_i U_i) (k_j D_j) with both factors at most 1.

Dense: one product (q_i U_i) (k_j / U_j). With g >= -5 the exponents stay within 80 of 88 nats, in float32 and
bfloat16 alike. At a reset of the state e is any bounded number, and masks leave out what crosses it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
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


def _products(x: jax.Array, interpret: bool) -> jax.Array:
    """Of every block's rows up to a row."""
    row = iota(0, x.shape[1])
    for s in (1, 2, 4):
        x = jnp.where((row & s) == s, x * fr.sibling_end(x, s, interpret=interpret), x)
    return fr.by_half(x, x * fr.sibling_end(x, 8, interpret=interpret), interpret=interpret)


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
        U, D = e, zeros(e.shape[1]) + 1
        own = k.astype(self.dtype)
        diagonal = fr.stacked_scores(diagonal, q.astype(self.dtype), own, own, **kw)
        added = []
        for s, total in zip((1, 2, 4), levels, strict=True):
            second = (row & s) == s
            F = jnp.where(second, U, D)
            kF = decayed(k, F, self.dtype)
            added.append(fr.stacked_scores(total, decayed(q, F, self.dtype), kF, kF, **kw))
            U, D = fr.grow(U, D, fr.sibling_end(U, s, **kw), s, **kw)
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


class Masks(NamedTuple):
    """What resets of the state inside blocks leave, for `Dense`. All columns of an array are the same."""

    unreset: jax.Array  # [64] float32: 1 if there is none from the block's start to the row, else 0
    kept: jax.Array  # [64] float32: 1 if there is none behind the row, else 0
    halved: jax.Array  # [64, 16] float32: 2^-n behind n of them

    @classmethod
    def of(cls, is_reset: jax.Array, *, interpret: bool) -> "Masks":
        """is_reset: [64, 8], whether the state before the row is, in one column or more."""
        one, zero = zeros(8) + 1, zeros(8)
        halved = _products(jnp.where(is_reset, 0.5 * one, one), interpret)
        unreset = jnp.where(halved == 1, one, zero)
        kept = jnp.where(halved == fr.block_end(halved, interpret=interpret), one, zero)
        unreset, kept, row = (jnp.min(x, axis=1) for x in (unreset, kept, halved))
        return cls(unreset, kept, lax.broadcast_in_dim(row, (rg.ROWS, rg.BLOCK), (0,)))

    def apply(self, U: jax.Array, D: jax.Array) -> tuple[jax.Array, jax.Array]:
        """U and D of decays without resets, made 0 across them."""
        unreset, kept = (lax.broadcast_in_dim(x, U.shape, (0,)) for x in (self.unreset, self.kept))
        return U * unreset, D * kept


class Dense:
    def __init__(self, dtype: Any, masks: Masks | None = None) -> None:
        self.dtype, self.masks = dtype, masks

    def start(self) -> Totals:
        return zeros(16), zeros(8)

    def add(
        self, totals: Totals, q: jax.Array, k: jax.Array, e: jax.Array, interpret: bool
    ) -> tuple[Totals, jax.Array, jax.Array]:
        U = _products(e, interpret)
        inverse = fr.reciprocal(U, interpret=interpret)
        totals = self._scores(totals, q * U, k * U, k * inverse, interpret)
        D = fr.block_end(U, interpret=interpret) * inverse
        return totals, *((U, D) if self.masks is None else self.masks.apply(U, D))

    def finish(self, totals: Totals, interpret: bool) -> tuple[jax.Array, jax.Array]:
        stacked, crossed = totals
        if self.masks is not None:  # a channel that halves at resets gives 16 to rows of one segment, else at most 8
            x = self.masks.halved
            same, same_crossed = self._scores(self.start(), x, x, fr.reciprocal(x, interpret=interpret), interpret)
            stacked = jnp.where(same >= rg.BLOCK, stacked, zeros(16))
            crossed = jnp.where(same_crossed >= rg.BLOCK, crossed, zeros(8))
        r, c, queries = _places()
        return fr.unstack(jnp.where((r > c) | ((r == c) & queries), stacked, zeros(16)), crossed, interpret=interpret)

    def _scores(self, totals: Totals, q: jax.Array, k: jax.Array, right: jax.Array, interpret: bool) -> Totals:
        operands = [x.astype(self.dtype) for x in (q, k, right)]
        pieces = fr.stacked_scores, fr.crossed_scores
        return tuple(add(total, *operands, interpret=interpret) for add, total in zip(pieces, totals, strict=True))
