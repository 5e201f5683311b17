"""Stage 1 of the forward: everything in a chunk of 64 tokens that needs no state, one warpgroup a chunk and head.

With P_ij = exp(sum_{j < s <= i} g_s) a channel, the decay from token j to token i,

    A_ij = sum_d q_i k_j P_ij   (i >= j)            L_ij = beta_i sum_d k_i k_j P_ij   (i > j)
    X = (I + L)^-1 Diag(beta)
    U_i = decay from before the chunk to i           D_i = decay from i to the chunk's end
    qU = q U      kD = k D      w = X (k U)      u = X v      total = U of the last token

(Kimi Linear, arXiv 2510.26692, section 3; X is its T.) The next stage needs only qU, kD, w, u, A and total.

Raw inputs are normalised and activated on the way, as `kda_jax.kda_raw` says.

No sum of g is formed: exp(g) is taken once, and every decay is a product of such. Inside blocks of 16 tokens, a
warp's rows, `within` gives the scores; between the four blocks the factor is (U_i of i's block) (ends of the blocks
between) (D_j of j's block), each at most 1.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import fragments as fr
from pallas_kernels import memory
from pallas_kernels import registers as rg
from pallas_kernels.inputs import (
    CHUNK,
    COMPILER_PARAMS,
    GROUP,
    Marks,
    Parameters,
    Problem,
    Reader,
    inverse_norms,
    reader,
    within_blocks,
)
from pallas_kernels.inverse import EXCHANGE_SHAPE, inverse_transposed
from pallas_kernels.memory import tile
from pallas_kernels.within import Dense, Exact, decayed, iota, zeros

f32, i32 = jnp.float32, jnp.int32
# rows of the table of the blocks' last U: four of ones, the four blocks, four of ones; then the same four decayed
# over the whole chunk. The first row is never read as one: it has dt_bias.
BIAS, BEFORE, AFTER, WHOLE, TABLE = 0, 4, 8, 12, 16


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
    kU: Any
    ends: Any  # [TABLE, K] float32
    operand: Any  # [2, 64, GROUP]


def scores(tiles: Tiles, read: Reader, within: Exact | Dense, interpret: bool) -> tuple[Any, ...]:
    """Products of queries and of keys with keys: within a block (two arrays [64, 16]), and for distances 1 to 3
    between blocks.

    On the way q becomes qU and k becomes kD; k U and the chunk's last U are written. read: q, k and exp(g) of a group
    of channels.
    """
    dtype, K = tiles.k.dtype, tiles.kU.shape[1]
    kw = {"interpret": interpret}

    def group(m: jax.Array, totals: Any) -> Any:
        own, between = totals
        cs = pl.ds(pl.multiple_of(m * GROUP, GROUP), GROUP)
        operand, ends = tiles.operand.at[lax.rem(m, 2)], tiles.ends
        q, k, decay = read(cs)
        # 1. in blocks
        own, U, D = within.add(own, q, k, decay, interpret)
        # 2. between blocks: keys decayed to the end of their block meet rows decayed from there
        fr.store_operand(operand, decayed(k, D, dtype), **kw)
        memory.store_ends(ends.at[pl.ds(BEFORE, 4), cs], U, **kw)
        plgpu.commit_smem()

        def end(offset):
            return memory.load_ends(ends.at[:, cs], BEFORE + offset, **kw)

        queries, keys = decayed(q, U, dtype), decayed(k, U, dtype)
        last, last_two = end(-1), end(-1) * end(-2)
        pairs = [
            fr.block_scores(total, queries, keys, operand, distance, between_blocks, **kw)
            for distance, total, between_blocks in zip((1, 2, 3), between, (None, last, last_two), strict=True)
        ]
        U = U * (last_two * end(-3))
        # 3. decays over the whole chunk
        D = D * (end(1) * end(2) * end(3))
        memory.store_ends(ends.at[pl.ds(WHOLE, 4), cs], U, **kw)
        tiles.kU.at[:, cs][...] = (k * U).astype(dtype)
        tiles.q.at[:, cs][...] = (q * U).astype(dtype)
        tiles.k.at[:, cs][...] = (k * D).astype(dtype)
        return own, tuple(pairs)

    start = within.start(), ((zeros(rg.BLOCK),) * 2,) * 3
    own, between = lax.fori_loop(0, K // GROUP, group, start)
    return within.finish(own, interpret), between


def results(problem: Problem, inverse: bool = False) -> list[jax.ShapeDtypeStruct]:
    """qU, kD, w [B HV, T', K], u [B HV, T', V], A [B HV, T', 64], total [B HV, T' / 64, K] float32, with `inverse` also
    X^T [B HV, T', 64], and of raw inputs the inverse norms of q and k, [B HV, 2, T'] float32; T' = 64 ceil(T / 64).
    """
    (B, _, HV, V), K, padded = problem.v_shape, problem.q_shape[3], problem.chunks * CHUNK

    def shape(*s: int, dtype: Any = problem.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((B * HV, *s), dtype)

    by_token = [shape(padded, columns) for columns in (K, K, K, V, CHUNK)]
    norms = [shape(2, padded, dtype=f32)] * (inverse and problem.raw is not None)
    return [*by_token, shape(problem.chunks, K, dtype=f32), *[shape(padded, CHUNK)] * inverse, *norms]


def scratch_types(problem: Problem) -> list[Any]:
    """The shared memory and barriers of `run`."""
    K, V, dtype = problem.q_shape[3], problem.v_shape[3], problem.dtype
    return [
        *[tile((CHUNK, K), dtype, GROUP)] * 3,
        plgpu.RefUnion(
            tile((CHUNK, K), problem.gate, GROUP), [tile((CHUNK, V), dtype, GROUP), plgpu.SMEM(EXCHANGE_SHAPE, i32)]
        ),
        *[tile((CHUNK, CHUNK), dtype, GROUP)] * 2,
        plgpu.SMEM((TABLE, K), f32),
        plgpu.RefUnion(plgpu.SMEM((2, CHUNK, GROUP), dtype), tile((CHUNK, CHUNK), dtype, GROUP)),
        plgpu.Barrier(num_arrivals=3 + (problem.raw is not None)),
        plgpu.Barrier(),
    ]


def run(
    problem: Problem,
    place: tuple[Any, Any, Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    scratch: Sequence[Any],
    emulated: bool,
    slot: Any = None,
    await_slot: Callable[[], None] = lambda: None,
) -> None:
    """One chunk, of place (chunk, value head, row of the batch), from and to global memory. The stores are on their way
    at the end. slot: the chunk's place in the outputs, by default its own; await_slot: called before the first store.
    """
    (_, T, H, _), HV, dtype, raw = problem.q_shape, problem.v_shape[2], problem.dtype, problem.raw
    n, h, b = place
    (q, k, v, g, beta), marked, parameters = problem.split(inputs)
    qU, kD, w, u, A, total, *inverses = outputs
    XT, norms_out = inverses[:1], inverses[1:]
    qs, ks, kUs, gs_vs, As, Xs, ends, operands, loaded, v_loaded = scratch
    gs, (vs, exchange) = gs_vs
    operand, X_rest = operands
    slot = n if slot is None else slot
    rows, rows_out = (pl.ds(chunk * CHUNK, CHUNK) for chunk in (n, slot))
    head = b * HV + h

    key_head = lax.div(h, HV // H)
    for source, target in ((g.at[b, rows, h], gs), (q.at[b, rows, key_head], qs), (k.at[b, rows, key_head], ks)):
        plgpu.copy_gmem_to_smem(source, target, loaded)
    if raw is not None:
        plgpu.copy_gmem_to_smem(parameters[1].at[h], ends.at[BIAS], loaded)
    tokens = jnp.minimum(
        iota(0, rg.BLOCK) + n * CHUNK, T - 1
    )  # behind the end keys are zero, and beta only has to be finite
    beta_rows = memory.gather_rows(beta.at[b, :, h], tokens, interpret=emulated)
    marks = None if marked is None else Marks.load(marked.at[b, rows])
    for start in (BIAS + 1, AFTER):
        memory.fill(ends.at[pl.ds(start, 4)], 1.0, interpret=emulated)
    plgpu.commit_smem()
    plgpu.barrier_wait(loaded)
    if marks is not None:
        marks.clear(qs, ks, channels=GROUP, interpret=emulated)
        plgpu.commit_smem()

    given = None
    if raw is not None:
        beta_rows = raw.activation.strength(beta_rows)
        given = Parameters(jnp.exp(parameters[0][h]), ends.at[BIAS], (inverse_norms(qs), inverse_norms(ks)))
        for target in norms_out:
            for i, norm in enumerate(given.norms):
                memory.store_rows(target.at[head, i, rows_out], norm, interpret=emulated)
    if marks is not None:
        beta_rows = marks.keep(beta_rows)
    read = reader(problem, (qs, ks, gs), n * CHUNK, marks, given, interpret=emulated)
    tiles = Tiles(qs, ks, kUs, ends, operand)
    within = within_blocks(problem, marks, interpret=emulated)
    (q_own, k_own), between = scores(tiles, read, within, emulated)
    plgpu.commit_smem()
    # 4. v takes the place of g
    plgpu.copy_gmem_to_smem(v.at[b, rows, h], vs, v_loaded)
    await_slot()
    plgpu.copy_smem_to_gmem(qs, qU.at[head, rows_out])
    plgpu.copy_smem_to_gmem(ks, kD.at[head, rows_out])
    plgpu.copy_smem_to_gmem(ends.at[TABLE - 1], total.at[head, slot])
    block = iota(0, rg.BLOCK) >> 4
    by_distance = [q_own, *(x for x, _ in between)]
    columns = [_choose(block, {c + d: by_distance[d] for d in range(4 - c)}) for c in range(4)]
    As[...] = jnp.concatenate(columns, 1).astype(dtype)
    # 5. X, transposed
    L = [x * beta_rows for x in (k_own, *(x for _, x in between))]
    X = inverse_transposed(L, exchange, interpret=emulated)
    columns = [_choose(block, {c - e: X[e] for e in range(c + 1)}) * beta_rows for c in range(4)]
    X_chunk = jnp.concatenate(columns, 1)
    Xs[...] = high = X_chunk.astype(dtype)
    X_rest[...] = (X_chunk - high.astype(f32)).astype(dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(As, A.at[head, rows_out])
    for target in XT:
        plgpu.copy_smem_to_gmem(Xs, target.at[head, rows_out])

    # 6. w = X (k U), u = X v
    def product(operand: Any) -> jax.Array:
        def body(total: Any) -> jax.Array:
            for x in (Xs, X_rest):  # with alike keys w is a small difference of k U
                plgpu.wgmma(total, x.T, operand)
            return total[...]

        return pl.run_scoped(body, plgpu.ACC((CHUNK, operand.shape[1]), f32)).astype(dtype)

    plgpu.barrier_wait(v_loaded)
    if marks is not None:
        marks.clear(vs, channels=GROUP, interpret=emulated)
    for chunk, target in ((kUs, w), (vs, u)):
        result = product(chunk)
        plgpu.commit_smem()  # every warp has read its operand
        chunk[...] = result
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(chunk, target.at[head, rows_out])


def make_prepare(problem: Problem, *, inverse: bool = False, interpret: Any = None) -> Any:
    """The kernel of all chunks, from the inputs of the problem to `results`."""
    outputs = results(problem, inverse)

    def kernel(*refs: Any) -> None:
        place = lax.axis_index("n"), lax.axis_index("h"), lax.axis_index("b")
        inputs, rest = refs[: problem.arrays], refs[problem.arrays :]
        run(problem, place, inputs, rest[: len(outputs)], rest[len(outputs) :], interpret is not None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    B, _, HV, _ = problem.v_shape
    return plgpu.kernel(
        kernel,
        out_type=outputs,
        grid=(problem.chunks, HV, B),
        grid_names=("n", "h", "b"),
        scratch_types=scratch_types(problem),
        compiler_params=COMPILER_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )
