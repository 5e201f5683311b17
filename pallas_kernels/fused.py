"""The forward in one kernel, for shapes with enough sequences and heads to fill the chip.

A multiprocessor owns a row of the batch and a head. Two warpgroups prepare chunk after chunk, one or two more with 64
values each carry the state through them (`blocks`). What passes between them stays in shared memory, so that global
memory sees only the inputs and the outputs.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import memory
from pallas_kernels.blocks import (
    GROUP,
    PREPARERS,
    ROWS,
    Prepared,
    bounce_types,
    carry,
    exchange_types,
    prepare_chunk,
    prepared_types,
)
from pallas_kernels.inputs import CHUNK, COMPILER_PARAMS, Parameters, Problem, inverse_norms, reader
from pallas_kernels.memory import tile
from pallas_kernels.within import iota, zeros

STAGES = 2
PREPARE_REGISTERS, CARRY_REGISTERS = 112, 144  # of four warpgroups; three have room without
f32 = jnp.float32


def make_fused(problem: Problem, *, scale: float, has_state: bool = False, interpret: Any = None) -> Any:
    """The kernel (the inputs of the problem, state [B, HV, K, V] float32 if `has_state`) -> o [B, T, HV, V], final
    state [B, HV, K, V] float32.

    Raises:
      ValueError: V is not 64 or 128.
    """
    (B, T, H, K), (HV, V), dtype, raw = problem.q_shape, problem.v_shape[2:], problem.dtype, problem.raw
    if V not in (ROWS, 2 * ROWS):
        raise ValueError(f"the fused kernel takes {ROWS} or {2 * ROWS} value channels, got {V}")
    chunks = problem.chunks
    warpgroups = V // ROWS  # that carry the state
    emulated = interpret is not None

    def kernel(*refs: Any) -> None:
        (q, k, v, g, beta, *decay), refs = refs[: problem.arrays], refs[problem.arrays :]
        initial_state, (o, final_state, *scratch) = refs[:has_state], refs[has_state:]
        qs, ks, gs, vs, bias, kq, kD, A, X, total, places, met, *barriers = scratch
        bias_loaded, loaded, v_loaded, full, free, *bounce = barriers
        wg, b, h = (lax.axis_index(name) for name in ("wg", "b", "h"))
        key_head = lax.div(h, HV // H)

        def rows(n: jax.Array) -> Any:
            return pl.ds(n * CHUNK, CHUNK)

        def stage(n: jax.Array) -> tuple[jax.Array, Prepared]:
            s = lax.rem(n, STAGES)
            return s, Prepared(*(x.at[s] for x in (kq, kD, A, X, total)))

        @pl.when(wg >= warpgroups)
        def prepare() -> None:
            if warpgroups > 1:
                plgpu.set_max_registers(PREPARE_REGISTERS, action="decrease")
            own = wg - warpgroups

            def fetch(n: jax.Array) -> None:
                plgpu.copy_gmem_to_smem(g.at[b, rows(n), h], gs, loaded)
                for source, target in ((q, qs), (k, ks)):
                    plgpu.copy_gmem_to_smem(source.at[b, rows(n), key_head], target, loaded)

            @pl.when(own == 0)
            def begin() -> None:
                fetch(jnp.int32(0))
                if raw is not None:
                    plgpu.copy_gmem_to_smem(decay[1].at[h], bias, bias_loaded)

            if raw is not None:
                plgpu.barrier_wait(bias_loaded)

            def step(n: jax.Array, _: None) -> None:
                s, chunk = stage(n)
                # behind the end keys are zero, and beta only has to be finite
                tokens = jnp.minimum(iota(0, 8) + n * CHUNK, T - 1)
                strength = memory.gather_rows(beta.at[b, :, h], tokens, interpret=emulated)
                plgpu.barrier_wait(loaded)
                parameters = None
                if raw is not None:
                    strength = raw.activation.strength(strength)
                    norms = inverse_norms(qs, GROUP), inverse_norms(ks, GROUP)
                    parameters = Parameters(jnp.exp(decay[0][h]), bias, norms)
                pl.when(n >= STAGES)(lambda: plgpu.barrier_wait(free.at[s]))

                @pl.when(own == 0)
                def fetch_values() -> None:
                    for i in range(warpgroups):
                        own_values = pl.ds(i * ROWS, ROWS)
                        plgpu.copy_gmem_to_smem(v.at[b, rows(n), h, own_values], vs.at[s, i], v_loaded.at[s])

                def fetch_next() -> None:
                    pl.when(n + 1 < chunks)(lambda: fetch(n + 1))

                read = reader(qs, ks, gs, n * CHUNK, raw, parameters, interpret=emulated)
                exchange = places.at[lax.rem(n, 2)], met
                prepare_chunk(own, read, strength, problem.bounded, chunk, exchange, fetch_next, emulated)
                plgpu.barrier_arrive(full.at[s])

            lax.fori_loop(0, chunks, step, None)
            for n in range(max(chunks - STAGES, 0), chunks):  # so that no arrival is left unseen
                plgpu.barrier_wait(free.at[n % STAGES])

        @pl.when(wg < warpgroups)
        def carry_state() -> None:
            if warpgroups > 1:
                plgpu.set_max_registers(CARRY_REGISTERS, action="increase")
            own_values = pl.ds(wg * ROWS, ROWS)

            def step(n: jax.Array, S: jax.Array) -> jax.Array:
                s, chunk = stage(n)
                plgpu.barrier_wait(v_loaded.at[s])
                plgpu.barrier_wait(full.at[s])
                # the outputs take the place of the values
                S = carry(S, chunk, vs.at[s, wg], scale=scale, bounce=[x.at[wg] for x in bounce])
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(vs.at[s, wg], o.at[b, rows(n), h, own_values])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(free.at[s])
                return S

            S = zeros(K)
            if has_state:
                S = memory.load_transposed(initial_state[0].at[b, h, :, own_values], interpret=emulated)
            S = lax.fori_loop(0, chunks, step, S)
            memory.store_transposed(final_state.at[b, h, :, own_values], S, interpret=emulated)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(problem.v_shape, dtype), jax.ShapeDtypeStruct((B, HV, K, V), f32)],
        grid=(HV, B),
        grid_names=("h", "b"),
        num_threads=warpgroups + PREPARERS,
        thread_name="wg",
        scratch_types=[
            *[tile((CHUNK, K), dtype, GROUP)] * 2,
            tile((CHUNK, K), problem.gate, GROUP),
            tile((STAGES, warpgroups, CHUNK, ROWS), dtype, 64),
            plgpu.SMEM((K,), f32),
            *prepared_types(K, dtype, STAGES),
            *exchange_types(),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=PREPARERS, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=STAGES),
            *(bounce_types(K, dtype, warpgroups) if emulated else []),
        ],
        compiler_params=COMPILER_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )
