"""Stage 3 of the backward: the gradients of one chunk of 64 tokens, from the state before it and the gradient of the
state after it, one warpgroup a chunk, head and 64 key channels.

With U, D, P and A of `prepare`, S and dS from `backward_scan` (dS without the factor `scale`), v_new and dv,

    dq = U (scale S do) + p        dk = D (scale dS v_new) - U (S dv) + p' + t        dbeta = sum_V dv v_new / beta^2
    dg = the sum from a token to the chunk's end of q U (scale S do) - k U (S dv)
       + the sum from the chunk's start to before a token of k D (scale dS v_new) + total sum_V S dS + pairs

p, p', t are what the scores give, whose gradients are X = scale do v_new^T (queries with keys, i >= j) and Y = -dv
v_new^T (keys with keys, i > j, the adjoint of the inverse included). Level by level of `levels`, with the decay F of
a token to or from the seam between its run and the other, U in odd runs and D in even ones,

    p = F X (z F), z = q in odd runs and k in even ones        t = F Y (k F)

p belongs to dq in odd runs and to dk in even ones, and every pair adds to dg at the tokens between its two: sums of z
p + k t from a token to the end of its odd run, or from the start of its even run. No pairwise exponential, no factor
above 1, no difference of sums (notation and reasons as in `prepare`; Kimi Linear, arXiv 2510.26692, section 3).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import levels as lv
from pallas_kernels import memory
from pallas_kernels import registers as rg
from pallas_kernels.memory import tile
from pallas_kernels.prepare import CHUNK, LOG2E
from pallas_kernels.within import iota, times, zeros

CHANNELS = rg.ROWS  # key channels of a kernel's block
BLOCK = rg.BLOCK
BLOCKS = CHUNK // BLOCK
f32 = jnp.float32


def _product(a: Any, b: Any) -> jax.Array:
    """a b [64, 64] of shared memory, in float32."""

    def body(total: Any) -> jax.Array:
        plgpu.wgmma(total, a, b)
        return total[...]

    return pl.run_scoped(body, plgpu.ACC((rg.ROWS, rg.ROWS), f32))


class Chunk(NamedTuple):
    """A chunk in shared memory."""

    q: Any  # [64 tokens, 64 channels]
    k: Any
    X: Any  # [64, 64] as `levels.store_pairs` leaves them
    Y: Any

    def load(self, ref: Any, b: int) -> jax.Array:
        """Block b, [64 channels, 16 tokens]. Loaded where it is used: registers are scarce."""
        return plgpu.load(ref.at[pl.ds(b * BLOCK, BLOCK)].T, layout=rg.LAYOUT)


class Block(NamedTuple):
    """What belongs to 16 tokens: arrays [64 channels, 16]."""

    U: jax.Array
    D: jax.Array
    dq: jax.Array
    dk: jax.Array
    dg: jax.Array


def within_block(b: int, e: jax.Array, chunk: Chunk, interpret: bool) -> Block:
    """What the pairs of block b give; e = exp(g)."""
    kw = {"interpret": interpret}
    q, k = chunk.load(chunk.q, b), chunk.load(chunk.k, b)
    X, Y, own = chunk.X, chunk.Y, (b, b)
    U, D, zero = e, zeros(BLOCK) + 1.0, zeros(BLOCK)
    dq, dk, dg = lv.add_product(zero, k, X, *own, 0, **kw), lv.add_product(zero, q, X, *own, 0, **kw), zero
    for s in lv.LEVELS:
        F, z = lv.by_run(s, U, D, **kw), lv.by_run(s, q, k, **kw)
        p = F * lv.add_product(zero, times(z, F), X, *own, s, **kw)
        t = F * lv.add_product(zero, times(k, F), Y, *own, s, **kw)
        dq, dk = lv.by_run(s, dq + p, dq, **kw), dk + lv.by_run(s, t, t + p, **kw)
        dg = lv.add_sums(dg, _between(z, k, p, t), s, **kw)
        grown = F * lv.sibling_end(U, s, **kw)
        U, D = lv.by_run(s, grown, U, **kw), lv.by_run(s, D, grown, **kw)
    return Block(U, D, dq, dk, dg)


def between_runs(blocks: list[Block], n: int, chunk: Chunk, interpret: bool) -> list[Block]:
    """What the pairs of an odd run of n blocks and the even run before it add."""
    kw = {"interpret": interpret}
    odd = [b & n == n for b in range(BLOCKS)]
    F = [x.U if o else x.D for x, o in zip(blocks, odd, strict=True)]

    def k(b: int) -> jax.Array:
        return chunk.load(chunk.k, b)

    def z(b: int) -> jax.Array:
        return chunk.load(chunk.q, b) if odd[b] else k(b)

    zF, kF = ([times(x(b), F[b]) for b in range(BLOCKS)] for x in (z, k))
    out, between = [], []
    for b, x in enumerate(blocks):
        p = t = zeros(BLOCK)
        for c in range(BLOCKS):
            if (b ^ c).bit_length() == n.bit_length():
                p, t = lv.add_product(p, zF[c], chunk.X, c, b, **kw), lv.add_product(t, kF[c], chunk.Y, c, b, **kw)
        p, t = F[b] * p, F[b] * t
        between.append(_between(z(b), k(b), p, t))
        grown = F[b] * lv.block_end(blocks[(b ^ n) | (n - 1)].U, **kw)
        if odd[b]:
            out.append(x._replace(dq=x.dq + p, dk=x.dk + t, U=grown))
        else:
            out.append(x._replace(dk=x.dk + t + p, D=grown))
    dg = add_sums([x.dg for x in out], between, n, odd, interpret)
    return [x._replace(dg=y) for x, y in zip(out, dg, strict=True)]


def _between(z: jax.Array, k: jax.Array, p: jax.Array, t: jax.Array) -> jax.Array:
    """What a token gives to dg at the tokens between it and its partners."""
    return (z.astype(f32) * p + k.astype(f32) * t).astype(jnp.bfloat16)


def add_sums(
    totals: list[jax.Array], x: list[jax.Array], n: int, later: list[bool], interpret: bool
) -> list[jax.Array]:
    """totals of the blocks + sums of x over a run of n blocks: from the token to the run's end in blocks that are
    `later`, else from the run's start to before the token.
    """
    out = []
    for b, total in enumerate(totals):
        total = lv.add_sums(total, x[b], BLOCK, later=later[b], interpret=interpret)
        for c in range(BLOCKS):
            if c // n == b // n and c != b and (c > b) == later[b]:
                total = lv.add_total(total, x[c], interpret=interpret)
        out.append(total)
    return out


def _columns(x: jax.Array) -> list[jax.Array]:
    return [x[:, b * BLOCK : (b + 1) * BLOCK] for b in range(BLOCKS)]


def make_backward_chunk(
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], dtype: Any, *, scale: float, interpret: Any = None
) -> Any:
    """The kernel (q, k [B, T, H, K], g [B, T, HV, K] float32, beta [B, T, HV] float32, do, v_new, dv [B, T, HV, V],
    S, dS [B HV, T / 64, V, K]) -> dq, dk [B, T, HV, K], dg [B, T, HV, K] float32, dbeta [B, T, HV] float32; T a
    multiple of 64, beta not 0.
    """
    (B, T, H, K), (HV, V) = q_shape, v_shape[2:]
    parts = K // CHANNELS
    emulated = interpret is not None
    kw = {"interpret": emulated}

    def kernel(*refs: Any) -> None:
        q, k, g, beta, do, v_new, dv, S, dS, dq, dk, dg, dbeta, *scratch = refs
        qs, ks, values, Ss, dSs, X, Y, zero, for_scores, for_keys, for_states = scratch
        dos, vs, dvs = (values.at[i] for i in range(3))
        n, b, part = (lax.axis_index(name) for name in ("n", "b", "part"))
        h, part = lax.div(part, parts), lax.rem(part, parts)
        rows, channels = pl.ds(n * CHUNK, CHUNK), pl.ds(part * CHANNELS, CHANNELS)
        head, key_head = b * HV + h, lax.div(h, HV // H)
        for source, target in ((do, dos), (v_new, vs), (dv, dvs)):
            plgpu.copy_gmem_to_smem(source.at[b, rows, h], target, for_scores)
        for source, target in ((q, qs), (k, ks)):
            plgpu.copy_gmem_to_smem(source.at[b, rows, key_head, channels], target, for_keys)
        for source, target in ((S, Ss), (dS, dSs)):
            plgpu.copy_gmem_to_smem(source.at[head, n, :, channels], target, for_states)
        zero[0] = 0
        e = jnp.exp2(memory.load_transposed(g.at[b, rows, h, channels], **kw) * LOG2E)

        # 1. gradients of the scores, symmetric, and of beta
        plgpu.barrier_wait(for_scores)
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
            memory.store_rows(dbeta.at[b, rows, h], own / (strength * strength), **kw)

        plgpu.commit_smem()

        # 2. pairs in the chunk
        plgpu.barrier_wait(for_keys)
        chunk = Chunk(qs, ks, X, Y)
        blocks = [within_block(b, x, chunk, emulated) for b, x in enumerate(_columns(e))]
        for run in (1, 2):
            blocks = between_runs(blocks, run, chunk, emulated)

        # 3. through the states
        plgpu.barrier_wait(for_states)
        dos, vs, dvs = (values.at[i + zero[0]] for i in range(3))

        def through(a: Any, b: Any, factor: float, decay: str, x: Any, later: bool) -> list[jax.Array]:
            """decay (factor a b), a block each; what x times that gives to dg is added there."""
            product = _columns(_product(a, b))
            y = [getattr(block, decay) * (z * factor) for block, z in zip(blocks, product, strict=True)]
            moved = [(chunk.load(x, i).astype(f32) * y[i]).astype(jnp.bfloat16) for i in range(BLOCKS)]
            dg_blocks[:] = add_sums(dg_blocks, moved, BLOCKS, [later] * BLOCKS, emulated)
            return y

        dg_blocks = [x.dg for x in blocks]
        y = through(Ss.T, dos.T, scale, "U", qs, True)
        dq_chunk = jnp.concatenate([(x.dq + z).astype(dtype) for x, z in zip(blocks, y, strict=True)], 1)
        y = through(Ss.T, dvs.T, -1.0, "U", ks, True)
        dk_blocks = [x.dk + z for x, z in zip(blocks, y, strict=True)]
        y = through(dSs.T, vs.T, scale, "D", ks, False)
        dk_chunk = jnp.concatenate([(x + z).astype(dtype) for x, z in zip(dk_blocks, y, strict=True)], 1)
        plgpu.commit_smem()
        qs.T[...], ks.T[...] = dq_chunk, dk_chunk
        plgpu.commit_smem()
        for source, target in ((qs, dq), (ks, dk)):
            plgpu.copy_smem_to_gmem(source, target.at[b, rows, h, channels])
        end = lv.block_end(blocks[-1].U, **kw)
        decayed = scale * jnp.concatenate([end] * BLOCKS, 1)
        overlap = zeros(CHUNK)
        for start in range(0, V, CHUNK):
            state, gradient = (plgpu.load(x.at[pl.ds(start, CHUNK)].T, layout=rg.LAYOUT) for x in (Ss, dSs))
            overlap += state.astype(f32) * gradient.astype(f32)
        overlap = lax.broadcast_in_dim(jnp.sum(overlap, 1), (CHANNELS, CHUNK), (0,))
        memory.store_transposed(dg.at[b, rows, h, channels], jnp.concatenate(dg_blocks, 1) + decayed * overlap, **kw)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        kernel,
        out_type=[
            *[jax.ShapeDtypeStruct((B, T, HV, K), dtype)] * 2,
            jax.ShapeDtypeStruct((B, T, HV, K), f32),
            jax.ShapeDtypeStruct((B, T, HV), f32),
        ],
        grid=(T // CHUNK, B, HV * parts),
        grid_names=("n", "b", "part"),
        scratch_types=[
            *[tile((CHUNK, CHANNELS), dtype, CHANNELS)] * 2,
            tile((3, CHUNK, V), dtype, 64),
            *[tile((V, CHANNELS), dtype, CHANNELS)] * 2,
            *[plgpu.SMEM((CHUNK, CHUNK), dtype)] * 2,
            plgpu.SMEM((1,), jnp.int32),
            plgpu.Barrier(num_arrivals=3),
            *[plgpu.Barrier(num_arrivals=2)] * 2,
        ],
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # all sums stay within a warp
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
