"""Registers of wgmma's layout, one by one: the MLIR that the inline pieces of the kernels are written in.

A [64, n] array belongs to four warps of 16 rows. Row 8 h + r of a warp (r < 8) and columns 8 j + 2 t, 8 j + 2 t + 1
lie in lane 4 r + t, register [j][h].
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

LAYOUT = plgpu.Layout.WGMMA
ROWS = 64  # rows of a warpgroup's array: four warps of 16
BLOCK = 16

Register = Any  # an MLIR value; the registers of one array are indexed [column // 8][row half]


def i32_type() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def i32(value: int) -> Register:
    return utils.c(value, i32_type())


def f32(value: float) -> Register:
    return utils.c(value, ir.F32Type.get())


def index(value: Register | int) -> Register:
    return arith.index_cast(ir.IndexType.get(), i32(value) if isinstance(value, int) else value)


def lane() -> Register:
    return arith.andi(utils.thread_idx(), i32(31))


def warp() -> Register:
    return arith.andi(arith.shrui(utils.thread_idx(), i32(5)), i32(3))


def shuffle(x: Register, lane: Register) -> Register:
    return nvvm.shfl_sync(i32(-1), x, lane, i32(31), nvvm.ShflKind.idx)


def pairs(x: fa.FragmentedArray) -> np.ndarray:
    """Registers [column // 8][half], each a pair of adjacent columns."""
    return x.registers.reshape(x.shape[1] // 8, 2)


def as_word(pair: Register) -> Register:
    """Two 16-bit numbers as a 32-bit word."""
    return utils.bitcast(pair, i32_type())


def words(x: fa.FragmentedArray) -> np.ndarray:
    """The pairs of a 16-bit array as 32-bit words."""
    return np.vectorize(as_word, otypes=[object])(pairs(x))


def elements(x: fa.FragmentedArray) -> list[list[list[Register]]]:
    """[column // 8][half][column % 2] of a 32-bit array."""

    def at(r, e):
        return vector.extract(r, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([e]))

    return [[[at(r, e) for e in (0, 1)] for r in row] for row in pairs(x)]


def wrap(registers: np.ndarray, columns: int) -> fa.FragmentedArray:
    layout = LAYOUT.to_mgpu()
    return fa.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape((ROWS, columns))), _layout=layout, _is_signed=None
    )


def from_elements(elements: list[list[list[Register]]]) -> fa.FragmentedArray:
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    registers = np.empty((len(elements), 2), object)
    for j, row in enumerate(elements):
        for h, values in enumerate(row):
            registers[j, h] = vector.from_elements(pair, values)
    return wrap(registers, 8 * len(elements))


def array(columns: int, dtype: Any = jnp.float32) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct((ROWS, columns), dtype, layout=LAYOUT)


def mma(c: list[Register], a: list[Register], b: list[Register], dtype: ir.Type) -> list[Register]:
    """c [16, 8] + a [16, n] b [8, n]^T, n = 16 or 8: four float32 registers, n / 4 and n / 8 words of two `dtype` (bf16
    or f16) numbers.
    """
    result = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
    names = [f"${i}" for i in range(8 + len(a) + len(b))]
    groups = [names[:4], names[4 : 4 + len(a)], names[4 + len(a) : -4], names[-4:]]
    registers = ", ".join("{" + ", ".join(group) + "}" for group in groups)
    ptx = f"mma.sync.aligned.m16n8k{4 * len(a)}.row.col.f32.{dtype}.{dtype}.f32 {registers};"
    constraints = ",".join(["=f"] * 4 + ["r"] * (len(a) + len(b)) + ["f"] * 4)
    out = llvm.inline_asm(result, [*a, *b, *c], ptx, constraints, has_side_effects=True)
    return [llvm.extractvalue(ir.F32Type.get(), out, [i]) for i in range(4)]


def opaque_zero_register() -> Register:
    """`opaque_zero` for the inside of a piece."""
    ptx = "mov.u32 $0, %nctaid.x; shr.u32 $0, $0, 31;"  # a constant ptxas would know
    return llvm.inline_asm(i32_type(), [], ptx, "=r", has_side_effects=True)


def opaque_zero(*, interpret: bool) -> jax.Array:
    """0, but no compiler knows: added to an index, it keeps addresses from being computed early and kept."""
    if interpret:
        return jnp.int32(0)

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.dtype("int32"), layout=plgpu.Layout.WG_SPLAT))
    def piece(_):
        return fa.FragmentedArray.splat(opaque_zero_register(), (), is_signed=True)

    return piece()


def boundary(*, interpret: bool) -> None:
    """Nothing, but a branch that is never taken: the compiler moves no arithmetic across and keeps nothing loaded."""
    if interpret:
        return

    @plgpu.inline_mgpu()
    def piece(_):
        ptx = "{ .reg .pred p; .reg .u32 n; mov.u32 n, %nctaid.x; setp.eq.u32 p, n, 0; @p trap; }"
        llvm.inline_asm(None, [], ptx, "~{memory}", has_side_effects=True)

    piece()


def blocks(x: jax.Array) -> jax.Array:
    """[64, n] -> [4, 16, n], for the twins."""
    return x.astype(jnp.float32).reshape(ROWS // BLOCK, BLOCK, -1)


def dot(spec: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(spec, *operands, precision="highest")
