"""Register-level pieces of the kernels that Pallas has no words for: warp shuffles and `mma.sync` on wgmma's register layout.

A [64, n] array in that layout belongs to four warps of 16 rows. Row 8 h + r of a warp (r < 8) and columns 8 j + 2 t, 8 j + 2 t + 1 lie in
lane 4 r + t, register [j][h]. That is also the fragment layout of both operands of `mma.sync`, so a product of two such arrays over their
columns, restricted to one warp's rows, needs neither shared memory nor a barrier.

Every piece has a twin in plain jnp for the interpreter (`interpret=True`), so that all but the instruction sequences is checked on a CPU.
Pieces are written for Lane semantics; a "block" is a warp's 16 rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, vector

LAYOUT = plgpu.Layout.WGMMA
ROWS = 64  # rows of a warpgroup's array: four warps of 16
BLOCK = 16
bf16, f32 = jnp.bfloat16, jnp.float32

Register = Any  # an MLIR value; the registers of one array are indexed [column // 8][row half]


# 1. MLIR shorthand -----------------------------------------------------------------------------------------------------------------


def _i32_type() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i32(value: int) -> Register:
    return arith.constant(_i32_type(), ir.IntegerAttr.get(_i32_type(), value))


def _f32(value: float) -> Register:
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), value))


def _index(value: Register | int) -> Register:
    return arith.index_cast(ir.IndexType.get(), _i32(value) if isinstance(value, int) else value)


def _lane() -> Register:
    return arith.andi(utils.thread_idx(), _i32(31))


def _warp() -> Register:
    return arith.andi(arith.shrui(utils.thread_idx(), _i32(5)), _i32(3))


def _shuffle(x: Register, lane: Register) -> Register:
    return nvvm.shfl_sync(_i32(-1), x, lane, _i32(31), nvvm.ShflKind.idx)


def _pairs(x: fa.FragmentedArray) -> np.ndarray:
    """Registers [column // 8][half], each a pair of adjacent columns."""
    return x.registers.reshape(x.shape[1] // 8, 2)


def _words(x: fa.FragmentedArray) -> np.ndarray:
    """The pairs of a 16-bit array as 32-bit words."""
    return np.vectorize(lambda r: utils.bitcast(r, _i32_type()), otypes=[object])(_pairs(x))


def _elements(x: fa.FragmentedArray) -> list[list[list[Register]]]:
    """[column // 8][half][column % 2] of a 32-bit array."""
    at = lambda r, e: vector.extract(r, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([e]))
    return [[[at(r, e) for e in (0, 1)] for r in row] for row in _pairs(x)]


def _wrap(registers: np.ndarray, columns: int) -> fa.FragmentedArray:
    layout = LAYOUT.to_mgpu()
    return fa.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape((ROWS, columns))), _layout=layout, _is_signed=None
    )


def _from_elements(elements: list[list[list[Register]]]) -> fa.FragmentedArray:
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    registers = np.empty((len(elements), 2), object)
    for j, row in enumerate(elements):
        for h, values in enumerate(row):
            registers[j, h] = vector.from_elements(pair, values)
    return _wrap(registers, 8 * len(elements))


def _array(columns: int, dtype: Any = f32) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct((ROWS, columns), dtype, layout=LAYOUT)


