"""Stage 2 of the forward: the state from chunk to chunk, and the outputs.

    v_new = u - w S        o = scale (qU S + A v_new)        S' = Diag(total) S + kD^T v_new

(Kimi Linear, arXiv 2510.26692, section 3; the inputs are those of `prepare`.) The state is kept transposed, S^T [64
values, K], in the
registers of one warpgroup over the whole sequence: every product then has 64 rows, S^T and v_new^T are register
operands, and the chain from chunk to chunk never passes through memory. Warpgroups of one block share all inputs but
u; one more warpgroup loads them ahead. Beyond 192 key channels the registers do not hold the state and a copy of it in
16 bits, and the copy passes through shared memory.

A sequence is a span of chunks: a row of the batch, one of the sequences packed into a row, or a piece of a long one.
A span acts on the state before it as an affine map, S -> M S + N; the same loop without outputs gives N as the state
from zero and M, with u = 0, as the state from the identity.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import memory
from pallas_kernels import registers as rg
from pallas_kernels.config import Config
from pallas_kernels.inputs import CHUNK
from pallas_kernels.memory import tile
from pallas_kernels.within import iota, zeros

ROWS = rg.ROWS  # values a warpgroup
REGISTER_KEYS = 192  # channels of the largest state that the registers hold twice, in float32 and in 16 bits
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232  # of three warpgroups; two have room without
f32 = jnp.float32


class Operands(NamedTuple):
    """Of a chunk and a warpgroup's values, in shared memory."""

    w: Any  # [64, K]
    qU: Any
    kD: Any
    u: Any  # [64, ROWS]
    A: Any  # [64, 64]
    total: Any  # [K] float32


class Recurrence(NamedTuple):
    """One chunk after the other, by one warpgroup. bounce: shared memory for left operands that are not in registers,
    [ROWS, K] of a wide state; in the interpreter, which knows no other, also [ROWS, 64].
    """

    dtype: Any
    scale: float
    outputs: bool = True
    bounce: tuple[Any, ...] = ()
    emulated: bool = False

    def operand(self, x: jax.Array) -> Any:
        """x as the left one of a product: in registers, or in shared memory where there is room for it."""
        room = next((room for room in self.bounce if room.shape[1] == x.shape[1]), None)
        if room is None:
            return x
        plgpu.commit_smem()  # every warp has read what was there
        room[...] = x
        plgpu.commit_smem()
        return room

    def multiply(self, total: Any, a: Any, b: Any) -> None:
        """total += a b."""
        plgpu.wgmma(total, a, b)
        if self.emulated:  # its operands share a room
            plgpu.wgmma_wait(0)

    def step(
        self,
        S: jax.Array,
        chunk: Operands,
        values: Callable[[], jax.Array],
        meanwhile: Callable[[], None] = lambda: None,
        behind: Callable[[], None] = lambda: None,
    ) -> tuple[jax.Array, ...]:
        """S^T [ROWS, K] behind the chunk and, with `outputs`, its o^T [ROWS, 64].

        w, qU and total must have arrived; values: waits for the others and gives u^T. meanwhile: done during the first
        products; behind: during the last, when w, u and total are free once all warps are there.
        """
        K = S.shape[1]
        # both before the first product: ptxas waits for all products before it touches what one of them has written
        state = self.operand(S.astype(self.dtype))
        decay = plgpu.load(chunk.total, layout=rg.LAYOUT.reduce(0), optimized=False)
        decayed = S * lax.broadcast_in_dim(decay, (ROWS, K), (1,))
        if K > REGISTER_KEYS:
            rg.boundary(interpret=self.emulated)  # which S itself does not pass: there is no room for it

        def products(corrections: Any, update: Any, *results: Any) -> tuple[jax.Array, ...]:
            self.multiply(corrections, state, chunk.w.T)
            for result in results:
                self.multiply(result, state, chunk.qU.T)
                meanwhile()
            v = values()
            v = v - plgpu.wgmma_accumulator_load(corrections, wait_n=len(results))
            v = self.operand(v.astype(self.dtype))
            # the next state first: the next chunk waits for it
            if not self.emulated:  # the interpreter cannot start from a value
                update[...] = decayed
            self.multiply(update, v, chunk.kD)
            for result in results:
                self.multiply(result, v, chunk.A.T)
            behind()
            S_next = plgpu.wgmma_accumulator_load(update, wait_n=len(results))
            outputs = [(result[...] * self.scale).astype(self.dtype) for result in results]
            return decayed + S_next if self.emulated else S_next, *outputs

        accumulators = [plgpu.ACC((ROWS, columns), f32) for columns in (CHUNK, K, *[CHUNK] * self.outputs)]
        return pl.run_scoped(products, *accumulators)

    def empty(self) -> jax.Array:
        """What stands for the outputs before the first chunk's."""
        return plgpu.layout_cast(jnp.zeros((ROWS, CHUNK), self.dtype), rg.LAYOUT)


