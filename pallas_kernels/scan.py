"""Stage 2 of the forward: the state from chunk to chunk, and the outputs.

    v_new = u - w S        o = qU S + A v_new        S' = Diag(total) S + kD^T v_new

(Kimi Linear, arXiv 2510.26692, section 3; the inputs are those of `prepare`.) The state is kept transposed, S^T [64 values, K], in the
registers of one warpgroup over the whole sequence: every product then has 64 rows, S^T and v_new^T are register operands, and the chain from
chunk to chunk never passes through memory. Warpgroups of one block share all inputs but u.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import fragments as fr
from pallas_kernels.prepare import CHUNK

ROWS = fr.ROWS  # values a warpgroup
f32 = jnp.float32


def _tile(shape: tuple[int, ...], dtype: Any) -> Any:
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def make_scan(
    B: int, T: int, HV: int, K: int, V: int, dtype: Any, *, warpgroups: int, stages: int, has_state: bool, interpret: Any = None
) -> Any:
    """The kernel (qU, kD, w [B HV, T', K], u [B HV, T', V], A [B HV, T', 64], total [B HV, T' / 64, K] float32, state
    [B, HV, K, V] float32 if `has_state`) -> o [B, T, HV, V], final state [B, HV, K, V] float32.

    warpgroups: of 64 values each, in one block; V must be a multiple of their values. stages: chunks in shared memory.
    """
    chunks = pl.cdiv(T, CHUNK)
    stages = min(stages, chunks)
    emulated = interpret is not None

    def kernel(*refs: Any) -> None:
        inputs, (o, final_state), scratch = refs[: 6 + has_state], refs[6 + has_state : 8 + has_state], refs[8 + has_state :]
        (qU, kD, w, u, A, total), initial_state = inputs[:6], inputs[6:]
        qs, ks, ws, us, As, totals, full, free, *bounce = scratch
        wg = lax.axis_index("wg")
        b, h = lax.axis_index("b"), lax.axis_index("h")
        head = b * HV + h
        first_value = lax.axis_index("v") * (ROWS * warpgroups)
        own_values = pl.ds(first_value + wg * ROWS, ROWS)

        def fetch(n: jax.Array | int) -> None:
            s = lax.rem(n, stages)
            rows = pl.ds(n * CHUNK, CHUNK)
            for source, target in ((w, ws), (qU, qs), (kD, ks), (A, As)):
                plgpu.copy_gmem_to_smem(source.at[head, rows], target.at[s], full.at[s])
            for i in range(warpgroups):
                values = pl.ds(first_value + i * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(u.at[head, rows, values], us.at[s, i], full.at[s])
            plgpu.copy_gmem_to_smem(total.at[head, n], totals.at[s], full.at[s])

        def multiply(total: Any, a: jax.Array, b: Any) -> None:
            """total += a b, a in registers."""
            if not emulated:
                plgpu.wgmma(total, a, b)
                return
            buffer = bounce[0 if a.shape[1] == K else -1].at[wg]  # the interpreter knows no register operand
            buffer[...] = a
            plgpu.commit_smem()
            plgpu.wgmma(total, buffer, b)
            plgpu.wgmma_wait(0)

        @pl.when(wg == 0)
        def _() -> None:
            for n in range(stages):
                fetch(n)

        def step(n: jax.Array, S: jax.Array) -> jax.Array:
            s = lax.rem(n, stages)
            plgpu.barrier_wait(full.at[s])
            state = S.astype(dtype)
            decay = plgpu.load(totals.at[s], layout=fr.LAYOUT.reduce(0), optimized=False)
            decayed = S * lax.broadcast_in_dim(decay, (ROWS, K), (1,))

            def products(corrections: Any, outputs: Any, update: Any) -> tuple[jax.Array, jax.Array]:
                multiply(corrections, state, ws.at[s].T)
                multiply(outputs, state, qs.at[s].T)
                values = plgpu.load(us.at[s, wg].T, layout=fr.LAYOUT).astype(f32)
                values = (values - plgpu.wgmma_accumulator_load(corrections, wait_n=1)).astype(dtype)
                multiply(update, values, ks.at[s])
                multiply(outputs, values, As.at[s].T)
                return plgpu.wgmma_accumulator_load(update, wait_n=1), outputs[...]

            accumulator = lambda columns: plgpu.ACC((ROWS, columns), f32)
            added, out = pl.run_scoped(products, accumulator(CHUNK), accumulator(CHUNK), accumulator(K))
            # o takes the place of u
            us.at[s, wg].T[...] = out.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(us.at[s, wg], o.at[b, pl.ds(n * CHUNK, CHUNK), h, own_values])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(free.at[s])

            @pl.when(wg == 0)
            def _() -> None:
                plgpu.barrier_wait(free.at[s])

                @pl.when(n + stages < chunks)
                def _() -> None:
                    fetch(n + stages)

            return decayed + added

        if has_state:
            S = fr.load_transposed(initial_state[0].at[b, h, :, own_values], interpret=emulated)
        else:
            S = plgpu.layout_cast(jnp.zeros((ROWS, K), f32), fr.LAYOUT)
        S = lax.fori_loop(0, chunks, step, S)
        fr.store_transposed(final_state.at[b, h, :, own_values], S, interpret=emulated)
        plgpu.wait_smem_to_gmem(0)

    scratch = [_tile((stages, CHUNK, K), dtype)] * 3
    scratch += [_tile((stages, warpgroups, CHUNK, ROWS), dtype), _tile((stages, CHUNK, CHUNK), dtype), plgpu.SMEM((stages, K), f32)]
    scratch += [plgpu.Barrier(num_arrivals=5 + warpgroups, num_barriers=stages)]
    scratch += [plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)]
    if emulated:
        scratch += [_tile((warpgroups, ROWS, K), dtype), _tile((warpgroups, ROWS, CHUNK), dtype)]
    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((B, T, HV, V), dtype), jax.ShapeDtypeStruct((B, HV, K, V), f32)],
        grid=(V // (ROWS * warpgroups), HV, B),
        grid_names=("v", "h", "b"),
        num_threads=warpgroups,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
