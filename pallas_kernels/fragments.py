"""Pieces of the chunk preparation that Pallas has no words for: shuffles and `mma.sync` on wgmma's register layout.

That layout (see `registers`) is also the fragment layout of both operands of `mma.sync`, so a product of two [64, n]
arrays over their columns, restricted to one warp's 16 rows, needs neither shared memory nor a barrier.

Every piece has a twin in plain jnp for the interpreter (`interpret=True`), so that all but the instruction sequences
is checked on a CPU. Pieces are written for Lane semantics; a "block" is a warp's 16 rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import registers as rg

f32 = jnp.float32


# 1. Elements and rows of a block --------------------------------------------------------------------------------------


def reciprocal(x: jax.Array, *, interpret: bool) -> jax.Array:
    """1 / x of normal numbers, to a unit in the last place; Pallas would spend five instructions on it."""
    if interpret:
        return 1 / x

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT,), return_type=rg.array(x.shape[1]))
    def piece(_, x):
        def rcp(v):
            return llvm.inline_asm(ir.F32Type.get(), [v], "rcp.approx.ftz.f32 $0, $1;", "=f,f", has_side_effects=False)

        return rg.from_elements([[[rcp(v) for v in half] for half in pair] for pair in rg.elements(x)])

    return piece(x)


def by_half(low: jax.Array, high: jax.Array, *, interpret: bool) -> jax.Array:
    """Rows 0 to 7 of every block from `low`, rows 8 to 15 from `high`: a choice of registers, no instruction."""
    if interpret:
        return jnp.where((jnp.arange(rg.ROWS) % rg.BLOCK < 8)[:, None], low, high)

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT, rg.LAYOUT), return_type=rg.array(low.shape[1], low.dtype))
    def piece(_, low, high):
        return rg.wrap(np.stack([rg.pairs(low)[:, 0], rg.pairs(high)[:, 1]], 1), low.shape[1])

    return piece(low, high)


def sibling_end(x: jax.Array, s: int, *, interpret: bool) -> jax.Array:
    """For every row the value at the last row of the neighbouring run of s rows, the other half of its run of 2 s (2
    s <= 16).
    """
    columns = x.shape[1]
    if interpret:
        runs = x.reshape(rg.ROWS // (2 * s), 2, s, columns)[:, ::-1, -1:]
        return jnp.broadcast_to(runs, (rg.ROWS // (2 * s), 2, s, columns)).reshape(x.shape)

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT,), return_type=rg.array(columns))
    def piece(_, x):
        source = arith.ori(rg.lane() if s == 8 else arith.xori(rg.lane(), rg.i32(4 * s)), rg.i32(4 * (min(s, 8) - 1)))

        def rows(pair):
            return pair[::-1] if s == 8 else pair

        return rg.from_elements(
            [[[rg.shuffle(v, source) for v in half] for half in rows(pair)] for pair in rg.elements(x)]
        )

    return piece(x)


def grow(U: jax.Array, D: jax.Array, end: jax.Array, s: int, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """U times `end` in second halves of runs of 2 s rows, D times `end` in first halves (2 s <= 8): in one instruction
    each, where a product and a choice would be two.
    """
    if interpret:
        second = (jnp.arange(rg.ROWS) & s)[:, None] != 0
        return jnp.where(second, U * end, U), jnp.where(second, D, D * end)

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT,) * 3, return_type=[rg.array(U.shape[1])] * 2)
    def piece(_, U, D, end):
        bit = arith.andi(rg.lane(), rg.i32(4 * s))
        ptx = (
            "{ .reg .pred p; setp.ne.u32 p, $5, 0; mov.f32 $0, $2; mov.f32 $1, $3; "
            "@p mul.f32 $0, $2, $4; @!p mul.f32 $1, $3, $4; }"
        )
        both = ir.Type.parse("!llvm.struct<(f32, f32)>")

        def grown(*x):
            out = llvm.inline_asm(both, [*x, bit], ptx, "=f,=f,f,f,f,r", has_side_effects=False)
            return [llvm.extractvalue(ir.F32Type.get(), out, [i]) for i in (0, 1)]

        elements = np.stack([np.array(rg.elements(x), object) for x in (U, D, end)], -1)
        results = np.apply_along_axis(lambda x: np.array(grown(*x), object), -1, elements)
        return [rg.from_elements(x.tolist()) for x in np.moveaxis(results, -1, 0)]

    U, D = piece(U, D, end)
    return U, D


def block_end(x: jax.Array, *, interpret: bool) -> jax.Array:
    """For every row the value at the last row of its block."""
    columns = x.shape[1]
    if interpret:
        return jnp.repeat(rg.blocks(x)[:, -1], rg.BLOCK, 0)

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT,), return_type=rg.array(columns))
    def piece(_, x):
        ends = [[rg.shuffle(v, arith.ori(rg.lane(), rg.i32(28))) for v in pair[1]] for pair in rg.elements(x)]
        return rg.from_elements([[end, end] for end in ends])

    return piece(x)


# 2. Scores inside a block -------------------------------------------------------------------------------------------
# Products of level s < 16 only pair rows of one run of eight, those of level 8 only rows 8 to 15 with rows 0 to 7. So
# the 16 rows of one mma hold eight rows of queries over the same eight rows of keys, and half the products are saved.
# In such a "stacked" array, columns 8 h .. 8 h + 8 belong to half h; rows 0 to 7 of a block are its query rows, rows
# 8 to 15 its key rows.


def stacked_scores(total: jax.Array, q: jax.Array, k: jax.Array, right: jax.Array, *, interpret: bool) -> jax.Array:
    """total [64, 16] + the products of q and k, each with `right`, of either half of the block, stacked."""
    if interpret:
        q, k, right = (rg.blocks(x).reshape(4, 2, 8, -1) for x in (q, k, right))
        return total + rg.dot("wshrd,whcd->wsrhc", jnp.stack([q, k], 1), right).reshape(rg.ROWS, 16)

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT,) * 4, return_type=rg.array(16))
    def piece(_, total, q, k, right):
        dtype, total = k.mlir_dtype, [c[0] + c[1] for c in rg.elements(total)]
        q, k, right = rg.words(q), rg.words(k), rg.words(right)
        for j in range(0, len(k), 2):
            for h in (0, 1):
                left = [q[j, h], k[j, h], q[j + 1, h], k[j + 1, h]]
                total[h] = rg.mma(total[h], left, [right[j, h], right[j + 1, h]], dtype)
        return rg.from_elements([[c[:2], c[2:]] for c in total])

    return piece(total, q, k, right)


def crossed_scores(total: jax.Array, q: jax.Array, k: jax.Array, right: jax.Array, *, interpret: bool) -> jax.Array:
    """total [64, 8] + the products of rows 8 to 15 of q and k with rows 0 to 7 of `right`, stacked."""
    if interpret:
        q, k, right = (rg.blocks(x).reshape(4, 2, 8, -1) for x in (q, k, right))
        return total + rg.dot("wsrd,wcd->wsrc", jnp.stack([q[:, 1], k[:, 1]], 1), right[:, 0]).reshape(rg.ROWS, 8)

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT,) * 4, return_type=rg.array(8))
    def piece(_, total, q, k, right):
        dtype, (total,) = k.mlir_dtype, [c[0] + c[1] for c in rg.elements(total)]
        q, k, right = rg.words(q), rg.words(k), rg.words(right)
        for j in range(0, len(k), 2):
            left = [q[j, 1], k[j, 1], q[j + 1, 1], k[j + 1, 1]]
            total = rg.mma(total, left, [right[j, 0], right[j + 1, 0]], dtype)
        return rg.from_elements([[total[:2], total[2:]]])

    return piece(total, q, k, right)


def unstack(stacked: jax.Array, crossed: jax.Array, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """The blocks of queries and of keys [64, 16] in their usual places; zero above the crossed part."""
    if interpret:
        same, below = stacked.reshape(4, 2, 8, 2, 8), crossed.reshape(4, 2, 8, 8)
        rows = [
            jnp.concatenate([same[:, :, :, 0], jnp.zeros_like(below)], -1),
            jnp.concatenate([below, same[:, :, :, 1]], -1),
        ]
        both = jnp.stack(rows, 2).reshape(4, 2, rg.BLOCK, rg.BLOCK)
        return both[:, 0].reshape(rg.ROWS, rg.BLOCK), both[:, 1].reshape(rg.ROWS, rg.BLOCK)

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT,) * 2, return_type=[rg.array(16), rg.array(16)])
    def piece(_, stacked, crossed):
        same, (below,) = rg.elements(stacked), rg.elements(crossed)
        zero = [rg.f32(0.0)] * 2
        return [rg.from_elements([[same[0][i], below[i]], [zero, same[1][i]]]) for i in (0, 1)]

    queries, keys = piece(stacked, crossed)
    return queries, keys


# 3. Scores between blocks ---------------------------------------------------------------------------------------------


def _sixteen_bytes(at: rg.Register) -> list[rg.Register]:
    """Row and column of the `at`th sixteen bytes of a [64, 32] array of 16-bit numbers."""
    return [rg.index(arith.shrui(at, rg.i32(2))), rg.index(arith.shli(arith.andi(at, rg.i32(3)), rg.i32(3)))]


def store_operand(ref: Any, x: jax.Array, *, interpret: bool) -> None:
    """x [64, 32], 16-bit, to shared memory [64, 32] in the order in which `block_scores` reads it (a lane's eight
    words together).
    """
    if interpret:
        ref[...] = x
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), rg.LAYOUT))
    def piece(_, ref, x):
        chunk = arith.addi(arith.shli(rg.warp(), rg.i32(6)), rg.lane())
        words = rg.words(x).flatten()
        for i in (0, 1):
            value = vector.from_elements(ir.VectorType.get((4,), rg.i32_type()), list(words[4 * i : 4 * i + 4]))
            value = vector.bitcast(ir.VectorType.get((8,), x.mlir_dtype), value)
            at = arith.addi(chunk, rg.i32(32 * i))
            vector.store(value, ref, _sixteen_bytes(at))

    piece(ref, x)


def block_scores(
    totals: tuple[jax.Array, jax.Array],
    q: jax.Array,
    k: jax.Array,
    ref: Any,
    distance: int,
    factor: jax.Array | None,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """totals + the products of q and of k [64, 32] with the stored operand of the block `distance` before (of the
    four, cyclically), times a factor [64, 32] of channels, the same in all rows of a block.
    """
    if interpret:
        before = jnp.roll(rg.blocks(ref[...]), distance, 0)
        if factor is not None:
            before = (before * rg.blocks(factor.astype(q.dtype))).astype(q.dtype).astype(jnp.float32)

        def add(total, x):
            return total + rg.dot("wid,wjd->wij", rg.blocks(x), before).reshape(rg.ROWS, rg.BLOCK)

        return add(totals[0], q), add(totals[1], k)

    factors = [] if factor is None else [factor.astype(q.dtype)]
    layouts = (rg.LAYOUT,) * (4 + len(factors))

    @plgpu.inline_mgpu(arg_types=(*layouts, plgpu.RefType()), return_type=[rg.array(16), rg.array(16)])
    def piece(_, total_q, total_k, q_, k_, *rest):
        *factors, ref = rest
        warp = arith.andi(arith.subi(rg.warp(), rg.i32(distance)), rg.i32(3))
        chunk = arith.addi(arith.shli(warp, rg.i32(6)), rg.lane())
        b = []
        for i in (0, 1):
            at = arith.addi(chunk, rg.i32(32 * i))
            value = vector.load(ir.VectorType.get((8,), q_.mlir_dtype), ref, _sixteen_bytes(at))
            value = vector.bitcast(ir.VectorType.get((4,), rg.i32_type()), value)
            b += [
                vector.extract(value, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([e]))
                for e in range(4)
            ]
        words = np.array(b, object).reshape(4, 2)
        for x in factors:  # whose two row halves are the same
            times = functools.partial(_times, dtype=q_.mlir_dtype)
            words = np.vectorize(times, otypes=[object])(words, rg.words(x)[:, :1])
        out = []
        for total, x in ((total_q, rg.words(q_)), (total_k, rg.words(k_))):
            c = [pair[0] + pair[1] for pair in rg.elements(total)]
            for j in (0, 2):
                for h in (0, 1):
                    c[h] = rg.mma(
                        c[h],
                        [x[j, 0], x[j, 1], x[j + 1, 0], x[j + 1, 1]],
                        [words[j, h], words[j + 1, h]],
                        q_.mlir_dtype,
                    )
            out.append(rg.from_elements([[x[:2], x[2:]] for x in c]))
        return out

    total_q, total_k = piece(*totals, q, k, *factors, ref)
    return total_q, total_k


def _times(a: rg.Register, b: rg.Register, dtype: ir.Type) -> rg.Register:
    """Of words of two 16-bit numbers."""
    return llvm.inline_asm(rg.i32_type(), [a, b], f"mul.rn.{dtype}x2 $0, $1, $2;", "=r,r,r", has_side_effects=False)
