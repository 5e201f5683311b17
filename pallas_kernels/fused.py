"""The forward in one kernel, for shapes with enough sequences and heads to fill the chip.

A multiprocessor owns a row of the batch and a head. One warpgroup prepares chunk after chunk, one or two more with 64
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
from pallas_kernels.blocks import ROWS, Prepared, bounce_types, carry, prepare_chunk, prepared_types
from pallas_kernels.inputs import (
    CHUNK,
    COMPILER_PARAMS,
    GROUP,
    Marks,
    Parameters,
    Problem,
    inverse_norms,
    reader,
    within_blocks,
)
from pallas_kernels.memory import tile
from pallas_kernels.within import iota, zeros

STAGES = 2
PREPARE_REGISTERS, CARRY_REGISTERS = 216, 144  # of three warpgroups; two have room without
f32 = jnp.float32


def make_fused(problem: Problem, *, scale: float, has_state: bool = False, interpret: Any = None) -> Any:
    """The kernel (the inputs of the problem, state [B, HV, K, V] float32 if `has_state`) -> o [B, T, HV, V], final
    state [B, HV, K, V] float32; K and V at most 128 (`Config.check`).
    """
    (B, T, H, K), (HV, V), dtype, raw = problem.q_shape, problem.v_shape[2:], problem.dtype, problem.raw
    chunks, half = problem.chunks, K // 2
    warpgroups = V // ROWS  # that carry the state
    emulated = interpret is not None

    def kernel(*refs: Any) -> None:
        (q, k, v, g, beta), marked, decay = problem.split(refs[: problem.arrays])
        refs = refs[problem.arrays :]
        initial_state, (o, final_state, *scratch) = refs[:has_state], refs[has_state:]
        qs, ks, gs, vs, os, bias, kq, kD, A, X, total, *barriers = scratch
        bias_loaded, loaded, v_loaded, full, free, *bounce = barriers
        wg, b, h = (lax.axis_index(name) for name in ("wg", "b", "h"))
        key_head = lax.div(h, HV // H)

        def rows(n: jax.Array) -> Any:
            return pl.ds(n * CHUNK, CHUNK)

        def stage(n: jax.Array) -> tuple[jax.Array, Prepared]:
            s = lax.rem(n, STAGES)
            return s, Prepared(*(x.at[s] for x in (kq, kD, A, X, total)))

        @pl.when(wg == warpgroups)
        def prepare() -> None:
            if warpgroups > 1:
                plgpu.set_max_registers(PREPARE_REGISTERS, action="increase")

            def fetch(n: jax.Array, i: jax.Array) -> None:
                """Half i of the channels of chunk n."""
                channels = pl.ds(pl.multiple_of(i * half, half), half)
                plgpu.copy_gmem_to_smem(g.at[b, rows(n), h, channels], gs.at[i], loaded.at[i])
                for source, target in ((q, qs), (k, ks)):
                    plgpu.copy_gmem_to_smem(source.at[b, rows(n), key_head, channels], target.at[i], loaded.at[i])

            for i in (0, 1):
                fetch(jnp.int32(0), jnp.int32(i))
            if raw is not None:
                plgpu.copy_gmem_to_smem(decay[1].at[h], bias, bias_loaded)
                plgpu.barrier_wait(bias_loaded)

            def step(n: jax.Array, _: None) -> None:
                s, chunk = stage(n)
                # behind the end keys are zero, and beta only has to be finite
                tokens = jnp.minimum(iota(0, 8) + n * CHUNK, T - 1)
                strength = memory.gather_rows(beta.at[b, :, h], tokens, interpret=emulated)
                marks = None if marked is None else Marks.load(marked.at[b, rows(n)])

                def await_half(i: jax.Array | int) -> None:
                    plgpu.barrier_wait(loaded.at[i])
                    if marks is not None:
                        marks.clear(qs.at[i], ks.at[i], channels=GROUP, interpret=emulated)
                        plgpu.commit_smem()

                if raw is not None:  # whose norms are found before the scores
                    for i in (0, 1):
                        await_half(i)
                    strength = raw.activation.strength(strength)
                    speed = jnp.exp(decay[0][h])
                    norms = inverse_norms(qs.at[0], qs.at[1]), inverse_norms(ks.at[0], ks.at[1])
                if marks is not None:
                    strength = marks.keep(strength)
                pl.when(n >= STAGES)(lambda: plgpu.barrier_wait(free.at[s]))
                for i in range(warpgroups):
                    plgpu.copy_gmem_to_smem(v.at[b, rows(n), h, pl.ds(i * ROWS, ROWS)], vs.at[s, i], v_loaded.at[s])

                def read(i: jax.Array) -> Any:
                    if raw is None:
                        await_half(i)
                    parameters = None if raw is None else Parameters(speed, bias.at[pl.ds(i * half, half)], norms)
                    own = qs.at[i], ks.at[i], gs.at[i]
                    return reader(problem, own, n * CHUNK, marks, parameters, interpret=emulated)

                def done(i: jax.Array) -> None:
                    pl.when(n + 1 < chunks)(lambda: fetch(n + 1, i))

                within = within_blocks(problem, marks, interpret=emulated)
                prepare_chunk(read, done, strength, within, chunk, emulated)
                if marks is not None:
                    plgpu.barrier_wait(v_loaded.at[s])
                    marks.clear(*(vs.at[s, i] for i in range(warpgroups)), channels=ROWS, interpret=emulated)
                    plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[s])

            lax.fori_loop(0, chunks, step, None)
            for n in range(max(chunks - STAGES, 0), chunks):  # so that no arrival is left unseen
                plgpu.barrier_wait(free.at[n % STAGES])

        @pl.when(wg < warpgroups)
        def carry_state() -> None:
            if warpgroups > 1:
                plgpu.set_max_registers(CARRY_REGISTERS, action="decrease")
            own_values = pl.ds(wg * ROWS, ROWS)

            def step(n: jax.Array, S: jax.Array) -> jax.Array:
                s, chunk = stage(n)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                if not problem.segments:  # else the values have arrived and padding is cleared
                    plgpu.barrier_wait(v_loaded.at[s])
                plgpu.barrier_wait(full.at[s])
                S = carry(S, chunk, vs.at[s, wg], os.at[wg], scale=scale, bounce=[x.at[wg] for x in bounce])
                plgpu.commit_smem()
                plgpu.barrier_arrive(free.at[s])
                plgpu.copy_smem_to_gmem(os.at[wg], o.at[b, rows(n), h, own_values])
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
        num_threads=warpgroups + 1,
        thread_name="wg",
        scratch_types=[
            *[tile((2, CHUNK, half), dtype, GROUP)] * 2,
            tile((2, CHUNK, half), problem.gate, GROUP),
            tile((STAGES, warpgroups, CHUNK, ROWS), dtype, 64),
            tile((warpgroups, CHUNK, ROWS), dtype, 64),
            plgpu.SMEM((K,), f32),
            *prepared_types(K, dtype, STAGES),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=3, num_barriers=2),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=STAGES),
            *(bounce_types(K, dtype, warpgroups) if emulated else []),
        ],
        compiler_params=COMPILER_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )
