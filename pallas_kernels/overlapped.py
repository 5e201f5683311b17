"""The forward in one kernel, for few heads: both stages side by side.

A scan of few heads leaves most of the chip idle. Here its blocks, one for a head and 64 values, are the first of the
grid, and those of `prepare` follow chunk by chunk, all heads abreast; the scan reads what they have just written from
L2. Every block is one warpgroup with half of a multiprocessor's shared memory, so that one of each kind fit side by
side.

Blocks of `prepare` count the chunks done, segment by segment, and the scan waits for a segment to be complete. It
waits with its blocks resident, so there must be fewer of them than there is room for: `SCAN_BLOCKS` at most. What is
handed over has places for `RING` chunks of a head, so that L2 holds it and memory never sees it: the blocks of the scan
count, place by place, the chunks they have read, and `prepare` stores a chunk when all have read those before it in its
place. (One count for all places would not tell a block that is ahead from one that is behind.) Earlier chunks wait for
none that begins later, so one of them always goes on.

The scan has no warpgroup that loads ahead. While it works on a chunk, it loads the next in two parts: w, qU and total
when the chunk before has left their places, the others when w and u have left theirs. Arrays [64, K] share five
places, in the order w, qU, kD, chunk after chunk; arrays [64, 64] three, in the order u, A, where the outputs take A's.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import memory, prepare
from pallas_kernels import registers as rg
from pallas_kernels.config import SCAN_BLOCKS
from pallas_kernels.inputs import CHUNK, COMPILER_PARAMS, Problem
from pallas_kernels.memory import tile
from pallas_kernels.scan import ROWS, Operands, Recurrence, bounce_types, store
from pallas_kernels.within import zeros

SEGMENT = 2  # chunks the scan waits for at once: a wait costs it a reading of global memory
RING = 8  # chunks; the last six are being prepared at any time, and those of 32 heads take 19 of L2's 50 MB
WIDE, NARROW = 5, 3  # places in shared memory
f32 = jnp.float32


def make_overlapped(problem: Problem, *, scale: float, has_state: bool = False, interpret: Any = None) -> Any:
    """The kernel (the inputs of the problem, state [B, HV, K, V] float32 if `has_state`) -> o [B, T, HV, V], final
    state [B, HV, K, V] float32, and the results of `prepare` as they were handed over.

    Raises:
      ValueError: B HV V / 64 blocks of the scan are more than `SCAN_BLOCKS`.
    """
    (B, _, HV, V), K, dtype = problem.v_shape, problem.q_shape[3], problem.dtype
    chunks, heads, slices = problem.chunks, B * HV, V // ROWS
    scans, emulated = heads * slices, interpret is not None
    if scans > SCAN_BLOCKS:
        raise ValueError(f"B HV V / {ROWS} must be at most {SCAN_BLOCKS} for the stages to overlap, got {scans}")
    segments = pl.cdiv(chunks, SEGMENT)
    # the interpreter, whose scan comes last, holds all chunks
    ring = chunks if emulated else min(RING, chunks)
    q_shape, v_shape = ((B, ring * CHUNK, *shape[2:]) for shape in (problem.q_shape, problem.v_shape))
    handed_over = problem._replace(q_shape=q_shape, v_shape=v_shape)

    def kernel(*refs: Any) -> None:
        tokens, refs = refs[: problem.arrays], refs[problem.arrays :]
        initial_state, (o, final_state, *operands) = refs[:has_state], refs[has_state:]
        # the interpreter has no semaphores, but runs the blocks in order: there the scan's are the last
        block = lax.axis_index("block") - (heads * chunks if emulated else 0)
        done, read = (
            None if emulated else pl.get_global(plgpu.SemaphoreType.REGULAR(shape))
            for shape in ((heads, segments), (heads, ring))
        )

        def prepare_chunk(*scratch: Any) -> None:
            at = block + (heads * chunks if emulated else -scans)
            n, head = lax.div(at, heads), lax.rem(at, heads)
            slot, earlier = lax.rem(n, ring), lax.div(n, ring)

            def await_slot() -> None:
                if read is not None:
                    plgpu.semaphore_wait(read.at[head, slot], slices * earlier, decrement=False, memory_scope="gpu")
                    memory.fence_copies()

            where = n, lax.rem(head, HV), lax.div(head, HV)
            prepare.run(problem, where, tokens, operands, scratch, emulated, slot, await_slot)
            plgpu.wait_smem_to_gmem(0)
            if done is not None:
                plgpu.semaphore_signal(done.at[head, lax.div(n, SEGMENT)], memory_scope="gpu")

        def await_segment(head: jax.Array, n: jax.Array) -> None:
            """Waits for the segment that begins with chunk n."""
            if done is not None:
                count = jnp.minimum(SEGMENT, chunks - n)
                plgpu.semaphore_wait(done.at[head, lax.div(n, SEGMENT)], count, decrement=False, memory_scope="gpu")
                memory.fence_copies()

        def scan(wide: Any, narrow: Any, totals: Any, early: Any, late: Any, *bounce: Any) -> None:
            head, slice = lax.div(block, slices), lax.rem(block, slices)
            b, h, own_values = lax.div(head, HV), lax.rem(head, HV), pl.ds(slice * ROWS, ROWS)
            qU, kD, w, u, A, total = operands
            recurrence = Recurrence(dtype, scale, bounce=bounce, emulated=emulated)

            def place(n: jax.Array) -> Operands:
                """Of chunk n."""
                three, two = lax.rem(3 * n, WIDE), lax.rem(2 * n, NARROW)
                w, qU, kD = (wide.at[lax.rem(three + i, WIDE)] for i in range(3))
                u, A = (narrow.at[lax.rem(two + i, NARROW)] for i in range(2))
                return Operands(w, qU, kD, u, A, totals.at[lax.rem(n, 2)])

            def load_early(n: jax.Array) -> None:
                """Behind the end the last chunk again: a branch would cost the overlap."""
                to, slot = place(n), lax.rem(jnp.minimum(n, chunks - 1), ring)
                rows = pl.ds(slot * CHUNK, CHUNK)
                plgpu.copy_gmem_to_smem(w.at[head, rows], to.w, early)
                plgpu.copy_gmem_to_smem(qU.at[head, rows], to.qU, early)
                plgpu.copy_gmem_to_smem(total.at[head, slot], to.total, early)

            def load_late(n: jax.Array) -> None:
                to, rows = place(n), pl.ds(lax.rem(jnp.minimum(n, chunks - 1), ring) * CHUNK, CHUNK)
                plgpu.copy_gmem_to_smem(u.at[head, rows, own_values], to.u, late)
                plgpu.copy_gmem_to_smem(kD.at[head, rows], to.kD, late)
                plgpu.copy_gmem_to_smem(A.at[head, rows], to.A, late)

            def put(out: jax.Array, n: jax.Array) -> None:
                """The outputs of chunk n in A's place; before the first out of bounds, for the same reason."""
                rows = pl.ds(jnp.where(n < 0, chunks, n) * CHUNK, CHUNK)
                staging = narrow.at[lax.rem(2 * n + 1 + NARROW, NARROW)]
                store(out, staging, o.at[b, rows, h, own_values])

            def step(n: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                S, previous = carry

                @pl.when((lax.rem(n + 1, SEGMENT) == 0) & (n + 1 < chunks))
                def _() -> None:
                    await_segment(head, n + 1)

                plgpu.barrier_wait(early)
                chunk = place(n)

                def meanwhile() -> None:
                    put(previous, n - 1)
                    load_early(n + 1)

                def values() -> jax.Array:
                    plgpu.barrier_wait(late)
                    return plgpu.load(chunk.u.T, layout=rg.LAYOUT).astype(f32)

                def behind() -> None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the place of the outputs; all warps are here
                    load_late(n + 1)
                    if read is not None:  # all of the chunk has arrived
                        memory.count_up(read.at[head, lax.rem(n, ring)])

                S, out = recurrence.step(S, chunk, values, meanwhile, behind)
                return S, out

            if has_state:
                S = memory.load_transposed(initial_state[0].at[b, h, :, own_values], interpret=emulated)
            else:
                S = zeros(K)
            await_segment(head, jnp.int32(0))
            load_early(jnp.int32(0))
            load_late(jnp.int32(0))
            S, out = lax.fori_loop(0, chunks, step, (S, recurrence.empty()))
            for barrier in (early, late):  # so that no arrival is left unseen
                plgpu.barrier_wait(barrier)
            put(out, jnp.int32(chunks - 1))
            memory.store_transposed(final_state.at[b, h, :, own_values], S, interpret=emulated)
            plgpu.wait_smem_to_gmem(0)

        scratch = [tile((WIDE, CHUNK, K), dtype, 64), tile((NARROW, CHUNK, ROWS), dtype, 64), plgpu.SMEM((2, K), f32)]
        scratch += [plgpu.Barrier(num_arrivals=3)] * 2
        if emulated:
            scratch += bounce_types((CHUNK, K), dtype)
        is_scan = (block >= 0) if emulated else block < scans
        pl.when(is_scan)(lambda: pl.run_scoped(scan, *scratch))
        pl.when(jnp.logical_not(is_scan))(lambda: pl.run_scoped(prepare_chunk, *prepare.scratch_types(problem)))

    return plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct(problem.v_shape, dtype),
            jax.ShapeDtypeStruct((B, HV, K, V), f32),
            *prepare.results(handed_over),
        ],
        grid=(scans + heads * chunks,),
        grid_names=("block",),
        compiler_params=COMPILER_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )
