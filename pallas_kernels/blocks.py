"""The recurrence in blocks of 16 tokens: what one warpgroup prepares of a chunk, and how others carry the state
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
from pallas_kernels.inputs import CHUNK, GROUP, Reader
from pallas_kernels.inverse import block_inverse
from pallas_kernels.memory import tile
from pallas_kernels.within import Dense, Exact, decayed

ROWS, BLOCK = rg.ROWS, rg.BLOCK
BLOCKS = CHUNK // BLOCK
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


def prepare_chunk(
    read: Callable[[jax.Array], Reader],
    done: Callable[[jax.Array], None],
    strength: jax.Array,
    within: Exact | Dense,
    chunk: Prepared,
    interpret: bool,
) -> None:
    """Fills `chunk`. read: waits for half 0 or 1 of the channels and gives its `reader`; done: called when that half
    has been read; strength: beta [64, 8], the same in all columns.
    """
    K, dtype = chunk.kD.shape[1], chunk.kD.dtype

    def half(i: jax.Array, own: Any) -> Any:
        read_group = read(i)

        def group(m: jax.Array, own: Any) -> Any:
            q, k, e = read_group(pl.ds(pl.multiple_of(m * GROUP, GROUP), GROUP))
            cs = pl.ds(pl.multiple_of(i * (K // 2) + m * GROUP, GROUP), GROUP)
            own, U, D = within.add(own, q, k, e, interpret)
            for which, x in enumerate((k, q)):
                memory.store_alternating(chunk.kq.at[:, cs], decayed(x, U, dtype), which, interpret=interpret)
            chunk.kD.at[:, cs][...] = decayed(k, D, dtype)
            memory.store_ends(chunk.total.at[:, cs], U, interpret=interpret)
            return own

        own = lax.fori_loop(0, K // 2 // GROUP, group, own)
        plgpu.commit_smem()
        done(i)
        return own

    A, L = within.finish(lax.fori_loop(0, 2, half, within.start()), interpret)
    chunk.A[...] = A.astype(dtype)
    X = block_inverse(L, strength, interpret=interpret)
    high = X.astype(dtype)
    chunk.X.at[0][...] = high
    chunk.X.at[1][...] = (X - high.astype(f32)).astype(dtype)
    plgpu.commit_smem()


def bounce_types(K: int, dtype: Any, *leading: int) -> list[Any]:
    """The shared memory that the interpreter needs in `carry`."""
    return [tile((*leading, ROWS, K), dtype, GROUP), tile((*leading, ROWS, BLOCK), dtype, BLOCK)]


def carry(S: jax.Array, chunk: Prepared, v: Any, o: Any, *, scale: float, bounce: list[Any]) -> jax.Array:
    """S^T behind the chunk; o [64, 64 values] in shared memory = its outputs, v = its values."""
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
        values = plgpu.load(v.at[tokens].T, layout=rg.LAYOUT).astype(f32)
        state, faded = S.astype(dtype), S * lax.broadcast_in_dim(decay, (ROWS, K), (1,))

        def products(both: Any, corrected: Any, update: Any, result: Any) -> tuple[jax.Array, jax.Array]:
            multiply(both, state, chunk.kq.at[pairs].T)
            read = both[...]
            keys, queries = (jnp.concatenate([read[:, i : i + 8], read[:, i + 16 : i + 24]], 1) for i in (0, 8))
            difference = (values - keys).astype(dtype)
            for half in (0, 1):
                multiply(corrected, difference, chunk.X.at[half, tokens].T)
            new = corrected[...].astype(dtype)
            if not bounce:  # the interpreter cannot start from a value
                update[...] = faded
            multiply(update, new, chunk.kD.at[tokens])
            multiply(result, new, chunk.A.at[tokens].T)
            out = (queries + result[...]) * scale
            return (update[...] + faded if bounce else update[...]), out

        S, out = pl.run_scoped(products, *(plgpu.ACC((ROWS, n), f32) for n in (2 * BLOCK, BLOCK, K, BLOCK)))
        o.at[tokens].T[...] = out.astype(dtype)
        return S

    return lax.fori_loop(0, BLOCKS, block, S)
