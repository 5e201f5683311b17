"""Stage 3 of the backward: the gradients of one chunk of 64 tokens, from the state before it and the gradient of the
state after it, one warpgroup a chunk, head and 64 key channels.

With U, D, P and A of `prepare`, S and dS from `backward_scan` (dS without the factor `scale`), v_new and dv,

    dq = U (scale S do) + p        dk = D (scale dS v_new) - U (S dv) + p' + t        dbeta = sum_V dv v_new / beta^2
    dg = the sum from a token to the chunk's end of q U (scale S do) - k U (S dv)
       + the sum from the chunk's start to before a token of k D (scale dS v_new) + total sum_V S dS + pairs

p, p', t and `pairs` are what the scores give (`pairs`, whose X and Y are made here: scale do v_new^T and -dv v_new^T).

Raw inputs are normalised and activated on the way, and the gradients are theirs. That of y = r x, r = 1 / sqrt(sum x^2
+ 1e-6), is r (dy - y (y . dy)), whose inner product is over all key channels: the blocks of a chunk and head are a
cluster and exchange their parts.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import fragments as fr
from pallas_kernels import levels as lv
from pallas_kernels import memory
from pallas_kernels import registers as rg
from pallas_kernels.activation import LOG2E
from pallas_kernels.inputs import CHUNK, Marks, Problem, load
from pallas_kernels.memory import tile
from pallas_kernels.pairs import Chunk, Run, add_sums, times, within_run
from pallas_kernels.within import iota, zeros

CHANNELS = rg.ROWS  # key channels of a kernel's block
BLOCK = rg.BLOCK
BLOCKS = CHUNK // BLOCK
DO, V_NEW, DV = range(3)  # among the values
WHOLE_VALUES = 128  # up to which the registers hold a product of the whole chunk, and its addresses, beside the blocks
f32 = jnp.float32


def _product(a: Any, b: Any) -> jax.Array:
    """a b [64, n] of shared memory, in float32."""

    def body(total: Any) -> jax.Array:
        plgpu.wgmma(total, a, b)
        return total[...]

    return pl.run_scoped(body, plgpu.ACC((rg.ROWS, b.shape[1]), f32))


def inner_products(pairs: Iterable[tuple[jax.Array, jax.Array]], interpret: bool) -> jax.Array:
    """[64]: of every row of x with that of y, summed over pairs (x, y) of 16-bit arrays [64, n]."""
    total = zeros(BLOCK)
    for x, y in pairs:
        total = fr.stacked_scores(total, x, x, y, interpret=interpret)
    own = (iota(0, BLOCK) & (BLOCK - 1)) == iota(1, BLOCK)
    return jnp.sum(jnp.where(own, total, zeros(BLOCK)), 1)


def _wide(ref: Any) -> jax.Array:
    return load(ref).astype(f32)


def _columns(x: jax.Array) -> list[jax.Array]:
    return [x[:, start : start + BLOCK] for start in range(0, x.shape[1], BLOCK)]


def make_backward_chunk(problem: Problem, *, scale: float, interpret: Any = None) -> Any:
    """The kernel (q, k [B, T, H, K], g [B, T, HV, K] float32, beta [B, T, HV] float32, do, v_new, dv [B, T, HV, V],
    S, dS [B HV, T / 64, V, K]) -> dq, dk [B, T, HV, K], dg [B, T, HV, K] float32, dbeta [B, T, HV] float32; T a
    multiple of 64, beta not 0. It is exact for every decay, bounded or not.

    With `problem.segments` one more input, marks [B, T] float32. With `problem.raw` three more, A_log [HV] and dt_bias
    [HV, K] float32 and the inverse norms of `prepare`, and three more outputs: what each chunk adds to the gradients of
    A_log (a channel) and of dt_bias, [B, T / 64, HV, K] float32, and the inner products that the blocks exchange, [2, B
    HV, K / 64, T] float32, of no further use. dg then has the dtype of g.
    """
    (B, T, H, K), (HV, V), dtype, raw = problem.q_shape, problem.v_shape[2:], problem.dtype, problem.raw
    parts = K // CHANNELS
    emulated = interpret is not None
    kw = {"interpret": emulated}

    def kernel(*refs: Any) -> None:
        (q, k, g, beta, do, v_new, dv, S, dS), refs = refs[:9], refs[9:]
        marked, refs = refs[: problem.segments], refs[problem.segments :]
        if raw is None:
            dq, dk, dg, dbeta, *scratch = refs
        else:
            A_log, dt_bias, norms, dq, dk, dg, dbeta, dA_log, ddt_bias, exchange, *scratch = refs
        keys, (values, gradients), states, (*gate_tiles, (X, Y)), for_scores, for_keys, for_states, *more = scratch
        for_gate, met = more[: len(gate_tiles)], more[len(gate_tiles) :]
        gates = [x.at[0] for x in gate_tiles]
        qs, ks = (keys.at[i] for i in range(2))
        dos, vs, dvs = (values.at[i] for i in (DO, V_NEW, DV))

        def place(zero: Any = 0) -> tuple[Any, ...]:
            n, b, h, part = (lax.axis_index(name) + zero for name in ("n", "b", "h", "part"))
            return n, b, h, b * HV + h, part, pl.ds(n * CHUNK, CHUNK), pl.ds(part * CHANNELS, CHANNELS)

        n, b, h, head, part, rows, channels = place()
        key_head = lax.div(h, HV // H)
        for source, target in ((do, dos), (v_new, vs), (dv, dvs)):
            plgpu.copy_gmem_to_smem(source.at[b, rows, h], target, for_scores)
        for source, target in ((q, qs), (k, ks)):
            plgpu.copy_gmem_to_smem(source.at[b, rows, key_head, channels], target, for_keys)
        for i, source in enumerate((S, dS)):
            plgpu.copy_gmem_to_smem(source.at[head, n, :, channels], states.at[i], for_states)

        def load_gate() -> None:
            if gate != f32:
                plgpu.copy_gmem_to_smem(g.at[b, rows, h, channels], *gates, *for_gate)

        def log_decay() -> jax.Array:
            """g, or g_raw + dt_bias."""
            if gate == f32:
                x = memory.load_transposed(g.at[b, rows, h, channels], **kw)
            else:
                plgpu.barrier_wait(*for_gate)
                x = _wide(gates[0].T)
            return x if raw is None else x + memory.gather_rows(dt_bias.at[h, channels], iota(0, CHUNK), **kw)

        def at_tokens(x: jax.Array, otherwise: float) -> jax.Array:
            """x [channels, 64] at tokens, `otherwise` at padding and behind the row's end, 0 where a state is reset."""

            def of_eight(first: int) -> jax.Array:  # the numbers of 64 would be kept for next time
                y = x[:, first : first + 8]
                for ref in marked:
                    eight = ref.at[b, pl.ds(n * CHUNK + first, 8)]
                    mark = plgpu.load(eight, layout=rg.LAYOUT.reduce(0), optimized=False)
                    mark = lax.broadcast_in_dim(mark, y.shape, (1,))
                    return jnp.where(mark > 1, y, otherwise * (1 - mark))
                assert raw is not None
                return jnp.where(iota(1, 8) < raw.tokens - n * CHUNK - first, y, jnp.full_like(y, otherwise))

            if not marked and (raw is None or raw.tokens % CHUNK == 0):
                return x
            return jnp.concatenate([of_eight(first) for first in range(0, CHUNK, 8)], 1)

        def await_tokens(barrier: Any, *refs: Any) -> None:
            """Waits for them, and clears what their padding holds."""
            plgpu.barrier_wait(barrier)
            for ref in marked:
                Marks.load(ref.at[b, rows]).clear(*refs, channels=CHANNELS, interpret=emulated)
                plgpu.commit_smem()

        load_gate()
        if raw is None:
            e = at_tokens(jnp.exp2(log_decay() * LOG2E), 1.0)
        else:
            e = at_tokens(raw.activation.decay(log_decay(), jnp.exp(A_log[h]), **kw), 1.0)
            plgpu.commit_smem()  # X takes the place of g
            await_tokens(for_keys, qs, ks)
            for i, x in enumerate((qs, ks)):
                norm = memory.gather_rows(norms.at[head, i, rows], iota(0, CHANNELS), **kw)
                x[...] = (_wide(x) * norm).astype(dtype)

        # 1. gradients of the scores, symmetric, and of beta
        await_tokens(for_scores, dos)
        row, column = iota(0, CHUNK), iota(1, CHUNK)
        lower, upper = _product(dos, vs.T), _product(vs, dos.T)
        lv.store_pairs(X, (jnp.where(row >= column, lower, upper) * scale).astype(dtype), **kw)
        lower, upper = _product(dvs, vs.T), _product(vs, dvs.T)
        lv.store_pairs(Y, (-jnp.where(row >= column, lower, upper)).astype(dtype), **kw)

        @pl.when(part == 0)
        def _() -> None:
            own = jnp.sum(jnp.where(row == column, lower, zeros(CHUNK)), 1)
            own = lax.broadcast_in_dim(own, (rg.ROWS, 8), (0,))
            strength = memory.gather_rows(beta.at[b, rows, h], iota(0, 8), **kw)
            if raw is not None:
                strength = raw.activation.strength(strength)
            own = own / (strength * strength)
            if raw is not None:
                own = raw.activation.strength_gradient(strength, own)
            for ref in marked:
                own = Marks.load(ref.at[b, rows]).keep(own)
            memory.store_rows(dbeta.at[b, rows, h], own, **kw)

        plgpu.commit_smem()

        # 2. pairs in the chunk
        if raw is None:
            await_tokens(for_keys, qs, ks)
        blocks = within_run(_columns(e), 0, Chunk(qs, ks, X, Y, emulated))

        # 3. through the states
        plgpu.barrier_wait(for_states)

        def through(state: int, value: int, key: int, run: Run) -> tuple[jax.Array, jax.Array]:
            """What the product of a state and values adds to the gradient of q or k, and that times q or k."""
            rg.boundary(**kw)
            zero = rg.opaque_zero(**kw)  # addresses again rather than kept
            product = _product(states.at[state + zero].T, values.at[value + zero, run.tokens].T)
            y = run.join("D" if state else "U") * (product * (-1.0 if value == DV else scale))
            return y, times(load(keys.at[key + zero, run.tokens].T), y)

        size = BLOCKS if V <= WHOLE_VALUES else BLOCKS // 2
        runs = [Run(first, blocks[first : first + size]) for first in range(0, BLOCKS, size)]
        dg_blocks, dq_runs, through_S, dk_runs = [x.dg for x in blocks], [], [], []
        for run in runs:
            y, later = through(0, DO, 0, run)
            dq_runs.append((run.join("dq") + y).astype(dtype))
            y, moved = through(0, DV, 1, run)
            through_S.append(run.join("dk") + y)
            for i, x in enumerate(_columns(later + moved), run.first):
                dg_blocks = add_sums(dg_blocks, x, i, True, emulated)
        for run, dk_run in zip(runs, through_S, strict=True):
            y, earlier = through(1, V_NEW, 1, run)
            dk_runs.append((dk_run + y).astype(dtype))
            for i, x in enumerate(_columns(earlier), run.first):
                dg_blocks = add_sums(dg_blocks, x, i, False, emulated)
        rg.boundary(**kw)
        zero = rg.opaque_zero(**kw)
        n, b, h, head, part, rows, channels = place(zero)
        (qs, ks), (Ss, dSs), results = ([x.at[i + zero] for i in range(2)] for x in (keys, states, gradients))
        gates = [x.at[zero] for x in gate_tiles]
        plgpu.commit_smem()
        for target, both in zip(results, (dq_runs, dk_runs), strict=True):
            target.T[...] = jnp.concatenate(both, 1)  # in the place of values
        plgpu.commit_smem()

        def store_keys() -> None:
            for source, target in zip(results, (dq, dk), strict=True):
                plgpu.copy_smem_to_gmem(source, target.at[b, rows, h, channels])

        if raw is None:
            store_keys()
        else:
            load_gate()
            for i, (y, dy) in enumerate(zip((qs, ks), results, strict=True)):
                inner = inner_products([(load(y), load(dy))], emulated)
                inner = lax.broadcast_in_dim(inner, (CHUNK, 8), (0,))
                memory.store_rows(exchange.at[i, head, part, rows], inner, **kw)

        end = lv.block_end(blocks[-1].U, **kw)
        decayed = scale * jnp.concatenate([end] * BLOCKS, 1)
        starts = [pl.ds(start, CHUNK) for start in range(0, V, CHUNK)]
        overlap = inner_products(((load(Ss.at[x].T), load(dSs.at[x].T)) for x in starts), emulated)
        overlap = lax.broadcast_in_dim(overlap, (CHANNELS, CHUNK), (0,))
        dg_chunk = jnp.concatenate(dg_blocks, 1) + decayed * overlap
        if raw is None:
            memory.store_transposed(dg.at[b, rows, h, channels], at_tokens(dg_chunk, 0.0), **kw)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return

        # 4. raw inputs
        dx, dspeed = raw.activation.decay_gradients(log_decay(), jnp.exp(A_log[h]), dg_chunk, **kw)
        dx, dspeed = (at_tokens(x, 0.0) for x in (dx, dspeed))
        if gate == f32:
            memory.store_transposed(dg.at[b, rows, h, channels], dx, **kw)
        for target in gates:
            target.T[...] = dx.astype(gate)
        memory.fence(**kw)
        plgpu.commit_smem()
        plgpu.barrier_arrive(*met)
        sums = [jnp.sum(x, 1) for x in (dspeed, dx)]
        inverse_norms = [memory.gather_rows(norms.at[head, i, rows], iota(0, CHANNELS), **kw) for i in (0, 1)]
        plgpu.barrier_wait(*met)
        memory.fence(**kw)
        for i, (y, dy, norm) in enumerate(zip((qs, ks), results, inverse_norms, strict=True)):
            inner = zeros(CHANNELS)
            for p in range(parts):
                inner += memory.gather_rows(exchange.at[i, head, p, rows], iota(0, CHANNELS), **kw)
            dy[...] = (norm * (_wide(dy) - _wide(y) * inner)).astype(dtype)
        for target, x in zip((dA_log, ddt_bias), sums, strict=True):
            memory.store_rows(target.at[b, n, h, channels], lax.broadcast_in_dim(x, (CHANNELS, 8), (0,)), **kw)
        plgpu.commit_smem()
        for source in gates:
            plgpu.copy_smem_to_gmem(source, dg.at[b, rows, h, channels])
        store_keys()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    gate = jnp.dtype(problem.gate)
    partial = jax.ShapeDtypeStruct((B, T // CHUNK, HV, K), f32)
    grid: dict[str, Any] = {"grid": (T // CHUNK, B, HV, parts), "grid_names": ("n", "b", "h", "part")}
    if raw is not None:
        grid = {name: x[:-1] for name, x in grid.items()} | {"cluster": (parts,), "cluster_names": ("part",)}
    return plgpu.kernel(
        kernel,
        out_type=[
            *[jax.ShapeDtypeStruct((B, T, HV, K), dtype)] * 2,
            jax.ShapeDtypeStruct((B, T, HV, K), gate),
            jax.ShapeDtypeStruct((B, T, HV), f32),
            *[partial] * (0 if raw is None else 2),
            *[jax.ShapeDtypeStruct((2, B * HV, parts, T), f32)] * (raw is not None),
        ],
        **grid,
        scratch_types=[
            tile((2, CHUNK, CHANNELS), dtype, CHANNELS),
            plgpu.RefUnion(tile((3, CHUNK, V), dtype, 64), tile((2, CHUNK, CHANNELS), dtype, CHANNELS)),
            tile((2, V, CHANNELS), dtype, CHANNELS),
            plgpu.RefUnion(
                *[tile((1, CHUNK, CHANNELS), gate, CHANNELS)] * (gate != f32),
                [plgpu.SMEM((CHUNK, CHUNK), dtype)] * 2,
            ),
            plgpu.Barrier(num_arrivals=3),
            *[plgpu.Barrier(num_arrivals=2)] * 2,
            *[plgpu.Barrier()] * (gate != f32),
            *[plgpu.ClusterBarrier(collective_axes=("part",))] * (raw is not None),
        ],
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # all sums stay within a warp
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
