"""Stage 2 of the backward: the states once more from first to last chunk, and their gradients from last to first, both
in one grid, since neither needs the other.

    forward     v_new = u - w S             S' = Diag(total) S + kD^T v_new                gives S, v_new
    reverse     dv_new = kD dS' + A^T do    dS = Diag(total) dS' + qU^T do - w^T dv_new    gives dS', dv = X^T dv_new

(Kimi Linear, arXiv 2510.26692, section 3; the inputs are those of `prepare`.) dS is carried without the factor
`scale` of the outputs, so that every product adds to what is there. As in `scan`, the state is transposed, [64 values,
K], in the registers of one warpgroup, one more warpgroup loads ahead, and a sequence is a span of chunks.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import memory
from pallas_kernels import registers as rg
from pallas_kernels.config import STAGES
from pallas_kernels.inputs import CHUNK, Marks
from pallas_kernels.memory import tile
from pallas_kernels.scan import REGISTER_KEYS

ROWS = rg.ROWS  # values a warpgroup
MOST_STAGES = 2  # chunks a block holds in shared memory
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232  # of three warpgroups; two have room without
f32 = jnp.float32


def make_backward_scan(
    spans: int,
    v_shape: tuple[int, ...],
    K: int,
    dtype: Any,
    *,
    scale: float,
    warpgroups: int,
    segments: bool = False,
    interpret: Any = None,
) -> Any:
    """The kernel (spans [N, 3] int32, qU, kD, w [B HV, T, K], u [B HV, T, V], A [B HV, T, 64], total [B HV, T / 64, K]
    float32, X^T [B HV, T, 64], do [B, T, HV, V], initial state and gradient of the final state, over `scale`, [N, HV,
    K, V] float32, with `segments` marks [B, T] float32) -> S, dS' [B HV, T / 64, V, K], v_new, dv [B, T, HV, V],
    gradient of the initial state [N, HV, K, V] float32; T a multiple of 64.

    A span is a row of the batch, its first chunk there and its number of chunks; the results of chunks of no span are
    left as they are. S is the state before each chunk, dS' the gradient of that after it, over `scale`; V a multiple of
    64 * warpgroups.
    """
    B, T, HV, V = v_shape
    chunks = T // CHUNK
    stages = min(STAGES[K], MOST_STAGES)
    emulated, wide = interpret is not None, K > REGISTER_KEYS

    def kernel(*refs: Any) -> None:
        (where, qU, kD, w, u, A, total, XT, do, initial, dfinal), refs = refs[:11], refs[11:]
        marked, (S, dS, v_new, dv, dinitial, *scratch) = refs[:segments], refs[segments:]
        qs, ks, ws, As, Xs, values_in, rows_in, state_out, values_out, *barriers = scratch
        full_forward, full_reverse, free, *bounce = barriers
        totals, marks = rows_in.at[:, pl.ds(0, K)], [rows_in.at[:, pl.ds(K, CHUNK)] for _ in marked]
        wg = lax.axis_index("wg")
        span, h = lax.axis_index("s"), lax.axis_index("h")
        b, first_chunk, length = (where[span, i] for i in range(3))
        head = b * HV + h
        first_value = lax.axis_index("v") * (ROWS * warpgroups)
        own_values = pl.ds(first_value + wg * ROWS, ROWS)

        def multiply(total: Any, a: Any, b: Any) -> None:
            """total += a b."""
            if not (emulated and isinstance(a, jax.Array)):
                plgpu.wgmma(total, a, b)
                return
            buffer = next(x for x in bounce if x.shape[2] == a.shape[1]).at[wg]
            buffer[...] = a  # the interpreter knows no register operand
            plgpu.commit_smem()
            plgpu.wgmma(total, buffer, b)
            plgpu.wgmma_wait(0)

        def run(reverse: bool) -> None:
            """One direction over the span's chunks."""
            values, start = (do, dfinal) if reverse else (u, initial)
            states, results, full = (dS, dv, full_reverse) if reverse else (S, v_new, full_forward)
            inputs = [(kD, ks), (w, ws)] + [(qU, qs), (A, As), (XT, Xs)] * reverse

            def place(n: jax.Array) -> jax.Array:
                return first_chunk + (length - 1 - n if reverse else n)

            def put(out: jax.Array, n: jax.Array, wg: jax.Array) -> None:
                """The values of step n; before the first out of bounds, where no other span's are: a branch would cost
                the overlap with the products.
                """
                values_out.at[wg].T[...] = out
                plgpu.commit_smem()
                rows = pl.ds(jnp.where(n < 0, chunks + span, place(n)) * CHUNK, CHUNK)
                plgpu.copy_smem_to_gmem(values_out.at[wg], results.at[b, rows, h, own_values])

            def store(state: jax.Array, previous: jax.Array, n: jax.Array, wg: jax.Array) -> None:
                """The state of step n and the values of the step before."""
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                state_out.at[wg][...] = state
                put(previous, n - 1, wg)
                plgpu.copy_smem_to_gmem(state_out.at[wg], states.at[head, place(n), own_values])

            def step(n: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                Z, previous, s = carry
                plgpu.barrier_wait(full.at[s])
                zero = rg.opaque_zero(interpret=emulated) if wide else 0  # as in `scan`
                s, own = s + zero, wg + zero
                for of_chunks in marks if reverse else ():
                    Marks.load(of_chunks.at[s]).clear(values_in.at[s, own], channels=ROWS, interpret=emulated)
                    plgpu.commit_smem()
                state: Any = Z.astype(dtype)
                if wide:  # the registers do not hold it twice
                    store(state, previous, n, own)
                    state = state_out.at[own]
                decay = plgpu.load(totals.at[s], layout=rg.LAYOUT.reduce(0), optimized=False)
                decayed = Z * lax.broadcast_in_dim(decay, (ROWS, K), (1,))

                def meanwhile() -> None:
                    if not wide:
                        store(state, previous, n, own)

                def backward(corrections: Any, update: Any, outputs: Any) -> tuple[jax.Array, jax.Array]:
                    cotangents = values_in.at[s, own].T
                    plgpu.wgmma(corrections, cotangents, As.at[s])
                    multiply(corrections, state, ks.at[s].T)
                    if not emulated:  # the interpreter cannot start from a value
                        update[...] = decayed
                    plgpu.wgmma(update, cotangents, qs.at[s])
                    meanwhile()
                    exact = -plgpu.wgmma_accumulator_load(corrections, wait_n=1)
                    negative = exact.astype(dtype)
                    multiply(update, negative, ws.at[s])
                    # both halves: with correlated keys dv is a small difference of these
                    multiply(outputs, negative, Xs.at[s].T)
                    multiply(outputs, (exact - negative.astype(f32)).astype(dtype), Xs.at[s].T)
                    Z_next = plgpu.wgmma_accumulator_load(update, wait_n=2)
                    return decayed + Z_next if emulated else Z_next, (outputs[...] * -scale).astype(dtype)

                def forward(corrections: Any, update: Any) -> tuple[jax.Array, jax.Array]:
                    multiply(corrections, state, ws.at[s].T)
                    meanwhile()
                    new = plgpu.load(values_in.at[s, own].T, layout=rg.LAYOUT).astype(f32)
                    new = (new - plgpu.wgmma_accumulator_load(corrections)).astype(dtype)
                    if not emulated:
                        update[...] = decayed
                    multiply(update, new, ks.at[s])
                    Z_next = update[...]
                    return decayed + Z_next if emulated else Z_next, new

                sizes = (CHUNK, K, CHUNK) if reverse else (CHUNK, K)
                accumulators = [plgpu.ACC((ROWS, columns), f32) for columns in sizes]
                Z, out = pl.run_scoped(backward if reverse else forward, *accumulators)
                plgpu.barrier_arrive(free.at[s])
                return Z, out, jnp.where(s == stages - 1, 0, s + 1)

            @pl.when(wg == warpgroups)
            def produce() -> None:
                if warpgroups > 1:
                    plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

                def fetch(n: jax.Array, s: jax.Array) -> None:
                    chunk = place(n)
                    rows = pl.ds(chunk * CHUNK, CHUNK)
                    for source, target in inputs:
                        plgpu.copy_gmem_to_smem(source.at[head, rows], target.at[s], full.at[s])
                    for i in range(warpgroups):
                        columns = pl.ds(first_value + i * ROWS, ROWS)
                        source = values.at[b, rows, h, columns] if reverse else values.at[head, rows, columns]
                        plgpu.copy_gmem_to_smem(source, values_in.at[s, i], full.at[s])
                    plgpu.copy_gmem_to_smem(total.at[head, chunk], totals.at[s], full.at[s])
                    for source, target in zip(marked, marks, strict=True) if reverse else ():
                        plgpu.copy_gmem_to_smem(source.at[b, rows], target.at[s], full.at[s])

                memory.load_ahead(length, free, fetch, stages)

            @pl.when(wg < warpgroups)
            def consume() -> None:
                if warpgroups > 1:
                    plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
                Z = memory.load_transposed(start.at[span, h, :, own_values], interpret=emulated)
                previous = plgpu.layout_cast(jnp.zeros((ROWS, CHUNK), dtype), rg.LAYOUT)
                Z, out, _ = lax.fori_loop(0, length, step, (Z, previous, jnp.int32(0)))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                put(out, length - 1, wg)
                if reverse:
                    memory.store_transposed(dinitial.at[span, h, :, own_values], Z * scale, interpret=emulated)
                plgpu.wait_smem_to_gmem(0)

        reverse = lax.axis_index("direction") == 0  # the longer one first
        pl.when(reverse)(lambda: run(True))
        pl.when(jnp.logical_not(reverse))(lambda: run(False))

    scratch = [tile((stages, CHUNK, K), dtype, 64)] * 3 + [tile((stages, CHUNK, CHUNK), dtype, 64)] * 2
    scratch += [tile((stages, warpgroups, CHUNK, ROWS), dtype, 64), plgpu.SMEM((stages, K + CHUNK * segments), f32)]
    scratch += [tile((warpgroups, ROWS, K), dtype, 64), tile((warpgroups, CHUNK, ROWS), dtype, 64)]
    scratch += [plgpu.Barrier(num_arrivals=n + warpgroups, num_barriers=stages) for n in (3, 6 + segments)]
    scratch += [plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)]
    if emulated:
        scratch += [tile((warpgroups, ROWS, columns), dtype, 64) for columns in sorted({CHUNK, K})]
    states = jax.ShapeDtypeStruct((B * HV, chunks, V, K), dtype)
    values = jax.ShapeDtypeStruct((B, T, HV, V), dtype)
    return plgpu.kernel(
        kernel,
        out_type=[states, states, values, values, jax.ShapeDtypeStruct((spans, HV, K, V), f32)],
        grid=(2, spans, HV, V // (ROWS * warpgroups)),
        grid_names=("direction", "s", "h", "v"),
        num_threads=warpgroups + 1,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