def _mma(c: list[Register], a: list[Register], b: list[Register], dtype: ir.Type) -> list[Register]:
    """c [16, 8] + a [16, 16] b [8, 16]^T: four float32 registers, four words, two words of two `dtype` (bf16 or f16) numbers."""
    result = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
    registers = "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    ptx = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {registers}"
    out = llvm.inline_asm(result, [*a, *b, *c], ptx, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", has_side_effects=True)
    return [llvm.extractvalue(ir.F32Type.get(), out, [i]) for i in range(4)]


def _blocks(x: jax.Array) -> jax.Array:
    """[64, n] -> [4, 16, n], for the twins."""
    return x.astype(f32).reshape(ROWS // BLOCK, BLOCK, -1)


def _dot(spec: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(spec, *operands, precision="highest")


# 2. Elements and rows of a block ----------------------------------------------------------------------------------------------------------------


def reciprocal(x: jax.Array, *, interpret: bool) -> jax.Array:
    """1 / x of normal numbers, to a unit in the last place; Pallas would spend five instructions on it."""
    if interpret:
        return 1 / x

    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=_array(x.shape[1]))
    def piece(_, x):
        rcp = lambda v: llvm.inline_asm(
            ir.F32Type.get(), [v], "rcp.approx.ftz.f32 $0, $1;", "=f,f", has_side_effects=False
        )
        return _from_elements([[[rcp(v) for v in half] for half in pair] for pair in _elements(x)])

    return piece(x)


def by_half(low: jax.Array, high: jax.Array, *, interpret: bool) -> jax.Array:
    """Rows 0 to 7 of every block from `low`, rows 8 to 15 from `high`: a choice of registers, no instruction."""
    if interpret:
        return jnp.where((jnp.arange(ROWS) % BLOCK < 8)[:, None], low, high)

    @plgpu.inline_mgpu(arg_types=(LAYOUT, LAYOUT), return_type=_array(low.shape[1], low.dtype))
    def piece(_, low, high):
        return _wrap(np.stack([_pairs(low)[:, 0], _pairs(high)[:, 1]], 1), low.shape[1])

    return piece(low, high)


def sibling_end(x: jax.Array, s: int, *, interpret: bool) -> jax.Array:
    """For every row the value at the last row of the neighbouring run of s rows, the other half of its run of 2 s (2 s <= 16)."""
    columns = x.shape[1]
    if interpret:
        runs = x.reshape(ROWS // (2 * s), 2, s, columns)[:, ::-1, -1:]
        return jnp.broadcast_to(runs, (ROWS // (2 * s), 2, s, columns)).reshape(x.shape)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=_array(columns))
    def piece(_, x):
        source = arith.ori(_lane() if s == 8 else arith.xori(_lane(), _i32(4 * s)), _i32(4 * (min(s, 8) - 1)))
        rows = lambda pair: pair[::-1] if s == 8 else pair
        return _from_elements([[[_shuffle(v, source) for v in half] for half in rows(pair)] for pair in _elements(x)])

    return piece(x)


def block_end(x: jax.Array, *, interpret: bool) -> jax.Array:
    """For every row the value at the last row of its block."""
    columns = x.shape[1]
    if interpret:
        return jnp.repeat(_blocks(x)[:, -1], BLOCK, 0)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=_array(columns))
    def piece(_, x):
        ends = [[_shuffle(v, arith.ori(_lane(), _i32(28))) for v in pair[1]] for pair in _elements(x)]
        return _from_elements([[end, end] for end in ends])

    return piece(x)


# 3. Scores inside a block ----------------------------------------------------------------------------------------------------------
# Products of level s < 16 only pair rows of one run of eight, those of level 8 only rows 8 to 15 with rows 0 to 7. So the 16 rows of one
# mma hold eight rows of queries over the same eight rows of keys, and half the products are saved. In such a "stacked" array, columns
# 8 h .. 8 h + 8 belong to half h; rows 0 to 7 of a block are its query rows, rows 8 to 15 its key rows.


def stacked_scores(total: jax.Array, q: jax.Array, k: jax.Array, right: jax.Array, *, interpret: bool) -> jax.Array:
    """total [64, 16] + the products of q and k, each with `right`, of either half of the block, stacked."""
    if interpret:
        q, k, right = (_blocks(x).reshape(4, 2, 8, -1) for x in (q, k, right))
        return total + _dot("wshrd,whcd->wsrhc", jnp.stack([q, k], 1), right).reshape(ROWS, 16)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,) * 4, return_type=_array(16))
    def piece(_, total, q, k, right):
        dtype, total = k.mlir_dtype, [c[0] + c[1] for c in _elements(total)]
        q, k, right = _words(q), _words(k), _words(right)
        for j in range(0, len(k), 2):
            for h in (0, 1):
                left = [q[j, h], k[j, h], q[j + 1, h], k[j + 1, h]]
                total[h] = _mma(total[h], left, [right[j, h], right[j + 1, h]], dtype)
        return _from_elements([[c[:2], c[2:]] for c in total])

    return piece(total, q, k, right)


def crossed_scores(total: jax.Array, q: jax.Array, k: jax.Array, right: jax.Array, *, interpret: bool) -> jax.Array:
    """total [64, 8] + the products of rows 8 to 15 of q and k with rows 0 to 7 of `right`, stacked."""
    if interpret:
        q, k, right = (_blocks(x).reshape(4, 2, 8, -1) for x in (q, k, right))
        return total + _dot("wsrd,wcd->wsrc", jnp.stack([q[:, 1], k[:, 1]], 1), right[:, 0]).reshape(ROWS, 8)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,) * 4, return_type=_array(8))
    def piece(_, total, q, k, right):
        dtype, (total,) = k.mlir_dtype, [c[0] + c[1] for c in _elements(total)]
        q, k, right = _words(q), _words(k), _words(right)
        for j in range(0, len(k), 2):
            left = [q[j, 1], k[j, 1], q[j + 1, 1], k[j + 1, 1]]
            total = _mma(total, left, [right[j, 0], right[j + 1, 0]], dtype)
        return _from_elements([[total[:2], total[2:]]])

    return piece(total, q, k, right)


