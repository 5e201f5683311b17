"""Shared memory in tiles, and transfers in wgmma's register layout that Pallas has no words for or would do slowly.

As in `fragments`, every piece has a twin for the interpreter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, vector

from pallas_kernels import registers as rg
from pallas_kernels.registers import LAYOUT

f32 = jnp.float32


def tile(shape: tuple[int, ...], dtype: Any, channels: int) -> Any:
    """Shared memory in the tiling that TMA writes and wgmma reads, whose last axis may be sliced by `channels`."""
    return plgpu.SMEM(shape, dtype, transforms=_transforms(min(channels, 128 // jnp.dtype(dtype).itemsize), dtype))


def _transforms(columns: int, dtype: Any) -> tuple[Any, Any]:
    tiling = plgpu.TilingTransform((8, columns))  # type: ignore[abstract]
    return tiling, plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize)  # type: ignore[abstract]


def store(ref: Any, x: jax.Array) -> None:
    """ref = x, which since jax 0.12 an assignment only does in whole cache lines."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def fill(ref: Any, value: float, *, interpret: bool) -> None:
    """ref [4, n], float32 in shared memory, = value."""
    if interpret:
        ref[...] = jnp.full(ref.shape, value, f32)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def piece(_, ref):
        for column in range(0, ref.type.shape[1], 32):
            memref.store(rg.f32(value), ref, [rg.index(rg.warp()), rg.index(arith.addi(rg.lane(), rg.i32(column)))])

    piece(ref)


def store_ends(ref: Any, x: jax.Array, *, interpret: bool) -> None:
    """ref [4, n] = the last row of every block of x [64, n]."""
    if interpret:
        ref[...] = rg.blocks(x)[:, -1]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT))
    def piece(_, ref, x):
        with utils.when(arith.cmpi(arith.CmpIPredicate.uge, rg.lane(), rg.i32(28))):
            column = arith.shli(arith.andi(rg.lane(), rg.i32(3)), rg.i32(1))
            for j, pair in enumerate(rg.pairs(x)):
                vector.store(pair[1], ref, [rg.index(rg.warp()), rg.index(arith.addi(column, rg.i32(8 * j)))])

    piece(ref, x)


def load_ends(ref: Any, offset: int, *, interpret: bool) -> jax.Array:
    """[64, n] whose rows of block w are row w + offset of ref [., n]."""
    columns = ref.shape[1]
    if interpret:
        return jnp.repeat(ref[...][offset : offset + rg.ROWS // rg.BLOCK], rg.BLOCK, 0)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=rg.array(columns))
    def piece(_, ref):
        column = arith.shli(arith.andi(rg.lane(), rg.i32(3)), rg.i32(1))
        row = rg.index(arith.addi(rg.warp(), rg.i32(offset)))
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        registers = np.empty((columns // 8, 2), object)
        for j in range(columns // 8):
            registers[j, 0] = registers[j, 1] = vector.load(
                pair, ref, [row, rg.index(arith.addi(column, rg.i32(8 * j)))]
            )
        return rg.wrap(registers, columns)

    return piece(ref)


def store_alternating(ref: Any, x: jax.Array, which: int, *, interpret: bool) -> None:
    """Groups of eight rows of x [64, n], 16-bit, to every other group of eight rows of ref [128, n], the first to group
    `which`. ref: a `tile` of n channels.
    """
    if interpret:
        for i in range(0, rg.ROWS, 8):
            ref[pl.ds(2 * i + 8 * which, 8)] = x[i : i + 8]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(_transforms(x.shape[1], x.dtype)), LAYOUT))
    def piece(_, ref, x):
        groups = utils.memref_slice(utils.memref_unfold(ref, 0, (None, 2)), (slice(None), which))
        x.store_tiled(groups, swizzle=2 * x.shape[1])

    piece(ref, x)


def clear_rows(refs: Sequence[Any], cleared: jax.Array, channels: int, *, interpret: bool) -> None:
    """Zeros in the rows of refs [64, n] where `cleared` [64, 8], bool, is set in all columns, and nothing anywhere
    else. refs: `tile`s of 16-bit numbers and of so many channels.
    """
    if interpret:
        for ref in refs:
            x = ref[...]
            ref[...] = jnp.where(cleared[:, :1], jnp.zeros_like(x), x)
        return

    tiled = plgpu.RefType(_transforms(channels, refs[0].dtype))

    @plgpu.inline_mgpu(arg_types=(*[tiled] * len(refs), LAYOUT))
    def piece(_, *arguments):
        *refs, cleared = arguments
        lane = arith.addi(rg.lane(), rg.opaque_zero_register())  # addresses are not kept for the next chunk
        row, first = arith.shrui(lane, rg.i32(2)), arith.shli(arith.andi(lane, rg.i32(3)), rg.i32(3))
        zeros = vector.from_elements(ir.VectorType.get((4,), rg.i32_type()), [rg.i32(0)] * 4)
        zeros = vector.bitcast(ir.VectorType.get((8,), refs[0].type.element_type), zeros)
        for h, half in enumerate(rg.elements(cleared)[0]):  # a row's four lanes clear it whole, whatever the swizzle
            group = arith.addi(arith.shli(rg.warp(), rg.i32(1)), rg.i32(h))
            with utils.when(half[0]):
                for ref in refs:
                    for c in range(ref.type.shape[1]):
                        for start in range(0, channels, 32):
                            at = group, c, row, arith.addi(first, rg.i32(start))
                            vector.store(zeros, ref, [rg.index(x) for x in at])

    piece(*refs, cleared)


def gather_rows(ref: Any, index: jax.Array, *, interpret: bool) -> jax.Array:
    """ref[index] for a float32 vector in global memory and index [64, n] int32, the same in all columns."""
    columns = index.shape[1]
    if interpret:
        return ref[...][index]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT), return_type=rg.array(columns))
    def piece(_, ref, index):
        values = [memref.load(ref, [rg.index(half[0])]) for half in rg.elements(index)[0]]
        return rg.from_elements([[[value] * 2 for value in values]] * (columns // 8))

    return piece(ref, index)


def load_ahead(count: jax.Array, free: Any, load: Callable[[jax.Array, jax.Array], None], stages: int) -> None:
    """load(n, stage) for every n < count, stages in turn, each as soon as its barrier in `free` has been arrived at for
    what it held; in the end waits for all, so that no arrival is left unseen.
    """

    def step(n: jax.Array, s: jax.Array) -> jax.Array:
        @pl.when(n >= stages)
        def _() -> None:
            plgpu.barrier_wait(free.at[s])

        load(n, s)
        return jnp.where(s == stages - 1, 0, s + 1)

    jax.lax.fori_loop(0, count, step, jnp.int32(0))

    def see(n: jax.Array, _: None) -> None:
        plgpu.barrier_wait(free.at[jax.lax.rem(n, stages)])

    jax.lax.fori_loop(jnp.maximum(count - stages, 0), count, see, None)


def fence_copies() -> None:
    """What other blocks wrote to global memory, and this one has seen, is seen by its copies too."""

    @plgpu.inline_mgpu()
    def piece(_):
        nvvm.fence_proxy(nvvm.ProxyKind.async_)

    piece()


def count_up(semaphore: Any) -> None:
    """semaphore += 1, for what this block has read: what it wrote may come later, which spares the wait for it that
    `plgpu.semaphore_signal` has.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def piece(_, ref):
        utils.SemaphoreRef(utils.memref_ptr(ref)).signal(1, relaxed=True, memory_scope="gpu")

    piece(semaphore)


def store_rows(ref: Any, x: jax.Array, *, interpret: bool) -> None:
    """ref [64] in global memory = any column of float32 x [64, n], which are all the same."""
    if interpret:
        ref[...] = x[:, 0]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT))
    def piece(_, ref, x):
        for h, (value, _) in enumerate(rg.elements(x)[0]):
            memref.store(value, ref, _transposed_place(0, h, 0)[1:])

    piece(ref, x)


def fence(*, interpret: bool) -> None:
    """Before a barrier of the cluster: its blocks see behind it what this thread has written to global memory, if a
    fence follows there too.
    """
    if interpret:
        return

    @plgpu.inline_mgpu()
    def piece(_):
        llvm.inline_asm(None, [], "fence.acq_rel.cluster;", "~{memory}", has_side_effects=True)

    piece()


def store_transposed(ref: Any, x: jax.Array, *, interpret: bool) -> None:
    """ref [n, 64] in global memory = x^T for float32 x [64, n]."""
    if interpret:
        ref[...] = x.T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT))
    def piece(_, ref, x):
        for j, pair in enumerate(rg.elements(x)):
            for h, values in enumerate(pair):
                for e, value in enumerate(values):
                    memref.store(value, ref, _transposed_place(j, h, e))

    piece(ref, x)


def load_transposed(ref: Any, *, interpret: bool) -> jax.Array:
    """ref^T [64, n] for ref [n, 64], float32 in global memory."""
    columns = ref.shape[0]
    if interpret:
        return ref[...].T

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=rg.array(columns))
    def piece(_, ref):
        def pair(j, h):
            return [memref.load(ref, _transposed_place(j, h, e)) for e in (0, 1)]

        return rg.from_elements([[pair(j, h) for h in (0, 1)] for j in range(columns // 8)])

    return piece(ref)


def _transposed_place(j: int, h: int, e: int) -> list[rg.Register]:
    """Column and row of the lane's element [j][h][e]."""
    row = arith.addi(arith.shli(rg.warp(), rg.i32(4)), arith.shrui(rg.lane(), rg.i32(2)))
    column = arith.shli(arith.andi(rg.lane(), rg.i32(3)), rg.i32(1))
    return [rg.index(arith.addi(column, rg.i32(8 * j + e))), rg.index(arith.addi(row, rg.i32(8 * h)))]
