"""What the pairs of tokens in a chunk give to its gradients, in blocks of 16 tokens: arrays [64 channels, 16].

The gradients of the scores are X = scale do v_new^T (queries with keys, i >= j) and Y = -dv v_new^T (keys with keys, i
> j, the adjoint of the inverse included). Level by level of `levels`, with the decay F of a token to or from the seam
between its run and the other, U in odd runs and D in even ones,

    p = F X (z F), z = q in odd runs and k in even ones        t = F Y (k F)

p belongs to dq in odd runs and to dk in even ones, t to dk, and every pair adds to dg at the tokens between its two:
sums of z p + k t from a token to the end of its odd run, or from the start of its even run. No pairwise exponential, no
factor above 1, no difference of sums (notation and reasons as in `prepare`; Kimi Linear, arXiv 2510.26692, section 3).

The blocks of a chunk take 160 registers. Between two boundaries the compiler uses all the others for what it does ahead
or puts off, and did so until it spilled; hence a boundary behind every level.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import levels as lv
from pallas_kernels import registers as rg
from pallas_kernels.inputs import load
from pallas_kernels.levels import Factor
from pallas_kernels.within import zeros

BLOCK = rg.BLOCK


def times(x: jax.Array, factor: jax.Array) -> jax.Array:
    return x * factor.astype(x.dtype)


class Chunk(NamedTuple):
    """A chunk in shared memory. Loaded where it is used: registers are scarce."""

    q: Any  # [64 tokens, 64 channels]
    k: Any
    X: Any  # [64, 64] as `levels.store_pairs` leaves them
    Y: Any
    interpret: bool

    def load(self, ref: Any, b: int) -> jax.Array:
        """Block b of q or k, [64 channels, 16 tokens]."""
        return load(ref.at[pl.ds(b * BLOCK, BLOCK)].T)

    def scores(self, source: int, target: int) -> tuple[jax.Array, jax.Array]:
        """The blocks of X and Y."""
        X, Y = (lv.load_block(x, source, target, self.q.dtype, interpret=self.interpret) for x in (self.X, self.Y))
        return X, Y


class Block(NamedTuple):
    """What belongs to 16 tokens: arrays [64 channels, 16]."""

    U: jax.Array
    D: jax.Array
    dq: jax.Array
    dk: jax.Array
    dg: jax.Array


class Run(NamedTuple):
    """A run of blocks from the chunk's block `first` on."""

    first: int
    blocks: list[Block]

    @property
    def tokens(self) -> Any:
        return pl.ds(self.first * BLOCK, len(self.blocks) * BLOCK)

    def join(self, part: str) -> jax.Array:
        """U, D, dq, dk or dg of all blocks, [64 channels, tokens]."""
        return jnp.concatenate([getattr(x, part) for x in self.blocks], 1)


def within_run(e: list[jax.Array], first: int, chunk: Chunk) -> list[Block]:
    """What the pairs of a run of blocks give; e = exp(g) of each, a power of two of them, from block `first` on."""
    n = len(e) // 2
    if n == 0:
        return [_within_block(first, e[0], chunk)]
    earlier, later = within_run(e[:n], first, chunk), within_run(e[n:], first + n, chunk)
    return _between_runs(Run(first, earlier), Run(first + n, later), chunk)


def _within_block(b: int, e: jax.Array, chunk: Chunk) -> Block:
    kw = {"interpret": chunk.interpret}
    q, k, (X, Y) = chunk.load(chunk.q, b), chunk.load(chunk.k, b), chunk.scores(b, b)
    U, D, zero = e, zeros(BLOCK) + 1.0, zeros(BLOCK)
    dq, dk = (lv.add_products(zero, Factor(x, X, 0), **kw) for x in (k, q))
    dg = zero
    for s in lv.LEVELS:
        F = lv.by_run(s, U, D, **kw)
        qF, kF = times(q, F), times(k, F)
        p = lv.add_products(zero, Factor(kF, X, s, odd=True), **kw)
        t = lv.add_products(zero, Factor(kF, Y, s), Factor(qF, X, s, odd=False), **kw)
        dq, dk = dq + F * p, dk + F * t
        dg = lv.add_sums(dg, times(qF, p) + times(kF, t), s, **kw)
        grown = F * lv.sibling_end(U, s, **kw)
        U, D = lv.by_run(s, grown, U, **kw), lv.by_run(s, D, grown, **kw)
        rg.boundary(**kw)
    return Block(U, D, dq, dk, dg)


def _between_runs(even: Run, odd: Run, chunk: Chunk) -> list[Block]:
    """The blocks of both, with what the pairs of the two add."""
    kw = {"interpret": chunk.interpret}
    even_end, odd_end = (lv.block_end(run.blocks[-1].U, **kw) for run in (even, odd))

    def decayed(ref: Any, run: Run, i: int) -> jax.Array:
        x = run.blocks[i]
        return times(chunk.load(ref, run.first + i), x.D if run is even else x.U)

    n = len(even.blocks)
    kF = [decayed(chunk.k, even, j) for j in range(n)]
    later, dg = [], [x.dg for x in odd.blocks]
    for i, x in enumerate(odd.blocks):
        p = t = zeros(BLOCK)
        for j in range(n):
            X, Y = chunk.scores(even.first + j, odd.first + i)
            p, t = lv.add_products(p, Factor(kF[j], X), **kw), lv.add_products(t, Factor(kF[j], Y), **kw)
        moved = times(decayed(chunk.q, odd, i), p) + times(decayed(chunk.k, odd, i), t)
        dg = add_sums(dg, moved, i, True, chunk.interpret)
        later.append(x._replace(dq=x.dq + x.U * p, dk=x.dk + x.U * t))
    later = [x._replace(U=x.U * even_end, dg=y) for x, y in zip(later, dg, strict=True)]
    rg.boundary(**kw)

    kF, qF = ([decayed(x, odd, j) for j in range(n)] for x in (chunk.k, chunk.q))
    earlier, dg = [], [x.dg for x in even.blocks]
    for i, x in enumerate(even.blocks):
        t = zeros(BLOCK)
        for j in range(n):
            X, Y = chunk.scores(odd.first + j, even.first + i)
            t = lv.add_products(t, Factor(kF[j], Y), Factor(qF[j], X), **kw)
        dg = add_sums(dg, times(decayed(chunk.k, even, i), t), i, False, chunk.interpret)
        earlier.append(x._replace(dk=x.dk + x.D * t))
    earlier = [x._replace(D=x.D * odd_end, dg=y) for x, y in zip(earlier, dg, strict=True)]
    rg.boundary(**kw)
    return earlier + later


def add_sums(totals: list[jax.Array], x: jax.Array, b: int, later: bool, interpret: bool) -> list[jax.Array]:
    """totals of a run of blocks + what its block b, x, adds to sums over the run: from the token to the run's end if
    `later`, else from the run's start to before the token.
    """
    out = list(totals)
    out[b] = lv.add_sums(totals[b], x, BLOCK, later=later, interpret=interpret)
    for c in range(b) if later else range(b + 1, len(totals)):
        out[c] = lv.add_total(totals[c], x, interpret=interpret)
    return out
