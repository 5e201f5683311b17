"""The unit lower triangular inverse X = (I + L)^-1 of a chunk, L [64, 64] strictly lower, in registers and in float32
quality.

L arrives as four arrays [64, 16]: L[d] holds for block w (a warp's 16 rows) its block of columns w - d; so d = 0 is
the diagonal. With X_ww of the diagonal blocks by forward substitution, the others follow block column by block
column,

    X_bc = -X_bb sum_{c <= m < b} L_bm X_mc          b > c,

and warp c computes column c. It does so transposed, X_bc^T = -(sum_m X_mc^T L_bm^T) X_bb^T: then a result's registers
are the left operand of the next product as they stand, and L_bm and X_bb the right ones. Every product is three of
bf16 halves, (hi + lo)(hi + lo) without lo lo.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import math as mlir_math

from pallas_kernels import registers as rg
from pallas_kernels.registers import BLOCK, LAYOUT, ROWS, Register

EXCHANGE_SHAPE = (4 * 4 * 2 * 32, 4)  # [warp, distance, hi or lo, lane], a lane's four words of a block
Elements = list[list[list[Register]]]


def inverse_transposed(L: list[jax.Array], exchange: Any, *, interpret: bool) -> list[jax.Array]:
    """X^T as four arrays [64, 16]: array e holds for block c the columns of block c + e (beyond the last block:
    anything finite).

    L: the four arrays of the module's docstring, float32. exchange: int32 shared memory of EXCHANGE_SHAPE.
    """
    if interpret:
        return _twin(L)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,) * 4 + (plgpu.RefType(),), return_type=[rg.array(BLOCK)] * 4)
    def piece(_, l0, l1, l2, l3, exchange):
        x = _substitute(rg.elements(l0), [rg.f32(1.0)] * 2)
        for d, block in enumerate((x, *(rg.elements(l) for l in (l1, l2, l3)))):
            _publish(exchange, d, _halves(block))
        own = [np.array([[_transpose(w) for w in row] for row in half.T], object) for half in _halves(x)]
        utils.warpgroup_barrier()
        column: list[Any] = [own]  # X_mc^T of the blocks m = c, c + 1, ..., halves of words
        results = [[[_whole(own, j, h) for h in (0, 1)] for j in (0, 1)]]
        for e in (1, 2, 3):
            total = _zeros()
            for m in range(e):
                total = _product(total, column[m], _fetch(exchange, e, e - m))
            done = _product(
                _zeros(), _halves([[[arith.negf(v) for v in h] for h in row] for row in total]), _fetch(exchange, e, 0)
            )
            column.append(_halves(done))
            results.append(done)
        return [rg.from_elements(r) for r in results]

    return piece(*L, exchange)


def block_inverse(L: jax.Array, strength: jax.Array, *, interpret: bool) -> jax.Array:
    """(I + L)^-1 Diag(beta) of the four diagonal blocks alone, an array [64, 16] as L, float32.

    strength: [64, 8], the rows' beta in all columns.
    """
    if interpret:
        blocks = L.reshape(4, BLOCK, BLOCK)
        X = jnp.eye(BLOCK, dtype=jnp.float32)[None] * strength[:, :1].reshape(4, 1, BLOCK)
        blocks = jnp.tril(blocks, -1) * strength[:, :1].reshape(4, BLOCK, 1)
        for j in range(BLOCK - 1):
            X = X - blocks[:, :, j : j + 1] * X[:, j : j + 1]
        return X.reshape(ROWS, BLOCK)

    @plgpu.inline_mgpu(arg_types=(LAYOUT, LAYOUT), return_type=rg.array(BLOCK))
    def piece(_, L, strength):
        beta = [half[0] for half in rg.elements(strength)[0]]
        l = [[[arith.mulf(v, beta[h]) for v in half] for h, half in enumerate(row)] for row in rg.elements(L)]
        return rg.from_elements(_substitute(l, beta))

    return piece(L, strength)


def _twin(L: list[jax.Array]) -> list[jax.Array]:
    blocks = [x.reshape(4, BLOCK, BLOCK) for x in L]
    zero = jnp.zeros((BLOCK, BLOCK), jnp.float32)
    dense = jnp.block([[blocks[w - c][w] if c <= w else zero for c in range(4)] for w in range(4)])
    dense = jnp.tril(dense, -1)
    X = jnp.eye(ROWS, dtype=jnp.float32)
    for j in range(ROWS - 1):
        X = X - dense[:, j : j + 1] * X[j : j + 1]

    def at(c, b):
        return X.T[c * BLOCK : (c + 1) * BLOCK, b * BLOCK : (b + 1) * BLOCK] if b < 4 else zero

    return [jnp.concatenate([at(c, c + e) for c in range(4)], 0) for e in range(4)]


# Inside the inline piece: elements are [column // 8][half][column % 2] float32 values, words [column // 8][half]
# pairs of bf16.


def _zeros() -> Elements:
    return [[[rg.f32(0.0)] * 2 for _ in (0, 1)] for _ in (0, 1)]


def _substitute(l: Elements, diagonal: list[Register]) -> Elements:
    """(I + L)^-1 Diag(diagonal) of the warp's own 16 x 16 block: X_i -= L_ij X_j, for j in order and all i > j.
    diagonal: of the lane's two rows.
    """
    lane = rg.lane()
    pair, row = arith.andi(lane, rg.i32(3)), arith.shrui(lane, rg.i32(2))
    quad = arith.andi(lane, rg.i32(28))
    on_diagonal = [
        arith.cmpi(arith.CmpIPredicate.eq, row, arith.addi(arith.addi(pair, pair), rg.i32(e))) for e in (0, 1)
    ]
    zero = rg.f32(0.0)
    x = [
        [[arith.select(here, diagonal[h], zero) for here in on_diagonal] if j == h else [zero] * 2 for h in (0, 1)]
        for j in (0, 1)
    ]
    for j in range(BLOCK - 1):
        half, r = divmod(j, 8)
        source = arith.ori(rg.i32(4 * r), pair)
        above = [[rg.shuffle(x[c][half][e], source) for e in (0, 1)] for c in range(half + 1)]
        source = arith.ori(quad, rg.i32(r // 2))
        for h in range(half, 2):
            if (h, j) == (0, 7):
                continue  # no row of the upper half lies below row 7
            factor = arith.negf(rg.shuffle(l[half][h][r % 2], source))
            for c in range(half + 1):
                x[c][h] = [mlir_math.fma(factor, a, v) for a, v in zip(above[c], x[c][h], strict=True)]
    return x


def _halves(x: Elements) -> tuple[np.ndarray, np.ndarray]:
    """(hi, lo): x = hi + lo to 16 bits, words of two bf16."""
    pack = "cvt.rn.bf16x2.f32 $0, $2, $1;"

    def word(v):
        return llvm.inline_asm(rg.i32_type(), v, pack, "=r,f,f", has_side_effects=False)

    hi, lo = np.empty((2, 2), object), np.empty((2, 2), object)
    for j in (0, 1):
        for h in (0, 1):
            hi[j, h] = word(x[j][h])
            lo[j, h] = word([arith.subf(v, u) for v, u in zip(x[j][h], _unpack(hi[j, h]), strict=True)])
    return hi, lo


def _unpack(word: Register) -> list[Register]:
    low, high = arith.shli(word, rg.i32(16)), arith.andi(word, rg.i32(-65536))
    return [arith.bitcast(ir.F32Type.get(), v) for v in (low, high)]


def _whole(halves: list[np.ndarray], j: int, h: int) -> list[Register]:
    return [arith.addf(hi, lo) for hi, lo in zip(*(_unpack(part[j, h]) for part in halves), strict=True)]


def _transpose(word: Register) -> Register:
    """The warp's 8 x 8 tile, transposed."""
    return llvm.inline_asm(
        rg.i32_type(), [word], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", has_side_effects=True
    )


