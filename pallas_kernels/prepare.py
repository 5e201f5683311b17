"""Stage 1 of the forward: everything in a chunk of 64 tokens that needs no state, one warpgroup a chunk and head.

With P_ij = exp(sum_{j < s <= i} g_s) a channel, the decay from token j to token i,

    A_ij = sum_d q_i k_j P_ij   (i >= j)            L_ij = beta_i sum_d k_i k_j P_ij   (i > j)
    X = (I + L)^-1 Diag(beta)
    U_i = decay from before the chunk to i           D_i = decay from i to the chunk's end
    qU = q U      kD = k D      w = X (k U)      u = X v      total = U of the last token

(Kimi Linear, arXiv 2510.26692, section 3; X is its T.) The next stage needs only qU, kD, w, u, A and total.

No sum of g is formed: exp(g) is taken once, and every decay is a product of such. Inside blocks of 16 tokens, a
warp's rows, `within` gives the scores; between the four blocks the factor is (U_i of i's block) (ends of the blocks
between) (D_j of j's block), each at most 1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import fragments as fr
from pallas_kernels import memory
from pallas_kernels import registers as rg
from pallas_kernels.inverse import EXCHANGE_SHAPE, inverse_transposed
from pallas_kernels.memory import tile
from pallas_kernels.within import Dense, Exact, iota, times, zeros

CHUNK = rg.ROWS
GROUP = 32  # channels a pass over the scores: what the registers hold
LOG2E = 1.4426950408889634
f32, i32 = jnp.float32, jnp.int32
# rows of the table of the blocks' last U: four of ones, the four blocks, four of ones; then the same four decayed
# over the whole chunk
BEFORE, AFTER, WHOLE, TABLE = 4, 8, 12, 16


def _load(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=rg.LAYOUT)


def _choose(index: jax.Array, options: dict[int, jax.Array]) -> jax.Array:
    """options[index], 0 where there is none."""
    out = zeros(rg.BLOCK)
    for i, option in options.items():
        out = jnp.where(index == i, option, out)
    return out


class Tiles(NamedTuple):
    """A chunk in shared memory."""

    q: Any  # [64, K], becomes qU
    k: Any  # becomes kD
    g: Any
    kU: Any
    ends: Any  # [TABLE, K] float32
    operand: Any  # [2, 64, GROUP]


def scores(tiles: Tiles, within: Exact | Dense, interpret: bool) -> tuple[Any, ...]:
    """Products of queries and of keys with keys: within a block (two arrays [64, 16]), and for distances 1 to 3
    between blocks.

    On the way q becomes qU and k becomes kD; k U and the chunk's last U are written.
    """
    dtype, K = tiles.k.dtype, tiles.kU.shape[1]
    kw = {"interpret": interpret}

    def group(m: jax.Array, totals: Any) -> Any:
        own, between = totals
        cs = pl.ds(pl.multiple_of(m * GROUP, GROUP), GROUP)
        operand, ends = tiles.operand.at[lax.rem(m, 2)], tiles.ends
        q, k = _load(tiles.q.at[:, cs]), _load(tiles.k.at[:, cs])
        # 1. in blocks
        own, U, D = within.add(own, q, k, jnp.exp2(_load(tiles.g.at[:, cs]) * LOG2E), interpret)
        # 2. between blocks: keys decayed to the end of their block meet rows decayed from there
        fr.store_operand(operand, times(k, D), **kw)
        memory.store_ends(ends.at[pl.ds(BEFORE, 4), cs], U, **kw)
        plgpu.commit_smem()

        def end(offset):
            return memory.load_ends(ends.at[:, cs], BEFORE + offset, **kw)

        pairs = []
        for distance, total in zip((1, 2, 3), between, strict=True):
            pairs.append(fr.block_scores(total, times(q, U), times(k, U), operand, distance, **kw))
            U = U * end(-distance)
        # 3. decays over the whole chunk
        D = D * (end(1) * end(2) * end(3))
        memory.store_ends(ends.at[pl.ds(WHOLE, 4), cs], U, **kw)
        q, k = q.astype(f32), k.astype(f32)
        tiles.kU.at[:, cs][...] = (k * U).astype(dtype)
        tiles.q.at[:, cs][...] = (q * U).astype(dtype)
        tiles.k.at[:, cs][...] = (k * D).astype(dtype)
        return own, tuple(pairs)

    start = within.start(), ((zeros(rg.BLOCK),) * 2,) * 3
    own, between = lax.fori_loop(0, K // GROUP, group, start)
    return within.finish(own, interpret), between


def make_prepare(
    q_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    dtype: Any,
    *,
    bounded: bool,
    inverse: bool = False,
    interpret: Any = None,
) -> Any:
    """The kernel (q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K] float32, beta [B, T, HV] float32) -> qU, kD, w
    [B HV, T', K], u [B HV, T', V], A [B HV, T', 64], total [B HV, T' / 64, K] float32, with `inverse` also X^T
    [B HV, T', 64]; T' = 64 ceil(T / 64).

    bounded: every g >= -5.
    """
    (B, T, H, K), (HV, V) = q_shape, v_shape[2:]
    chunks = pl.cdiv(T, CHUNK)
    emulated = interpret is not None

    def kernel(
        q: Any, k: Any, v: Any, g: Any, beta: Any, qU: Any, kD: Any, w: Any, u: Any, A: Any, total: Any, *more: Any
    ) -> None:
        XT, (qs, ks, kUs, gs_vs, As, Xs, ends, operand, loaded, v_loaded) = more[:inverse], more[inverse:]
        gs, (vs, exchange) = gs_vs
        n, h, b = (lax.axis_index(name) for name in ("n", "h", "b"))
        rows = pl.ds(n * CHUNK, CHUNK)
        head = b * HV + h

        key_head = lax.div(h, HV // H)
        for source, target in ((g.at[b, rows, h], gs), (q.at[b, rows, key_head], qs), (k.at[b, rows, key_head], ks)):
            plgpu.copy_gmem_to_smem(source, target, loaded)
        tokens = jnp.minimum(
            iota(0, rg.BLOCK) + n * CHUNK, T - 1
        )  # behind the end keys are zero, and beta only has to be finite
        beta_rows = memory.gather_rows(beta.at[b, :, h], tokens, interpret=emulated)
        for start in (0, AFTER):
            memory.fill(ends.at[pl.ds(start, 4)], 1.0, interpret=emulated)
        plgpu.commit_smem()
        plgpu.barrier_wait(loaded)

        tiles = Tiles(qs, ks, gs, kUs, ends, operand)
        (q_own, k_own), between = scores(tiles, Dense() if bounded else Exact(), emulated)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(qs, qU.at[head, rows])
        plgpu.copy_smem_to_gmem(ks, kD.at[head, rows])
        # 4. v takes the place of g
        plgpu.copy_gmem_to_smem(v.at[b, rows, h], vs, v_loaded)
        plgpu.copy_smem_to_gmem(ends.at[TABLE - 1], total.at[head, n])
        block = iota(0, rg.BLOCK) >> 4
        by_distance = [q_own, *(x for x, _ in between)]
        columns = [_choose(block, {c + d: by_distance[d] for d in range(4 - c)}) for c in range(4)]
        As[...] = jnp.concatenate(columns, 1).astype(dtype)
        # 5. X, transposed
        L = [x * beta_rows for x in (k_own, *(x for _, x in between))]
        X = inverse_transposed(L, exchange, interpret=emulated)
        columns = [_choose(block, {c - e: X[e] for e in range(c + 1)}) * beta_rows for c in range(4)]
        Xs[...] = jnp.concatenate(columns, 1).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(As, A.at[head, rows])
        for target in XT:
            plgpu.copy_smem_to_gmem(Xs, target.at[head, rows])

        # 6. w = X (k U), u = X v
        def product(operand: Any) -> jax.Array:
            def body(total: Any) -> jax.Array:
                plgpu.wgmma(total, Xs.T, operand)
                return total[...]

            return pl.run_scoped(body, plgpu.ACC((CHUNK, operand.shape[1]), f32)).astype(dtype)

        w_chunk = product(kUs)
        plgpu.barrier_wait(v_loaded)
        u_chunk = product(vs)
        plgpu.commit_smem()
        kUs[...], vs[...] = w_chunk, u_chunk
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(kUs, w.at[head, rows])
        plgpu.copy_smem_to_gmem(vs, u.at[head, rows])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    N, padded = B * HV, chunks * CHUNK

    def shape(*s, dtype=dtype):
        return jax.ShapeDtypeStruct((N, *s), dtype)

    return plgpu.kernel(
        kernel,
        out_type=[shape(padded, K)] * 3
        + [shape(padded, V), shape(padded, CHUNK), shape(chunks, K, dtype=f32)]
        + [shape(padded, CHUNK)] * inverse,
        grid=(chunks, HV, B),
        grid_names=("n", "h", "b"),
        scratch_types=[
            *[tile((CHUNK, K), dtype, GROUP)] * 3,
            plgpu.RefUnion(
                tile((CHUNK, K), f32, GROUP), [tile((CHUNK, V), dtype, GROUP), plgpu.SMEM(EXCHANGE_SHAPE, i32)]
            ),
            *[tile((CHUNK, CHUNK), dtype, GROUP)] * 2,
            plgpu.SMEM((TABLE, K), f32),
            plgpu.SMEM((2, CHUNK, GROUP), dtype),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(),
        ],
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
