"""Pairs of tokens level by level, on arrays [64 channels, 16 tokens]: a warp has 16 channels of a block's tokens.

A run of s tokens is odd or even by its place. The pairs of level s have one token in an odd run and the other in the
even run before it; every pair of different tokens has one level of 1, 2, 4, .... In wgmma's register layout (see
`registers`) tokens 8 j to 8 j + 7, a tile, are the register column j of a quad of lanes; so runs of eight are a choice
of registers, and the array is the left operand of mma.sync as it stands.

As in `fragments`, every piece has a twin for the interpreter.
"""

from collections.abc import Callable
from typing import Any

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
    """M [64 tokens, 64 tokens], 16-bit, to shared memory of that shape, in the order that `add_product` reads."""
    if interpret:
        ref[...] = M
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), rg.LAYOUT))
    def piece(_, ref, M):
        first = arith.shli(rg.warp(), rg.i32(4))
        for j, pair in enumerate(rg.pairs(M)):
            for h, value in enumerate(pair):
                vector.store(value, ref, _place(arith.addi(first, rg.i32(_TILES * h + j))))

    piece(ref, M)


def add_product(
    total: jax.Array, x: jax.Array, ref: Any, source: int, target: int, s: int | None = None, *, interpret: bool
) -> jax.Array:
    """total + x M, M being the block (source, target) of the symmetric matrix that `store_pairs` has stored; of the
    pairs of level s alone if s is given (s = 0: of a token with itself).
    """
    if interpret:
        apart = jnp.arange(BLOCK)[:, None] ^ jnp.arange(BLOCK)[None]
        wanted = (apart >= s) & (apart < max(2 * s, 1)) if s is not None else apart >= 0
        rows, columns = (slice(BLOCK * b, BLOCK * (b + 1)) for b in (source, target))
        return total + rg.dot("ij,jk->ik", x.astype(f32), jnp.where(wanted, ref[...][rows, columns].astype(f32), 0.0))

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT,) * 2 + (plgpu.RefType(),), return_type=rg.array(BLOCK))
    def piece(_, total, x, ref):
        mask = None if s is None or s == 8 else _word(lambda j, i: _at_level(arith.xori(j, i), s), 0xFFFF)

        def operand(j: int, i: int) -> rg.Register | None:
            if s is not None and (i == j) == (s == 8):
                return None
            tile = rg.i32(_TILES * (2 * target + i) + 2 * source + j)
            word = rg.as_word(vector.load(ir.VectorType.get((2,), x.mlir_dtype), ref, _place(tile)))
            return word if mask is None else arith.andi(word, mask)

        return _add_product(total, x, operand)

    return piece(total, x, ref)


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

        return _add_product(total, x, operand)

    return piece(total, x)


def add_total(total: jax.Array, x: jax.Array, *, interpret: bool) -> jax.Array:
    """total + the sum of x, bfloat16, over its tokens."""
    if interpret:
        return total + x.astype(f32).sum(1, keepdims=True)

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT,) * 2, return_type=rg.array(BLOCK))
    def piece(_, total, x):
        return _add_product(total, x, lambda j, i: rg.i32(ONE << 16 | ONE))

    return piece(total, x)


# Inside the inline pieces: an 8 x 8 tile of a right operand is one word a lane.

_TILES = rg.ROWS // 8


def _each(f: Callable, *arrays: np.ndarray) -> np.ndarray:
    return np.vectorize(f, otypes=[object])(*arrays)


def _place(tile: rg.Register) -> list[rg.Register]:
    return [rg.index(tile), rg.index(arith.shli(rg.lane(), rg.i32(1)))]


def _word(is_set: Callable, bits: int) -> rg.Register:
    """The lane's word of the tile whose elements (j, i) are `bits` where `is_set`."""
    lane = rg.lane()
    i, first = arith.shrui(lane, rg.i32(2)), arith.shli(arith.andi(lane, rg.i32(3)), rg.i32(1))
    low, high = (arith.select(is_set(arith.addi(first, rg.i32(e)), i), rg.i32(bits), rg.i32(0)) for e in (0, 1))
    return arith.ori(low, arith.shli(high, rg.i32(16)))


def _at_level(apart: rg.Register, s: int) -> rg.Register:
    """Whether tokens that are `apart`, the exclusive or of their places, meet at level s."""
    if s == 0:
        return arith.cmpi(arith.CmpIPredicate.eq, apart, rg.i32(0))
    return arith.cmpi(arith.CmpIPredicate.ult, arith.subi(apart, rg.i32(s)), rg.i32(s))


def _add_product(total: Any, x: Any, operand: Callable) -> Any:
    """total + x B, where operand(j, i) is the tile (j, i) of B, None for zero."""
    words, out = rg.words(x), []
    for i, tile in enumerate(rg.elements(total)):
        tiles = [(j, word) for j in (0, 1) if (word := operand(j, i)) is not None]
        left = [words[j, h] for j, _ in tiles for h in (0, 1)]
        c = tile[0] + tile[1]
        if tiles:
            c = rg.mma(c, left, [word for _, word in tiles], x.mlir_dtype)
        out.append([c[:2], c[2:]])
    return rg.from_elements(out)
