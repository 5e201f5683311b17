"""Pairs of tokens level by level, on arrays [64 channels, 16 tokens]: a warp has 16 channels of a block's tokens.

A run of s tokens is odd or even by its place. The pairs of level s have one token in an odd run and the other in the
even run before it; every pair of different tokens has one level of 1, 2, 4, .... In wgmma's register layout (see
`registers`) tokens 8 j to 8 j + 7, a tile, are the register column j of a quad of lanes; so runs of eight are a choice
of registers, and the array is the left operand of mma.sync as it stands.

As in `fragments`, every piece has a twin for the interpreter.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels import registers as rg
from pallas_kernels.registers import BLOCK

LEVELS = (1, 2, 4, 8)  # in a block
ONE = 0x3F80  # bfloat16
f32, bf16 = jnp.float32, jnp.bfloat16


def by_run(s: int, odd: jax.Array, even: jax.Array, *, interpret: bool) -> jax.Array:
    """The tokens of odd runs of s from `odd`, those of even runs from `even`."""
    if interpret:
        return jnp.where(((jnp.arange(BLOCK) & s) == s)[None], odd, even)

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT,) * 2, return_type=rg.array(BLOCK, odd.dtype))
    def piece(_, odd, even):
        odd, even = rg.pairs(odd), rg.pairs(even)
        if s == 8:
            chosen = np.stack([even[0], odd[1]])
        elif s == 1:
            chosen = _each(lambda a, b: vector.shuffle(a, b, [0, 3]), even, odd)
        else:
            bit = arith.andi(rg.lane(), rg.i32(s // 2))
            is_odd = arith.cmpi(arith.CmpIPredicate.ne, bit, rg.i32(0))
            chosen = _each(lambda a, b: arith.select(is_odd, b, a), even, odd)
        return rg.wrap(chosen, BLOCK)

    return piece(odd, even)


def sibling_end(x: jax.Array, s: int, *, interpret: bool) -> jax.Array:
    """For every token the value at the last token of the other half of its run of 2 s."""
    if interpret:
        runs = x.reshape(rg.ROWS, -1, 2, s)[:, :, ::-1, -1:]
        return jnp.broadcast_to(runs, (*runs.shape[:3], s)).reshape(x.shape)

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT,), return_type=rg.array(BLOCK))
    def piece(_, x):
        x = rg.elements(x)
        if s == 1:
            return rg.from_elements([[half[::-1] for half in tile] for tile in x])
        source = arith.ori(arith.xori(rg.lane(), rg.i32(s // 2 & 3)), rg.i32(s // 2 - 1))
        tiles = x[::-1] if s == 8 else x
        return rg.from_elements([[[rg.shuffle(half[1], source)] * 2 for half in tile] for tile in tiles])

    return piece(x)


def block_end(x: jax.Array, *, interpret: bool) -> jax.Array:
    """The last token's value for every token."""
    if interpret:
        return jnp.broadcast_to(x[:, -1:], x.shape)

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT,), return_type=rg.array(BLOCK))
    def piece(_, x):
        ends = [rg.shuffle(half[1], arith.ori(rg.lane(), rg.i32(3))) for half in rg.elements(x)[1]]
        return rg.from_elements([[[end] * 2 for end in ends]] * 2)

    return piece(x)


def store_pairs(ref: Any, M: jax.Array, *, interpret: bool) -> None:
    """M [64 tokens, 64 tokens], 16-bit, to shared memory of that shape, in the order that `load_block` reads."""
    if interpret:
        ref[...] = M
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), rg.LAYOUT))
    def piece(_, ref, M):
        words = rg.words(M).reshape(-1, 2, 2).swapaxes(1, 2).reshape(-1, 4)
        for source, row in enumerate(words):
            value = vector.from_elements(ir.VectorType.get((4,), rg.i32_type()), list(row))
            value = vector.bitcast(ir.VectorType.get((8,), M.mlir_dtype), value)
            vector.store(value, ref, _place(arith.addi(arith.shli(rg.warp(), rg.i32(2)), rg.i32(source))))

    piece(ref, M)