def bounce_types(columns: Iterable[int], dtype: Any, *leading: int) -> list[Any]:
    """Of a recurrence's `bounce`."""
    return [tile((*leading, ROWS, c), dtype, 64) for c in sorted(set(columns))]


def store(out: jax.Array, staging: Any, target: Any) -> None:
    """target [64, ROWS] in global memory = out^T, by way of `staging` in shared memory."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staging.T[...] = out
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, target)


def make_scan(
    spans: int,
    o_shape: tuple[int, ...],
    K: int,
    dtype: Any,
    *,
    scale: float,
    config: Config,
    has_state: bool = False,
    outputs: bool = True,
    every: int = 0,
    interpret: Any = None,
) -> Any:
    """The kernel (spans [N, 3] int32, qU, kD, w [B HV, T', K], u [B HV, T', V], A [B HV, T', 64], total [B HV, T' / 64,
    K] float32, state [N, HV, K, V] float32 if `has_state`) -> o [B, T, HV, V], final state [N, HV, K, V] float32; where
    `every` is not 0 also the states behind so many chunks of a row each, and behind its last, [B, n, HV, K, V] float32.

    A span is a row of the batch, its first chunk there and its number of chunks. V must be a multiple of the values of
    `config.warpgroups`. Without `outputs` the result is the spans' affine maps alone, [N | M] as [N, HV, K, V + K]
    float32, and K must be such a multiple too.
    """
    B, T, HV, V = o_shape
    chunks = pl.cdiv(T, CHUNK)
    warpgroups, stages = config.warpgroups, config.stages
    emulated, wide = interpret is not None, K > REGISTER_KEYS
    columns = V if outputs else V + K

    def kernel(where: Any, qU: Any, kD: Any, w: Any, u: Any, A: Any, total: Any, *refs: Any) -> None:
        (initial_state, o), (final_state, *scratch) = (
            (refs[:has_state], refs[has_state : has_state + outputs]),
            refs[has_state + outputs :],
        )
        states, scratch = scratch[: every > 0], scratch[every > 0 :]
        qs, ks, ws, As, us, totals, os, full, free, *bounce = scratch
        wg = lax.axis_index("wg")
        span, h = lax.axis_index("s"), lax.axis_index("h")
        b, first_chunk, length = (where[span, i] for i in range(3))
        head = b * HV + h
        first_value = lax.axis_index("v") * (ROWS * warpgroups)
        own_values = pl.ds(first_value + wg * ROWS, ROWS)

        def recurrence(wg: jax.Array) -> Recurrence:
            return Recurrence(dtype, scale, outputs, tuple(x.at[wg] for x in bounce), emulated)

        def put(out: jax.Array, n: jax.Array) -> None:
            """The outputs of chunk n of the span; before the first out of bounds, where no other span's are: a branch
            would cost the overlap.
            """
            rows = pl.ds(jnp.where(n < 0, chunks + span, first_chunk + n) * CHUNK, CHUNK)
            store(out, os.at[wg], o[0].at[b, rows, h, own_values])

        def step(n: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            S, previous, s = carry
            plgpu.barrier_wait(full.at[s])
            # with one stage no address changes from chunk to chunk: all would be computed, and kept, ahead of the loop
            zero = rg.opaque_zero(interpret=emulated) if wide else 0
            s = s + zero
            chunk = Operands(ws.at[s], qs.at[s], ks.at[s], us.at[s, wg], As.at[s], totals.at[s])

            def values() -> jax.Array:
                u = plgpu.load(chunk.u.T, layout=rg.LAYOUT).astype(f32)
                return u if outputs else jnp.where(first_value < V, u, jnp.zeros_like(u))

            S, *out = recurrence(wg + zero).step(S, chunk, values, meanwhile=lambda: put(previous, n - 1))
            plgpu.barrier_arrive(free.at[s])
            if every:
                done = first_chunk + n

                @pl.when((lax.rem(done + 1, every) == 0) | (done == chunks - 1))
                def _() -> None:
                    place = states[0].at[b, lax.div(done, every), h, :, own_values]
                    memory.store_transposed(place, S, interpret=emulated)

            return S, out[0] if outputs else previous, jnp.where(s == stages - 1, 0, s + 1)

        @pl.when(wg == warpgroups)
        def produce() -> None:
            if warpgroups > 1:
                plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def fetch(n: jax.Array, s: jax.Array) -> None:
                rows = pl.ds((first_chunk + n) * CHUNK, CHUNK)
                for source, target in ((w, ws), (kD, ks), *[(qU, qs), (A, As)] * outputs):
                    plgpu.copy_gmem_to_smem(source.at[head, rows], target.at[s], full.at[s])
                for i in range(warpgroups):
                    values = pl.ds(jnp.minimum(first_value, V - warpgroups * ROWS) + i * ROWS, ROWS)
                    plgpu.copy_gmem_to_smem(u.at[head, rows, values], us.at[s, i], full.at[s])
                plgpu.copy_gmem_to_smem(total.at[head, first_chunk + n], totals.at[s], full.at[s])

            memory.load_ahead(length, free, fetch, stages)

        @pl.when(wg < warpgroups)
        def consume() -> None:
            if warpgroups > 1:
                plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")

            if has_state:
                S = memory.load_transposed(initial_state[0].at[span, h, :, own_values], interpret=emulated)
            else:
                S = zeros(K)
                if not outputs:  # the identity's columns behind those of the values
                    own = iota(0, K) + (first_value + wg * ROWS - V)
                    S = jnp.where(own == iota(1, K), S + 1, S)
            S, out, _ = lax.fori_loop(0, length, step, (S, recurrence(wg).empty(), jnp.int32(0)))
            if outputs:
                put(out, length - 1)
            memory.store_transposed(final_state.at[span, h, :, own_values], S, interpret=emulated)
            plgpu.wait_smem_to_gmem(0)

    out_type = [jax.ShapeDtypeStruct(o_shape, dtype)] * outputs
    out_type += [jax.ShapeDtypeStruct((spans, HV, K, columns), f32)]
    if every:
        out_type += [jax.ShapeDtypeStruct((B, pl.cdiv(chunks, every), HV, K, V), f32)]
    scratch = [tile((stages, CHUNK, K), dtype, 64)] * 3
    scratch += [tile((stages, CHUNK, CHUNK), dtype, 64), tile((stages, warpgroups, CHUNK, ROWS), dtype, 64)]
    scratch += [plgpu.SMEM((stages, K), f32)]
    scratch += [tile((warpgroups, CHUNK, ROWS), dtype, 64)]
    scratch += [plgpu.Barrier(num_arrivals=3 + 2 * outputs + warpgroups, num_barriers=stages)]
    scratch += [plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)]
    scratch += bounce_types((CHUNK, K) if emulated else (K,) * wide, dtype, warpgroups)
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(columns // (ROWS * warpgroups), HV, spans),
        grid_names=("v", "h", "s"),
        num_threads=warpgroups + 1,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
