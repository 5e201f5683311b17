"""Pairs of tokens level by level, on arrays [64 channels, 64 tokens]: a warp has 16 channels of all tokens.

A run of s tokens is odd or even by its place. The pairs of level s have one token in an odd run and the other in the
even run before it; every pair of different tokens has one level of 1, 2, ..., 32. In wgmma's register layout (see
`registers`) tokens 8 j to 8 j + 7, a tile, are the register column j of a quad of lanes; so runs of eight or more are
a choice of registers, and the array is the left operand of mma.sync as it stands.

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

LEVELS = (1, 2, 4, 8, 16, 32)
TILES = rg.ROWS // 8
ONE = 0x3F80  # bfloat16
f32, bf16 = jnp.float32, jnp.bfloat16


def by_run(s: int, odd: jax.Array, even: jax.Array, *, interpret: bool) -> jax.Array:
    """The tokens of odd runs of s from `odd`, those of even runs from `even`."""
    if interpret:
        return jnp.where((jnp.arange(rg.ROWS) & s) == s, odd, even)

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT,) * 2, return_type=rg.array(rg.ROWS, odd.dtype))
    def piece(_, odd, even):
        odd, even = rg.pairs(odd), rg.pairs(even)
        if s >= 8:
            return rg.wrap(np.stack([(odd if 8 * j & s else even)[j] for j in range(TILES)]), rg.ROWS)
        if s > 1:
            bit = arith.andi(rg.lane(), rg.i32(s // 2))
            is_odd = arith.cmpi(arith.CmpIPredicate.ne, bit, rg.i32(0))
            return rg.wrap(_each(lambda a, b: arith.select(is_odd, a, b), odd, even), rg.ROWS)
        return rg.wrap(_each(lambda a, b: vector.shuffle(b, a, [0, 3]), odd, even), rg.ROWS)

    return piece(odd, even)


def sibling_end(x: jax.Array, s: int, *, interpret: bool) -> jax.Array:
    """For every token the value at the last token of the other half of its run of 2 s."""
    if interpret:
        runs = x.reshape(rg.ROWS, -1, 2, s)[:, :, ::-1, -1:]
        return jnp.broadcast_to(runs, (*runs.shape[:3], s)).reshape(x.shape)

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT,), return_type=rg.array(rg.ROWS))
    def piece(_, x):
        x = rg.elements(x)
        if s == 1:
            return rg.from_elements([[half[::-1] for half in tile] for tile in x])
        source = arith.ori(arith.xori(rg.lane(), rg.i32(s // 2 & 3)), rg.i32(min(s, 8) // 2 - 1))
        tiles = [j if s < 8 else (j ^ (s // 8)) | (s // 8 - 1) for j in range(TILES)]
        ends = {j: [[rg.shuffle(half[1], source)] * 2 for half in x[j]] for j in set(tiles)}
        return rg.from_elements([ends[j] for j in tiles])

    return piece(x)


def last_token(x: jax.Array, *, interpret: bool) -> jax.Array:
    """The last token's value for every token."""
    if interpret:
        return jnp.broadcast_to(x[:, -1:], x.shape)

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT,), return_type=rg.array(rg.ROWS))
    def piece(_, x):
        last = [rg.shuffle(half[1], arith.ori(rg.lane(), rg.i32(3))) for half in rg.elements(x)[-1]]
        return rg.from_elements([[[value] * 2 for value in last]] * TILES)

    return piece(x)


def store_pairs(ref: Any, M: jax.Array, *, interpret: bool) -> None:
    """M [64 tokens, 64 tokens], 16-bit, to shared memory of that shape, in the order that `pair_product` reads."""
    if interpret:
        ref[...] = M
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), rg.LAYOUT))
    def piece(_, ref, M):
        first = arith.shli(rg.warp(), rg.i32(4))
        for j, pair in enumerate(rg.pairs(M)):
            for h, value in enumerate(pair):
                vector.store(value, ref, _place(arith.addi(first, rg.i32(TILES * h + j))))

    piece(ref, M)


def pair_product(x: jax.Array, ref: Any, s: int, *, interpret: bool) -> jax.Array:
    """x M_s [64, 64] in float32: of the symmetric matrix that `store_pairs` has stored, the pairs of level s (for s = 0
    those of a token with itself).
    """
    if interpret:
        i = jnp.arange(rg.ROWS)
        apart = i[:, None] ^ i
        at_level = (apart >= s) & (apart < max(2 * s, 1))
        return rg.dot("ij,jk->ik", x.astype(f32), jnp.where(at_level, ref[...].astype(f32), 0.0))

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT, plgpu.RefType()), return_type=rg.array(rg.ROWS))
    def piece(_, x, ref):
        mask = _word(lambda j, i: _within(arith.xori(j, i), s), 0xFFFF) if s < 8 else None

        def operand(i: int, j: int) -> rg.Register:
            value = vector.load(ir.VectorType.get((2,), x.mlir_dtype), ref, _place(rg.i32(TILES * i + j)))
            word = rg.as_word(value)
            return word if mask is None else arith.andi(word, mask)

        def paired(i: int) -> list[int]:
            return [j for j in range(TILES) if (i ^ j).bit_length() == (s // 8).bit_length()]

        zero = [[rg.f32(0.0)] * 4 for _ in range(TILES)]
        return _from_tiles(_multiply(zero, rg.words(x), paired, operand, x.mlir_dtype))

    return piece(x, ref)


def add_sums(total: jax.Array, x: jax.Array, s: int, *, reverse: bool | None = None, interpret: bool) -> jax.Array:
    """total + sums of x, rounded to bfloat16, over tokens of a run of s: in odd runs from the token to the run's end,
    in even runs from the run's start to before the token. `reverse`: in all runs the former, or the latter.

    A product with a triangular matrix of ones, so nothing is ever subtracted.
    """
    x = x.astype(bf16)
    if interpret:
        i = jnp.arange(rg.ROWS)
        odd = (i & s) == s if reverse is None else jnp.full(i.shape, reverse)
        summed = ((i[:, None] ^ i) < s) & jnp.where(odd, i[:, None] >= i, i[:, None] < i)
        return total + rg.dot("ij,jk->ik", x.astype(f32), summed.astype(f32))

    @plgpu.inline_mgpu(arg_types=(rg.LAYOUT,) * 2, return_type=rg.array(rg.ROWS))
    def piece(_, total, x):
        def later(i: int) -> bool:
            return bool(8 * i & s) if reverse is None else reverse

        def in_tile(j: rg.Register, i: rg.Register) -> rg.Register:
            upward = arith.cmpi(arith.CmpIPredicate.uge, j, i)
            odd = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(i, rg.i32(s)), rg.i32(0))
            same_run = arith.cmpi(arith.CmpIPredicate.ult, arith.xori(j, i), rg.i32(s))
            return arith.andi(same_run, arith.cmpi(arith.CmpIPredicate.eq, upward, odd))

        if s < 8:
            own = [_word(in_tile, ONE)] * 2
        else:
            own = [_word(lambda j, i, p=p: arith.cmpi(p, j, i), ONE) for p in _BEFORE_AND_FROM]
        ones = rg.i32(ONE << 16 | ONE)

        def summed(i: int) -> list[int]:
            run = [j for j in range(TILES) if 8 * (i ^ j) < max(s, 8)]
            return [j for j in run if (j >= i if later(i) else j <= i)]

        def operand(i: int, j: int) -> rg.Register:
            return own[later(i)] if i == j else ones

        start = [tile[0] + tile[1] for tile in rg.elements(total)]
        return _from_tiles(_multiply(start, rg.words(x), summed, operand, x.mlir_dtype))

    return piece(total, x)


# Inside the inline pieces: a tile of the result is the four registers of an mma.sync of eight tokens.

_BEFORE_AND_FROM = (arith.CmpIPredicate.ult, arith.CmpIPredicate.uge)


def _each(f: Callable, *arrays: np.ndarray) -> np.ndarray:
    return np.vectorize(f, otypes=[object])(*arrays)


def _place(tile: rg.Register) -> list[rg.Register]:
    return [rg.index(tile), rg.index(arith.shli(rg.lane(), rg.i32(1)))]


def _word(is_set: Callable, bits: int) -> rg.Register:
    """The lane's word of the right operand: the halves (j, i) of an 8 x 8 tile where `is_set` have these bits."""
    lane = rg.lane()
    i, first = arith.shrui(lane, rg.i32(2)), arith.shli(arith.andi(lane, rg.i32(3)), rg.i32(1))
    halves = [rg.i32(bits), rg.i32(_signed(bits << 16))]
    chosen = [arith.addi(first, rg.i32(e)) for e in (0, 1)]
    words = [arith.select(is_set(j, i), half, rg.i32(0)) for j, half in zip(chosen, halves, strict=True)]
    return arith.ori(*words)


def _signed(word: int) -> int:
    return word - (word >> 31 << 32)


def _within(apart: rg.Register, s: int) -> rg.Register:
    """Whether tokens that are `apart`, the exclusive or of their places, meet at level s."""
    if s == 0:
        return arith.cmpi(arith.CmpIPredicate.eq, apart, rg.i32(0))
    return arith.cmpi(arith.CmpIPredicate.ult, arith.subi(apart, rg.i32(s)), rg.i32(s))


def _multiply(totals: list, a: np.ndarray, tiles: Callable, operand: Callable, dtype: ir.Type) -> list:
    """totals[i] + sum_j a[j] operand(i, j) over tiles(i), two at a time."""
    for i in range(TILES):
        js = tiles(i)
        for n in range(0, len(js), 2):
            pair = js[n : n + 2]
            left = [a[j, h] for j in pair for h in (0, 1)]
            totals[i] = rg.mma(totals[i], left, [operand(i, j) for j in pair], dtype)
    return totals


def _from_tiles(totals: list) -> Any:
    return rg.from_elements([[tile[:2], tile[2:]] for tile in totals])