def _slot(warp: Register, distance: int, part: int) -> Register:
    base = arith.addi(arith.shli(warp, rg.i32(8)), rg.lane())
    return rg.index(arith.addi(base, rg.i32(32 * (2 * distance + part))))


def _publish(exchange: Register, distance: int, halves: tuple[np.ndarray, np.ndarray]) -> None:
    for part, words in enumerate(halves):
        value = vector.from_elements(ir.VectorType.get((4,), rg.i32_type()), list(words.flatten()))
        vector.store(value, exchange, [_slot(rg.warp(), distance, part), rg.index(0)])


def _fetch(exchange: Register, e: int, distance: int) -> tuple[np.ndarray, np.ndarray]:
    """What block c + e (of the four, cyclically) published under `distance`."""
    warp = arith.andi(arith.addi(rg.warp(), rg.i32(e)), rg.i32(3))
    parts = []
    for part in (0, 1):
        value = vector.load(
            ir.VectorType.get((4,), rg.i32_type()), exchange, [_slot(warp, distance, part), rg.index(0)]
        )

        def at(i, value=value):
            return vector.extract(value, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))

        parts.append(np.array([at(i) for i in range(4)], object).reshape(2, 2))
    return parts[0], parts[1]


def _product(total: Elements, a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> Elements:
    """total + a b^T [16, 16], the smallest terms first."""
    c = [row[0] + row[1] for row in total]
    for i, j in ((1, 0), (0, 1), (0, 0)):
        left = [a[i][0, 0], a[i][0, 1], a[i][1, 0], a[i][1, 1]]
        c = [rg.mma(c[n], left, [b[j][0, n], b[j][1, n]], ir.BF16Type.get()) for n in (0, 1)]
    return [[v[:2], v[2:]] for v in c]