def unstack(stacked: jax.Array, crossed: jax.Array, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """The blocks of queries and of keys [64, 16] in their usual places; zero above the crossed part."""
    if interpret:
        same, below = stacked.reshape(4, 2, 8, 2, 8), crossed.reshape(4, 2, 8, 8)
        rows = [
            jnp.concatenate([same[:, :, :, 0], jnp.zeros_like(below)], -1),
            jnp.concatenate([below, same[:, :, :, 1]], -1),
        ]
        both = jnp.stack(rows, 2).reshape(4, 2, BLOCK, BLOCK)
        return both[:, 0].reshape(ROWS, BLOCK), both[:, 1].reshape(ROWS, BLOCK)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,) * 2, return_type=[_array(16), _array(16)])
    def piece(_, stacked, crossed):
        same, (below,) = _elements(stacked), _elements(crossed)
        zero = [_f32(0.0)] * 2
        return [_from_elements([[same[0][i], below[i]], [zero, same[1][i]]]) for i in (0, 1)]

    queries, keys = piece(stacked, crossed)
    return queries, keys


# 4. Scores between blocks ----------------------------------------------------------------------------------------------------------


def store_operand(ref: Any, x: jax.Array, *, interpret: bool) -> None:
    """x [64, 32], 16-bit, to shared memory [64, 32] in the order in which `block_scores` reads it (a lane's eight words together)."""
    if interpret:
        ref[...] = x
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT))
    def piece(_, ref, x):
        chunk = arith.addi(arith.shli(_warp(), _i32(6)), _lane())
        words = _words(x).flatten()
        for i in (0, 1):
            value = vector.from_elements(ir.VectorType.get((4,), _i32_type()), list(words[4 * i : 4 * i + 4]))
            value = vector.bitcast(ir.VectorType.get((8,), x.mlir_dtype), value)
            at = arith.addi(chunk, _i32(32 * i))
            vector.store(
                value, ref, [_index(arith.shrui(at, _i32(2))), _index(arith.shli(arith.andi(at, _i32(3)), _i32(3)))]
            )

    piece(ref, x)


def block_scores(
    totals: tuple[jax.Array, jax.Array], q: jax.Array, k: jax.Array, ref: Any, distance: int, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """totals + the products of q and of k [64, 32] with the stored operand of the block `distance` before (of the four, cyclically)."""
    if interpret:
        before = jnp.roll(_blocks(ref[...]), distance, 0)
        add = lambda total, x: total + _dot("wid,wjd->wij", _blocks(x), before).reshape(ROWS, BLOCK)
        return add(totals[0], q), add(totals[1], k)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,) * 4 + (plgpu.RefType(),), return_type=[_array(16), _array(16)])
    def piece(_, total_q, total_k, q_, k_, ref):
        warp = arith.andi(arith.subi(_warp(), _i32(distance)), _i32(3))
        chunk = arith.addi(arith.shli(warp, _i32(6)), _lane())
        b = []
        for i in (0, 1):
            at = arith.addi(chunk, _i32(32 * i))
            index = [_index(arith.shrui(at, _i32(2))), _index(arith.shli(arith.andi(at, _i32(3)), _i32(3)))]
            value = vector.load(ir.VectorType.get((8,), q_.mlir_dtype), ref, index)
            value = vector.bitcast(ir.VectorType.get((4,), _i32_type()), value)
            b += [
                vector.extract(value, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([e]))
                for e in range(4)
            ]
        words = np.array(b, object).reshape(4, 2)
        out = []
        for total, x in ((total_q, _words(q_)), (total_k, _words(k_))):
            c = [pair[0] + pair[1] for pair in _elements(total)]
            for j in (0, 2):
                for h in (0, 1):
                    c[h] = _mma(
                        c[h],
                        [x[j, 0], x[j, 1], x[j + 1, 0], x[j + 1, 1]],
                        [words[j, h], words[j + 1, h]],
                        q_.mlir_dtype,
                    )
            out.append(_from_elements([[x[:2], x[2:]] for x in c]))
        return out

    total_q, total_k = piece(*totals, q, k, ref)
    return total_q, total_k


