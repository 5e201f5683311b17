"""The forward in one kernel, for shapes with enough sequences and heads to fill the chip.

A block owns a row of the batch and a head. One warpgroup prepares 64 tokens at a time, all that needs no state; one or
two more, with 64 values each, carry the state through them, 16 tokens a step. What passes between them stays in
shared memory, so that global memory sees only the inputs and the outputs.

With U the decay from before a block of 16 tokens to a token, D from a token to the block's end and total the decay
over the block (`within`), a step is

    X = (I + L)^-1 Diag(beta)            v_new = X (v - kU S)
    o = scale (qU S + A v_new)           S' = Diag(total) S + kD^T v_new

(Kimi Linear, arXiv 2510.26692, section 3, with blocks of 16 for its chunks.) The state is kept transposed as in `scan`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import memory
from pallas_kernels import registers as rg
from pallas_kernels.inputs import CHUNK, GROUP, Parameters, Raw, reader
from pallas_kernels.inverse import block_inverse
from pallas_kernels.memory import tile
from pallas_kernels.within import Dense, Exact, decayed, iota, zeros

ROWS, BLOCK = rg.ROWS, rg.BLOCK
BLOCKS = CHUNK // BLOCK
STAGES = 2
PREPARE_REGISTERS, SCAN_REGISTERS = 216, 144  # of three warpgroups; two have room without
f32 = jnp.float32


def make_fused(
    q_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    dtype: Any,
    *,
    scale: float,
    bounded: bool,
    has_state: bool = False,
    raw: Raw | None = None,
    interpret: Any = None,
) -> Any:
    """The kernel (q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K] float32, beta [B, T, HV] float32, with `raw` also
    A_log [HV] and dt_bias [HV, K] float32, with `has_state` a state [B, HV, K, V] float32) -> o [B, T, HV, V], final
    state [B, HV, K, V] float32.

    V must be 64 or 128. bounded: every g >= -5.
    """
    if v_shape[3] not in (ROWS, 2 * ROWS):
        raise ValueError(f"one kernel takes {ROWS} or {2 * ROWS} value channels, got {v_shape[3]}")
    (B, T, H, K), (HV, V) = q_shape, v_shape[2:]
    chunks = pl.cdiv(T, CHUNK)
    warpgroups = V // ROWS  # that scan
    emulated = interpret is not None
    kw = {"interpret": emulated}
    given = 0 if raw is None else 2  # parameters of the decay

    def kernel(q: Any, k: Any, v: Any, g: Any, beta: Any, *refs: Any) -> None:
        decay, (initial_state,) = refs[:given], refs[given : given + 1] if has_state else (None,)
        o, final_state, *scratch = refs[given + has_state :]
        qs, ks, gs, vs, kqs, kDs, As, Xs, totals, bias, os, *barriers_and_bounce = scratch
        bias_loaded, loaded, v_loaded, full, free, *bounce = barriers_and_bounce
        wg, b, h = (lax.axis_index(name) for name in ("wg", "b", "h"))
        key_head = lax.div(h, HV // H)

        def rows(n: jax.Array) -> Any:
            return pl.ds(n * CHUNK, CHUNK)

        @pl.when(wg == warpgroups)
        def prepare() -> None:
            if warpgroups > 1:
                plgpu.set_max_registers(PREPARE_REGISTERS, action="increase")

            def fetch(n: jax.Array) -> None:
                plgpu.copy_gmem_to_smem(g.at[b, rows(n), h], gs, loaded)
                for source, target in ((q, qs), (k, ks)):
                    plgpu.copy_gmem_to_smem(source.at[b, rows(n), key_head], target, loaded)

            fetch(jnp.int32(0))
            parameters = None
            if raw is not None:
                plgpu.copy_gmem_to_smem(decay[1].at[h], bias, bias_loaded)
                parameters = Parameters(jnp.exp(decay[0][h]), bias)
                plgpu.barrier_wait(bias_loaded)

            def step(n: jax.Array, _: None) -> None:
                s = lax.rem(n, STAGES)
                # behind the end keys are zero, and beta only has to be finite
                tokens = jnp.minimum(iota(0, 8) + n * CHUNK, T - 1)
                strength = memory.gather_rows(beta.at[b, :, h], tokens, **kw)
                plgpu.barrier_wait(loaded)

                @pl.when(n >= STAGES)
                def reuse() -> None:
                    plgpu.barrier_wait(free.at[s])

                for i in range(warpgroups):
                    plgpu.copy_gmem_to_smem(v.at[b, rows(n), h, pl.ds(i * ROWS, ROWS)], vs.at[s, i], v_loaded.at[s])
                if raw is not None:
                    strength = raw.activation.strength(strength)
                read = reader(qs, ks, gs, n * CHUNK, raw, parameters)
                within = (Dense if bounded else Exact)(dtype)

                def group(m: jax.Array, own: Any) -> Any:
                    cs = pl.ds(pl.multiple_of(m * GROUP, GROUP), GROUP)
                    q, k, e = read(cs)
                    own, U, D = within.add(own, q, k, e, emulated)
                    for i, x in enumerate((k, q)):
                        memory.store_alternating(kqs.at[s, :, cs], decayed(x, U, dtype), i, **kw)
                    kDs.at[s, :, cs][...] = decayed(k, D, dtype)
                    memory.store_ends(totals.at[s, :, cs], U, **kw)
                    return own

                own = lax.fori_loop(0, K // GROUP, group, within.start())
                plgpu.commit_smem()

                @pl.when(n + 1 < chunks)
                def fetch_next() -> None:
                    fetch(n + 1)

                A, L = within.finish(own, emulated)
                As.at[s][...] = A.astype(dtype)
                X = block_inverse(L, strength, **kw)
                high = X.astype(dtype)
                Xs.at[s, 0][...] = high
                Xs.at[s, 1][...] = (X - high.astype(f32)).astype(dtype)  # with alike keys v_new is a small difference
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[s])

            lax.fori_loop(0, chunks, step, None)
            for n in range(max(chunks - STAGES, 0), chunks):  # so that no arrival is left unseen
                plgpu.barrier_wait(free.at[n % STAGES])

        @pl.when(wg < warpgroups)
        def scan() -> None:
            if warpgroups > 1:
                plgpu.set_max_registers(SCAN_REGISTERS, action="decrease")
            own_values = pl.ds(wg * ROWS, ROWS)

            def multiply(total: Any, a: jax.Array, b: Any) -> None:
                """total += a b, a in registers."""
                if not emulated:
                    plgpu.wgmma(total, a, b)
                    return
                buffer = next(x for x in bounce if x.shape[2] == a.shape[1]).at[wg]
                buffer[...] = a  # the interpreter knows no register operand
                plgpu.commit_smem()
                plgpu.wgmma(total, buffer, b)
                plgpu.wgmma_wait(0)

            def block(t: jax.Array, s: jax.Array, S: jax.Array) -> jax.Array:
                tokens = pl.ds(pl.multiple_of(t * BLOCK, BLOCK), BLOCK)
                decay = plgpu.load(totals.at[s, t], layout=rg.LAYOUT.reduce(0), optimized=False)
                values = plgpu.load(vs.at[s, wg, tokens].T, layout=rg.LAYOUT).astype(f32)
                state, faded = S.astype(dtype), S * lax.broadcast_in_dim(decay, (ROWS, K), (1,))

                def products(both: Any, corrected: Any, update: Any, result: Any) -> tuple[jax.Array, jax.Array]:
                    multiply(both, state, kqs.at[s, pl.ds(pl.multiple_of(2 * t * BLOCK, 2 * BLOCK), 2 * BLOCK)].T)
                    read = both[...]
                    keys, queries = (jnp.concatenate([read[:, i : i + 8], read[:, i + 16 : i + 24]], 1) for i in (0, 8))
                    difference = (values - keys).astype(dtype)
                    for i in (0, 1):
                        multiply(corrected, difference, Xs.at[s, i, tokens].T)
                    new = corrected[...].astype(dtype)
                    if not emulated:  # the interpreter cannot start from a value
                        update[...] = faded
                    multiply(update, new, kDs.at[s, tokens])
                    multiply(result, new, As.at[s, tokens].T)
                    out = (queries + result[...]) * scale
                    return (update[...] + faded if emulated else update[...]), out

                shapes = (2 * BLOCK, BLOCK, K, BLOCK)
                S, out = pl.run_scoped(products, *(plgpu.ACC((ROWS, columns), f32) for columns in shapes))
                os.at[wg, tokens].T[...] = out.astype(dtype)
                return S

            def step(n: jax.Array, S: jax.Array) -> jax.Array:
                s = lax.rem(n, STAGES)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_wait(v_loaded.at[s])
                plgpu.barrier_wait(full.at[s])
                S = lax.fori_loop(0, BLOCKS, lambda t, S: block(t, s, S), S)
                plgpu.commit_smem()
                plgpu.barrier_arrive(free.at[s])
                plgpu.copy_smem_to_gmem(os.at[wg], o.at[b, rows(n), h, own_values])
                return S

            S = memory.load_transposed(initial_state.at[b, h, :, own_values], **kw) if has_state else zeros(K)
            S = lax.fori_loop(0, chunks, step, S)
            memory.store_transposed(final_state.at[b, h, :, own_values], S, **kw)
            plgpu.wait_smem_to_gmem(0)

    scratch = [tile((CHUNK, K), dtype, GROUP)] * 2 + [tile((CHUNK, K), f32 if raw is None else raw.gate, GROUP)]
    scratch += [tile((STAGES, warpgroups, CHUNK, ROWS), dtype, 64)]
    scratch += [tile((STAGES, 2 * CHUNK, K), dtype, GROUP), tile((STAGES, CHUNK, K), dtype, BLOCK)]
    scratch += [tile((STAGES, CHUNK, BLOCK), dtype, BLOCK), tile((STAGES, 2, CHUNK, BLOCK), dtype, BLOCK)]
    scratch += [plgpu.SMEM((STAGES, BLOCKS, K), f32), plgpu.SMEM((K,), f32)]
    scratch += [tile((warpgroups, CHUNK, ROWS), dtype, 64)]
    scratch += [
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=3),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=STAGES),
    ]
    scratch += [plgpu.Barrier(num_barriers=STAGES), plgpu.Barrier(num_arrivals=warpgroups, num_barriers=STAGES)]
    if emulated:
        scratch += [tile((warpgroups, ROWS, K), dtype, GROUP), tile((warpgroups, ROWS, BLOCK), dtype, BLOCK)]
    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(v_shape, dtype), jax.ShapeDtypeStruct((B, HV, K, V), f32)],
        grid=(HV, B),
        grid_names=("h", "b"),
        num_threads=warpgroups + 1,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            approx_math=True,
            reduction_scratch_bytes=0,  # all sums stay within a warp
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
