"""The recurrence in blocks of 16 tokens: what two warpgroups prepare of a chunk, and how others carry the state
through it.

With U the decay from before a block to a token, D from a token to the block's end and total the decay over the block
(`within`), a block is

    X = (I + L)^-1 Diag(beta)            v_new = X (v - kU S)
    o = scale (qU S + A v_new)           S' = Diag(total) S + kD^T v_new

(Kimi Linear, arXiv 2510.26692, section 3, with blocks for its chunks). Against chunks of 64 there are no scores and no
inverse across blocks, which is most of the preparation; the chain of the state is four times as long. It is kept
transposed, S^T [64 values, K], in the registers of a warpgroup: then every product has 64 rows and a register operand.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import memory
from pallas_kernels import registers as rg
from pallas_kernels.inputs import CHUNK
from pallas_kernels.inverse import block_inverse
from pallas_kernels.memory import tile
from pallas_kernels.within import Dense, Exact, decayed

ROWS, BLOCK = rg.ROWS, rg.BLOCK
BLOCKS = CHUNK // BLOCK
GROUP = 16  # channels a pass over the scores: what the registers of four warpgroups hold
PREPARERS = 2  # warpgroups, each with half of the channels
f32 = jnp.float32


class Prepared(NamedTuple):
    """A chunk in shared memory."""

    kq: Any  # [128, K], k U and q U in alternating groups of eight rows: one product reads the state for both
    kD: Any  # [64, K]
    A: Any  # [64, 16], scores of queries with the keys of their block
    X: Any  # [2, 64, 16], two halves of 16 bits: with alike keys v_new is a small difference
    total: Any  # [4, K] float32


def prepared_types(K: int, dtype: Any, *leading: int) -> list[Any]:
    """The shared memory of `Prepared`."""
    return [
        tile((*leading, 2 * CHUNK, K), dtype, GROUP),
        tile((*leading, CHUNK, K), dtype, BLOCK),
        tile((*leading, CHUNK, BLOCK), dtype, BLOCK),
        tile((*leading, 2, CHUNK, BLOCK), dtype, BLOCK),
        plgpu.SMEM((*leading, BLOCKS, K), f32),
    ]


def exchange_types() -> list[Any]:
    """The shared memory of `prepare_chunk`, and its barrier. Two places: one is read while the other is written."""
    return [tile((2, PREPARERS, CHUNK, BLOCK), f32, BLOCK), plgpu.Barrier(num_arrivals=PREPARERS)]


def prepare_chunk(
    wg: jax.Array,
    read: Callable[[Any], tuple[jax.Array, ...]],
    strength: jax.Array,
    bounded: bool,
    chunk: Prepared,
    exchange: tuple[Any, Any],
    meanwhile: Callable[[], None],
    interpret: bool,
) -> None:
    """Fills `chunk`, warpgroup wg of two half of it. read: a `reader`; strength: beta [64, 8], the same in all columns;
    exchange: the place of `exchange_types` and its barrier; meanwhile: done by the first when everything has been read.
    """
    K, dtype = chunk.kD.shape[1], chunk.kD.dtype
    within = (Dense if bounded else Exact)(dtype)
    place, met = exchange

    def group(m: jax.Array, own: Any) -> Any:
        cs = pl.ds(pl.multiple_of(m * GROUP, GROUP), GROUP)
        q, k, e = read(cs)
        own, U, D = within.add(own, q, k, e, interpret)
        for i, x in enumerate((k, q)):
            memory.store_alternating(chunk.kq.at[:, cs], decayed(x, U, dtype), i, interpret=interpret)
        chunk.kD.at[:, cs][...] = decayed(k, D, dtype)
        memory.store_ends(chunk.total.at[:, cs], U, interpret=interpret)
        return own

    groups = K // GROUP // PREPARERS
    A, L = within.finish(lax.fori_loop(wg * groups, (wg + 1) * groups, group, within.start()), interpret)

    def meet(given: jax.Array, taken: jax.Array) -> jax.Array:
        """Gives one part of the sums away and completes the other."""
        place.at[wg][...] = given
        plgpu.commit_smem()
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)
        return taken + plgpu.load(place.at[1 - wg], layout=rg.LAYOUT)

    @pl.when(wg == 0)
    def scores() -> None:
        total = meet(L, A)
        meanwhile()
        chunk.A[...] = total.astype(dtype)

    @pl.when(wg == 1)
    def inverse() -> None:
        X = block_inverse(meet(A, L), strength, interpret=interpret)
        high = X.astype(dtype)
        chunk.X.at[0][...] = high
        chunk.X.at[1][...] = (X - high.astype(f32)).astype(dtype)

    plgpu.commit_smem()


def bounce_types(K: int, dtype: Any, *leading: int) -> list[Any]:
    """The shared memory that the interpreter needs in `carry`."""
    return [tile((*leading, ROWS, K), dtype, GROUP), tile((*leading, ROWS, BLOCK), dtype, BLOCK)]


def carry(S: jax.Array, chunk: Prepared, v: Any, *, scale: float, bounce: list[Any]) -> jax.Array:
    """S^T behind the chunk; its outputs take the place of its values, v [64, 64 values] in shared memory."""
    dtype, K = v.dtype, S.shape[1]

    def multiply(total: Any, a: jax.Array, b: Any) -> None:
        """total += a b, a in registers."""
        if not bounce:
            plgpu.wgmma(total, a, b)
            return
        buffer = next(x for x in bounce if x.shape[1] == a.shape[1])  # the interpreter knows no register operand
        buffer[...] = a
        plgpu.commit_smem()
        plgpu.wgmma(total, buffer, b)
        plgpu.wgmma_wait(0)

    def block(t: jax.Array, S: jax.Array) -> jax.Array:
        tokens = pl.ds(pl.multiple_of(t * BLOCK, BLOCK), BLOCK)
        pairs = pl.ds(pl.multiple_of(2 * t * BLOCK, 2 * BLOCK), 2 * BLOCK)
        decay = plgpu.load(chunk.total.at[t], layout=rg.LAYOUT.reduce(0), optimized=False)
        state, faded = S.astype(dtype), S * lax.broadcast_in_dim(decay, (ROWS, K), (1,))

        def products(both: Any, corrected: Any, update: Any, result: Any) -> jax.Array:
            multiply(both, state, chunk.kq.at[pairs].T)
            values = plgpu.load(v.at[tokens].T, layout=rg.LAYOUT).astype(f32)
            read = both[...]
            keys, queries = (jnp.concatenate([read[:, i : i + 8], read[:, i + 16 : i + 24]], 1) for i in (0, 8))
            difference = (values - keys).astype(dtype)
            for half in (0, 1):
                multiply(corrected, difference, chunk.X.at[half, tokens].T)
            new = corrected[...].astype(dtype)
            if not bounce:  # the interpreter cannot start from a value
                update[...] = faded
            multiply(result, new, chunk.A.at[tokens].T)
            multiply(update, new, chunk.kD.at[tokens])
            out = (queries + plgpu.wgmma_accumulator_load(result, wait_n=1)) * scale
            v.at[tokens].T[...] = out.astype(dtype)
            return update[...] + faded if bounce else update[...]

        return pl.run_scoped(products, *(plgpu.ACC((ROWS, n), f32) for n in (2 * BLOCK, BLOCK, K, BLOCK)))

    return lax.fori_loop(0, BLOCKS, block, S)