def fill(ref: Any, value: float, *, interpret: bool) -> None:
    """ref [4, n], float32 in shared memory, = value."""
    if interpret:
        ref[...] = jnp.full(ref.shape, value, f32)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def piece(_, ref):
        for column in range(0, ref.type.shape[1], 32):
            memref.store(_f32(value), ref, [_index(_warp()), _index(arith.addi(_lane(), _i32(column)))])

    piece(ref)


def store_ends(ref: Any, x: jax.Array, *, interpret: bool) -> None:
    """ref [4, n] = the last row of every block of x [64, n]."""
    if interpret:
        ref[...] = _blocks(x)[:, -1]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT))
    def piece(_, ref, x):
        with utils.when(arith.cmpi(arith.CmpIPredicate.uge, _lane(), _i32(28))):
            column = arith.shli(arith.andi(_lane(), _i32(3)), _i32(1))
            for j, pair in enumerate(_pairs(x)):
                vector.store(pair[1], ref, [_index(_warp()), _index(arith.addi(column, _i32(8 * j)))])

    piece(ref, x)


def load_ends(ref: Any, offset: int, *, interpret: bool) -> jax.Array:
    """[64, n] whose rows of block w are row w + offset of ref [., n]."""
    columns = ref.shape[1]
    if interpret:
        return jnp.repeat(ref[...][offset : offset + ROWS // BLOCK], BLOCK, 0)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_array(columns))
    def piece(_, ref):
        column = arith.shli(arith.andi(_lane(), _i32(3)), _i32(1))
        row = _index(arith.addi(_warp(), _i32(offset)))
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        registers = np.empty((columns // 8, 2), object)
        for j in range(columns // 8):
            registers[j, 0] = registers[j, 1] = vector.load(pair, ref, [row, _index(arith.addi(column, _i32(8 * j)))])
        return _wrap(registers, columns)

    return piece(ref)


# 5. Global memory without TMA -----------------------------------------------------------------------------------------------------------


def gather_rows(ref: Any, index: jax.Array, *, interpret: bool) -> jax.Array:
    """ref[index] for a float32 vector in global memory and index [64, n] int32, the same in all columns."""
    columns = index.shape[1]
    if interpret:
        return ref[...][index]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT), return_type=_array(columns))
    def piece(_, ref, index):
        values = [memref.load(ref, [_index(half[0])]) for half in _elements(index)[0]]
        return _from_elements([[[value] * 2 for value in values]] * (columns // 8))

    return piece(ref, index)


def store_transposed(ref: Any, x: jax.Array, *, interpret: bool) -> None:
    """ref [n, 64] in global memory = x^T for float32 x [64, n]."""
    if interpret:
        ref[...] = x.T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT))
    def piece(_, ref, x):
        row, column = _place()
        for j, pair in enumerate(_elements(x)):
            for h, values in enumerate(pair):
                for e, value in enumerate(values):
                    memref.store(
                        value, ref, [_index(arith.addi(column, _i32(8 * j + e))), _index(arith.addi(row, _i32(8 * h)))]
                    )

    piece(ref, x)


def load_transposed(ref: Any, *, interpret: bool) -> jax.Array:
    """ref^T [64, n] for ref [n, 64], float32 in global memory."""
    columns = ref.shape[0]
    if interpret:
        return ref[...].T

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_array(columns))
    def piece(_, ref):
        row, column = _place()
        at = lambda j, h, e: memref.load(
            ref, [_index(arith.addi(column, _i32(8 * j + e))), _index(arith.addi(row, _i32(8 * h)))]
        )
        return _from_elements([[[at(j, h, e) for e in (0, 1)] for h in (0, 1)] for j in range(columns // 8)])

    return piece(ref)


def _place() -> tuple[Register, Register]:
    """Row and column of the lane's first element."""
    row = arith.addi(arith.shli(_warp(), _i32(4)), arith.shrui(_lane(), _i32(2)))
    return row, arith.shli(arith.andi(_lane(), _i32(3)), _i32(1))
