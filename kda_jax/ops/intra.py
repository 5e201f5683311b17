"""Within a chunk: the decayed scores of every pair of tokens, and the inverse that the delta rule asks for.

With P_ij[d] = prod_{j < t <= i} exp(g_t[d]), U_i the decay from before a block to its token i and D_i the decay from
token i to the block's end:

    scores_ij = sum_d row_i k_j P_ij     (i > j)

No decay factor exceeds 1 and none comes from a difference of sums. A pair i > j is told apart at one level s of 1, 2,
4, ...: i is in an odd block of s tokens and j in the even block before it, so P_ij = U_i D_j with U and D taken over
those blocks. From s to 2s, U of an odd block takes the even block's last U as a factor, and D of an even block the odd
block's. A decay that underflows is 0, the right value, and a reset of the state is a decay of exactly 0.
"""

import functools
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

TILE = 16  # tokens of a tile: with g >= -5, decays in it stay above exp(-16 * 5), so that float32 can divide by them

_exact_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _eye(C: int, like: Array) -> Array:
    """The identity [1, ..., 1, C, C] of the rank and dtype of `like`."""
    return jnp.eye(C, dtype=like.dtype).reshape(*(1,) * (like.ndim - 2), C, C)


def _lower_blocks(top: Array, corner: Array, bottom: Array) -> Array:
    """[[top, 0], [corner, bottom]] of square blocks."""
    upper = jnp.concatenate([top, jnp.zeros_like(top)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, bottom], axis=-1)], axis=-2)


@jax.custom_jvp
def unit_lower_inverse(L: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """(I + L)^-1 of a strictly lower triangular L: forward substitution in tiles, merged by [[X, 0], [-Y L21 X, Y]].

    Every intermediate is a block of the result, which stays bounded where powers of L (a Neumann series) do not.
    """
    C = L.shape[-1]
    if C <= TILE:
        return jax.lax.fori_loop(1, C, functools.partial(_substitute_row, L), jnp.zeros_like(L) + _eye(C, L))
    half = C // 2
    top, bottom = unit_lower_inverse(jnp.stack([L[..., :half, :half], L[..., half:, half:]]))
    corner = _exact_einsum("...ij,...jk->...ik", _exact_einsum("...ij,...jk->...ik", bottom, L[..., half:, :half]), top)
    return _lower_blocks(top, -corner, bottom)


def _substitute_row(L: Array, i: Array, X: Array) -> Array:
    """Row i of the inverse, e_i - sum_{j < i} L_ij X_j, put into X, whose rows from i on are the identity's."""
    row = jax.lax.dynamic_index_in_dim(L, i, -2)
    row = jax.lax.dynamic_index_in_dim(X, i, -2) - _exact_einsum("...ij,...jk->...ik", row, X)
    return jax.lax.dynamic_update_slice_in_dim(X, row, i, -2)


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals, tangents):
    (L,), (dL,) = primals, tangents
    X = unit_lower_inverse(L)
    return X, -_exact_einsum("...ij,...jk->...ik", _exact_einsum("...ij,...jk->...ik", X, jnp.tril(dL, -1)), X)


def _blocks(x: Array, size: int) -> Array:
    """[*chunk, C, K] as [*chunk, C // size, size, K]."""
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def _pairs(x: Array) -> tuple[Array, Array]:
    """The even and the odd blocks of [*chunk, m, s, K]."""
    return x[..., ::2, :, :], x[..., 1::2, :, :]


def _score(rows: Array, k: Array, einsum: Callable) -> Array:
    """rows times k, both [*chunk, m, s, K], block by block: [*chunk, m, s, s]."""
    return einsum("...ik,...jk->...ij", rows, k)


def _bounded_scores(rows: Iterable[Array], k: Array, U: Array, einsum: Callable) -> tuple[Array, ...]:
    """`decayed_scores` within blocks of s <= TILE tokens, each [*chunk, m, s, s], by one product of U_i and 1 / U_j.

    With g >= -5 and a factor in the middle of U's range, no operand grows or shrinks by more than exp(40).
    """
    U = U * math.exp(2.5 * TILE)
    return tuple(jnp.tril(_score(x * U, k / U, einsum), -1) for x in rows)


def decayed_scores(
    rows: tuple[Array, ...], k: Array, g: Array, reset: Array | None, g_min: float | None, einsum: Callable
) -> tuple[tuple[Array, ...], Array, Array]:
    """Stage 1: sum_d rows_i k_j P_ij for i > j, [*chunk, C, C], of each kind of rows [*chunk, C, K], and U, D.

    k and g are [*chunk, C, K], as U and D are; `reset`, [*chunk, C, 1], marks tokens before which the state is zero.
    """
    C = k.shape[-2]
    a = jnp.exp(g) if reset is None else jnp.where(reset, 0, jnp.exp(g))
    tile = min(TILE, C) if g_min is not None and reset is None else 1
    U, D = _blocks(a, 1), jnp.ones_like(_blocks(a, 1))
    scores = (jnp.zeros_like(a, shape=(*a.shape[:-1], 1, 1)),) * len(rows)
    size = 1
    while size < C:
        (k0, _), (U0, U1), (D0, D1) = (_pairs(x) for x in (_blocks(k, size), U, D))
        if size >= tile:
            corners = (_score(_pairs(_blocks(x, size))[1] * U1, k0 * D0, einsum) for x in rows)
            scores = tuple(
                _lower_blocks(top, corner, bottom)
                for (top, bottom), corner in zip(map(_pairs, scores), corners, strict=True)
            )
        U = jnp.concatenate([U0, U1 * U0[..., -1:, :]], axis=-2)
        D = jnp.concatenate([D0 * U1[..., -1:, :], D1], axis=-2)
        # Else XLA computes every level again from the first.
        scores, U, D = jax.lax.optimization_barrier((scores, U, D))
        size *= 2
        if size == tile:
            scores = _bounded_scores((_blocks(x, size) for x in rows), _blocks(k, size), U, einsum)
    return tuple(x[..., 0, :, :] for x in scores), U[..., 0, :, :], D[..., 0, :, :]


def on_diagonal(x: Float[Array, "*chunk C"]) -> Float[Array, "*chunk C C"]:
    """The diagonal matrices of x: a token's score with itself, which no decay enters."""
    return x[..., None] * _eye(x.shape[-1], x[..., None])