def load_block(ref: Any, source: int, target: int, dtype: Any, *, interpret: bool) -> jax.Array:
    """The block (source, target) of the symmetric matrix that `store_pairs` has stored, the same for every warp: [4
    times 16 targets, 16 sources].
    """
    if interpret:
        rows, columns = (slice(BLOCK * b, BLOCK * (b + 1)) for b in (target, source))
        return jnp.tile(ref[...][rows, columns], (rg.ROWS // BLOCK, 1))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=rg.array(BLOCK, dtype))
    def piece(_, ref):
        element = ir.MemRefType(ref.type).element_type
        value = vector.load(ir.VectorType.get((8,), element), ref, _place(rg.i32(4 * target + source)))
        pairs = [
            vector.extract_strided_slice(ir.VectorType.get((2,), element), value, [2 * e], [2], [1]) for e in range(4)
        ]
        return rg.wrap(np.array(pairs, object).reshape(2, 2).T, BLOCK)

    return piece(ref)


class Factor(NamedTuple):
    """x [64 channels, 16 source tokens] and a block from `load_block` that it is multiplied with; of the block only the
    pairs of level s, if given (s = 0: of a token with itself), and of these only targets in odd (or even) runs.
    """

    x: jax.Array
    block: jax.Array
    s: int | None = None
    odd: bool | None = None


def add_products(total: jax.Array, *factors: Factor, interpret: bool) -> jax.Array:
    """total [64 channels, 16 target tokens] + the sum of the products."""
    if interpret:
        for x, block, s, odd in factors:
            i, j = jnp.arange(BLOCK)[:, None], jnp.arange(BLOCK)[None]
            wanted = jnp.ones((BLOCK, BLOCK), bool) if s is None else ((i ^ j) >= s) & ((i ^ j) < max(2 * s, 1))
            if s is not None and odd is not None:
                wanted &= ((i & s) == s) == odd
            total += rg.dot("wcj,wij->wci", rg.blocks(x), jnp.where(wanted, rg.blocks(block), 0.0)).reshape(total.shape)
        return total

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT,) * (1 + 2 * len(factors)), return_type=rg.array(BLOCK))
    def piece(_, total, *arrays):
        terms = []
        for x, block, (_, _, s, odd) in zip(arrays[::2], arrays[1::2], factors, strict=True):
            terms.append((x, functools.partial(_operand, rg.words(block), s, odd)))
        return _add_products(total, terms)

    return piece(total, *(array for factor in factors for array in factor[:2]))


def add_sums(total: jax.Array, x: jax.Array, s: int, *, later: bool | None = None, interpret: bool) -> jax.Array:
    """total + sums of x over the tokens of a run of s = 1 to 16: in odd runs from the token to the run's end, in even
    runs from the run's start to before the token; with `later` given, in all runs the former (True) or the latter.

    x is bfloat16: a product with a triangular matrix of ones, in which nothing is ever subtracted.
    """
    if interpret:
        i = jnp.arange(BLOCK)[None]
        j = i.T
        odd = (i & s) == s if later is None else jnp.full(i.shape, later)
        summed = ((j ^ i) < s) & jnp.where(odd, j >= i, j < i)
        return total + rg.dot("ij,jk->ik", x.astype(f32), summed.astype(f32))

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT,) * 2, return_type=rg.array(BLOCK))
    def piece(_, total, x):
        def in_tile(upward: bool | None) -> rg.Register:
            def is_set(j: rg.Register, i: rg.Register) -> rg.Register:
                from_here = arith.cmpi(arith.CmpIPredicate.uge, j, i)
                if upward is not None:
                    return from_here if upward else arith.cmpi(arith.CmpIPredicate.ult, j, i)
                odd = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(i, rg.i32(s)), rg.i32(0))
                same_run = arith.cmpi(arith.CmpIPredicate.ult, arith.xori(j, i), rg.i32(s))
                return arith.andi(same_run, arith.cmpi(arith.CmpIPredicate.eq, from_here, odd))

            return _word(is_set, ONE)

        def operand(j: int, i: int) -> rg.Register | None:
            upward = later if later is not None or s < 8 else i == 1
            if i == j:
                return in_tile(upward)
            return rg.i32(ONE << 16 | ONE) if s == BLOCK and (j > i) == upward else None

        return _add_products(total, [(x, operand)])

    return piece(total, x)


