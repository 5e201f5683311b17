"""Stage 2 of the forward: the state from chunk to chunk, and the outputs.

    v_new = u - w S        o = scale (qU S + A v_new)        S' = Diag(total) S + kD^T v_new

(Kimi Linear, arXiv 2510.26692, section 3; the inputs are those of `prepare`.) The state is kept transposed, S^T [64
values, K], in the
registers of one warpgroup over the whole sequence: every product then has 64 rows, S^T and v_new^T are register
operands, and the chain from chunk to chunk never passes through memory. Warpgroups of one block share all inputs but
u; one more warpgroup loads them ahead.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import memory
from pallas_kernels import registers as rg
from pallas_kernels.config import Config
from pallas_kernels.memory import tile
from pallas_kernels.prepare import CHUNK

ROWS = rg.ROWS  # values a warpgroup
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232  # of three warpgroups; two have room without
f32 = jnp.float32


def make_scan(
    B: int,
    T: int,
    HV: int,
    K: int,
    V: int,
    dtype: Any,
    *,
    scale: float,
    config: Config,
    has_state: bool,
    interpret: Any = None,
) -> Any:
    """The kernel (qU, kD, w [B HV, T', K], u [B HV, T', V], A [B HV, T', 64], total [B HV, T' / 64, K] float32, state
    [B, HV, K, V] float32 if `has_state`) -> o [B, T, HV, V], final state [B, HV, K, V] float32.

    V must be a multiple of the values of `config.warpgroups`.
    """
    chunks = pl.cdiv(T, CHUNK)
    warpgroups, stages = config.warpgroups, min(config.stages, chunks)
    emulated = interpret is not None

    def kernel(*refs: Any) -> None:
        inputs, (o, final_state), scratch = (
            refs[: 6 + has_state],
            refs[6 + has_state : 8 + has_state],
            refs[8 + has_state :],
        )
        (qU, kD, w, u, A, total), initial_state = inputs[:6], inputs[6:]
        qs, ks, ws, As, us, totals, os, full, free, *bounce = scratch
        wg = lax.axis_index("wg")
        b, h = lax.axis_index("b"), lax.axis_index("h")
        head = b * HV + h
        first_value = lax.axis_index("v") * (ROWS * warpgroups)
        own_values = pl.ds(first_value + wg * ROWS, ROWS)

        def multiply(total: Any, a: jax.Array, b: Any) -> None:
            """total += a b, a in registers."""
            if not emulated:
                plgpu.wgmma(total, a, b)
                return
            buffer = next(x for x in bounce if x.shape[2] == a.shape[1]).at[
                wg
            ]  # the interpreter knows no register operand
            buffer[...] = a
            plgpu.commit_smem()
            plgpu.wgmma(total, buffer, b)
            plgpu.wgmma_wait(0)

        def store(out: jax.Array, n: jax.Array) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            os.at[wg].T[...] = out
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(os.at[wg], o.at[b, pl.ds(n * CHUNK, CHUNK), h, own_values])

        def step(n: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            S, previous, s = carry
            plgpu.barrier_wait(full.at[s])
            decay = plgpu.load(totals.at[s], layout=rg.LAYOUT.reduce(0), optimized=False)
            # both before the first product: ptxas waits for all products before it touches what one of them has written
            state, decayed = S.astype(dtype), S * lax.broadcast_in_dim(decay, (ROWS, K), (1,))

            def products(corrections: Any, outputs: Any, update: Any) -> tuple[jax.Array, jax.Array]:
                multiply(corrections, state, ws.at[s].T)
                multiply(outputs, state, qs.at[s].T)
                # the chunk before leaves; before the first, out of bounds: a branch would cost the overlap
                store(previous, jnp.where(n == 0, chunks, n - 1))
                values = plgpu.load(us.at[s, wg].T, layout=rg.LAYOUT).astype(f32)
                values = (values - plgpu.wgmma_accumulator_load(corrections, wait_n=1)).astype(dtype)
                # the next state first: the next chunk waits for it
                if not emulated:  # the interpreter cannot start from a value
                    update[...] = decayed
                multiply(update, values, ks.at[s])
                multiply(outputs, values, As.at[s].T)
                S_next = plgpu.wgmma_accumulator_load(update, wait_n=1)
                return decayed + S_next if emulated else S_next, (outputs[...] * scale).astype(dtype)

            def accumulator(columns):
                return plgpu.ACC((ROWS, columns), f32)

            S, out = pl.run_scoped(products, *(accumulator(columns) for columns in (CHUNK, CHUNK, K)))
            plgpu.barrier_arrive(free.at[s])
            return S, out, jnp.where(s == stages - 1, 0, s + 1)

        @pl.when(wg == warpgroups)
        def produce() -> None:
            if warpgroups > 1:
                plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def fetch(n: jax.Array, s: jax.Array) -> jax.Array:
                @pl.when(n >= stages)
                def _() -> None:
                    plgpu.barrier_wait(free.at[s])

                rows = pl.ds(n * CHUNK, CHUNK)
                for source, target in ((w, ws), (qU, qs), (kD, ks), (A, As)):
                    plgpu.copy_gmem_to_smem(source.at[head, rows], target.at[s], full.at[s])
                for i in range(warpgroups):
                    values = pl.ds(first_value + i * ROWS, ROWS)
                    plgpu.copy_gmem_to_smem(u.at[head, rows, values], us.at[s, i], full.at[s])
                plgpu.copy_gmem_to_smem(total.at[head, n], totals.at[s], full.at[s])
                return jnp.where(s == stages - 1, 0, s + 1)

            lax.fori_loop(0, chunks, fetch, jnp.int32(0))
            for n in range(chunks - stages, chunks):  # so that no arrival is left unseen
                plgpu.barrier_wait(free.at[n % stages])

        @pl.when(wg < warpgroups)
        def consume() -> None:
            if warpgroups > 1:
                plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")

            def zeros(columns, dtype):
                return plgpu.layout_cast(jnp.zeros((ROWS, columns), dtype), rg.LAYOUT)

            S = (
                memory.load_transposed(initial_state[0].at[b, h, :, own_values], interpret=emulated)
                if has_state
                else zeros(K, f32)
            )
            S, out, _ = lax.fori_loop(0, chunks, step, (S, zeros(CHUNK, dtype), jnp.int32(0)))
            store(out, jnp.int32(chunks - 1))
            memory.store_transposed(final_state.at[b, h, :, own_values], S, interpret=emulated)
            plgpu.wait_smem_to_gmem(0)

    scratch = [tile((stages, CHUNK, K), dtype, 64)] * 3
    scratch += [tile((stages, CHUNK, CHUNK), dtype, 64), tile((stages, warpgroups, CHUNK, ROWS), dtype, 64)]
    scratch += [plgpu.SMEM((stages, K), f32)]
    scratch += [tile((warpgroups, CHUNK, ROWS), dtype, 64)]
    scratch += [plgpu.Barrier(num_arrivals=5 + warpgroups, num_barriers=stages)]
    scratch += [plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)]
    if emulated:
        scratch += [tile((warpgroups, ROWS, columns), dtype, 64) for columns in {CHUNK, K}]
    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((B, T, HV, V), dtype), jax.ShapeDtypeStruct((B, HV, K, V), f32)],
        grid=(V // (ROWS * warpgroups), HV, B),
        grid_names=("v", "h", "b"),
        num_threads=warpgroups + 1,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