def add_total(total: jax.Array, x: jax.Array, *, interpret: bool) -> jax.Array:
    """total + the sum of x, bfloat16, over its tokens."""
    if interpret:
        return total + x.astype(f32).sum(1, keepdims=True)

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT,) * 2, return_type=rg.array(BLOCK))
    def piece(_, total, x):
        return _add_products(total, [(x, lambda j, i: rg.i32(ONE << 16 | ONE))])

    return piece(total, x)


# Inside the inline pieces: an 8 x 8 tile (j, i) of a right operand, sources 8 j and targets 8 i on, is a word a lane.


def _each(f: Callable, *arrays: np.ndarray) -> np.ndarray:
    return np.vectorize(f, otypes=[object])(*arrays)


def _place(block: rg.Register) -> list[rg.Register]:
    """Row and column of the lane's sixteen bytes of a block, in a [64, 64] array of 16-bit numbers."""
    at = arith.addi(arith.shli(block, rg.i32(5)), rg.lane())
    return [rg.index(arith.shrui(at, rg.i32(3))), rg.index(arith.shli(arith.andi(at, rg.i32(7)), rg.i32(3)))]


def _operand(words: np.ndarray, s: int | None, odd: bool | None, j: int, i: int) -> rg.Register | None:
    """The tile of a block, None where it is zero, without the pairs that a `Factor` leaves out."""
    word = words[j, i]
    if s is None:
        return word
    if s == 8:
        return word if i != j and odd in (None, i == 1) else None
    return arith.andi(word, _word(lambda j, i: _at_level(j, i, s, odd), 0xFFFF)) if i == j else None


def _word(is_set: Callable, bits: int) -> rg.Register:
    """The lane's word of the tile whose elements (j, i) are `bits` where `is_set`."""
    lane = rg.lane()
    i, first = arith.shrui(lane, rg.i32(2)), arith.shli(arith.andi(lane, rg.i32(3)), rg.i32(1))
    low, high = (arith.select(is_set(arith.addi(first, rg.i32(e)), i), rg.i32(bits), rg.i32(0)) for e in (0, 1))
    return arith.ori(low, arith.shli(high, rg.i32(16)))


def _at_level(j: rg.Register, i: rg.Register, s: int, odd: bool | None) -> rg.Register:
    """Whether tokens j and i of a tile meet at level s < 8, i in an odd run or an even one if `odd` says so."""
    apart = arith.xori(j, i)
    if s == 0:
        return arith.cmpi(arith.CmpIPredicate.eq, apart, rg.i32(0))
    meet = arith.cmpi(arith.CmpIPredicate.ult, arith.subi(apart, rg.i32(s)), rg.i32(s))
    if odd is None:
        return meet
    here = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(i, rg.i32(s)), rg.i32(s if odd else 0))
    return arith.andi(meet, here)


def _add_products(total: Any, terms: Sequence[tuple[Any, Callable]]) -> Any:
    """total + the sum of x B over terms (x, operand), where operand(j, i) is the tile (j, i) of B, None for zero."""
    out = []
    for i, tile in enumerate(rg.elements(total)):
        c = tile[0] + tile[1]
        for x, operand in terms:
            words = rg.words(x)
            tiles = [(j, word) for j in (0, 1) if (word := operand(j, i)) is not None]
            if tiles:
                left = [words[j, h] for j, _ in tiles for h in (0, 1)]
                c = rg.mma(c, left, [word for _, word in tiles], x.mlir_dtype)
        out.append([c[:2], c[2:]])
    return rg.from_elements(out)
