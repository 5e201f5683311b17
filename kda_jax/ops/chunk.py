"""KDA over chunks of C tokens: matrix products within a chunk, a scan of the state across chunks.

With P_ij[d] = prod_{j < t <= i} exp(g_t[d]), U_i the decay from before the chunk to token i, D_i the decay from token i
to the chunk's end, and Ul the last token's U (Kimi Linear, section 3.2, in the WY form):

    1  scores     A_ij = sum_d q_i k_j P_ij  (i >= j)        L_ij = beta_i sum_d k_i k_j P_ij  (i > j)
    2  inverse    X = (I + L)^-1                             unit lower triangular
    3  operands   w = X (beta k U)        u = X (beta v)
    4  state      e = u - w S             S <- Ul S + (k D)^T e          in order, chunk by chunk
    5  output     o = scale * ((q U) S + A e)

No decay factor exceeds 1 and none comes from a difference of sums. A pair i > j is told apart at one level s of 1, 2,
4, ...: i is in an odd block of s tokens and j in the even block before it, so P_ij = U_i D_j with U and D taken over
those blocks. From s to 2s, U of an odd block takes the even block's last U as a factor, and D of an even block the odd
block's. A decay that underflows is 0, the right value, and a reset of the state is a decay of exactly 0.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kda_jax.ops.packing import Alignment, Packing, align
from kda_jax.ops.types import Beta, Keys, LogDecay, Queries, State, Values, state_dtype

TILE = 16  # tokens of a tile: with g >= -5, factors anchored at its first token reach exp(15 * 5), a float32

_exact_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _eye(like: Array) -> Array:
    """The identity [1, ..., 1, C, C] of the rank, dtype and last axis of `like`."""
    C = like.shape[-1]
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
        return jax.lax.fori_loop(1, C, functools.partial(_substitute_row, L), jnp.zeros_like(L) + _eye(L))
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


def _bounded_scores(q: Array, k: Array, g: Array, einsum: Callable) -> Array:
    """The scores [*chunk, m, 2, s, s] of q and k within blocks of s <= TILE tokens, strictly lower; needs g >= -5."""
    G = jnp.cumsum(g, axis=-2) - g[..., :1, :]
    rows = jnp.stack([q, k], axis=-3) * jnp.exp(G)[..., None, :, :]
    return jnp.tril(einsum("...hik,...jk->...hij", rows, k * jnp.exp(-G)), -1)


def decayed_scores(
    q: Array, k: Array, g: Array, reset: Array | None, g_min: float | None, einsum: Callable
) -> tuple[Array, Array, Array, Array]:
    """Stage 1 of q, k, g [*chunk, C, K]: the scores of q (i >= j) and of k (i > j), [*chunk, C, C], and U, D."""
    C = q.shape[-2]
    a = jnp.exp(g) if reset is None else jnp.where(reset, 0, jnp.exp(g))
    tile = min(TILE, C) if g_min is not None and reset is None else 1
    U, D = _blocks(a, 1), jnp.ones_like(_blocks(a, 1))
    scores = jnp.zeros_like(a, shape=(*U.shape[:-2], 2, 1, 1))
    size = 1
    while size < C:
        (_, q1), (k0, k1), (U0, U1), (D0, D1) = (_pairs(x) for x in (_blocks(q, size), _blocks(k, size), U, D))
        if size >= tile:
            rows = jnp.stack([q1, k1], axis=-3) * U1[..., None, :, :]
            corner = einsum("...hik,...jk->...hij", rows, k0 * D0)
            scores = _lower_blocks(scores[..., ::2, :, :, :], corner, scores[..., 1::2, :, :, :])
        U = jnp.concatenate([U0, U1 * U0[..., -1:, :]], axis=-2)
        D = jnp.concatenate([D0 * U1[..., -1:, :], D1], axis=-2)
        # Else XLA computes every level again from the first.
        scores, U, D = jax.lax.optimization_barrier((scores, U, D))
        size *= 2
        if size == tile:
            scores = _bounded_scores(_blocks(q, size), _blocks(k, size), _blocks(g, size), einsum)
    A, KK = scores[..., 0, 0, :, :], scores[..., 0, 1, :, :]
    return A + jnp.sum(q * k, axis=-1, keepdims=True) * _eye(A), KK, U[..., 0, :, :], D[..., 0, :, :]


def _to_chunks(x: Array, chunk_size: int) -> Array:
    """[B, T, heads, ...] as [T // C, B, heads, C, ...], the last chunk filled with zeros."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk_size)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2))


def _from_chunks(x: Array) -> Array:
    """The inverse of `_to_chunks`, filling included."""
    x = jnp.moveaxis(x, (0, 2), (1, 3))
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _scan_states(initial: State, operands: tuple[Array, ...], slot: Int[Array, " chunks"] | None, einsum: Callable):
    """Stage 4: the final states, and for each chunk the state before it and e."""

    def chunk(states, inputs):
        w, u, kD, Ul, slot = inputs
        S = states if slot is None else jax.lax.dynamic_index_in_dim(states, slot, keepdims=True)
        e = u - einsum("bhck,bhkv->bhcv", w, S)
        after = Ul[..., None] * S + einsum("bhck,bhcv->bhkv", kD, e)
        states = after if slot is None else jax.lax.dynamic_update_index_in_dim(states, after[0], slot, 0)
        return states, (S, e)

    return jax.lax.scan(chunk, initial, (*operands, slot))


def kda_chunk(
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecay,
    beta: Beta,
    *,
    scale: float,
    initial_state: State,
    packing: Packing | None = None,
    g_min: float | None = None,
    chunk_size: int = 64,
) -> tuple[Values, State, Float[Array, "chunks N HV K V"]]:
    """The chunkwise form of `kda_jax.kda`; the arguments are `kda`'s, already validated, padding tokens zeroed.

    Returns:
      o [B, T, HV, V] in v's dtype, the final state, and the state before each chunk.
    """
    dtype = state_dtype(v.dtype)
    narrow = max(x.dtype.itemsize for x in (q, k, v)) < 4
    einsum = functools.partial(jnp.einsum, precision=None if narrow else jax.lax.Precision.HIGHEST)
    chunk_size = min(chunk_size, max(1, 1 << (v.shape[1] - 1).bit_length()))
    alignment = align(packing, chunk_size) if packing is not None and packing.slot is not None else None
    reset = None if packing is None else packing.reset

    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    inputs = [x.astype(dtype) for x in (q, k, v, g, beta)]
    if alignment is not None:
        inputs = [_gather(x, alignment) for x in inputs]
    q, k, v_chunks, g, beta = (_to_chunks(x, chunk_size) for x in inputs)
    if reset is not None:
        reset = _to_chunks(reset[:, :, None, None], chunk_size)

    def prepare(q, k, v, g, beta):
        A, KK, U, D = decayed_scores(q, k, g, reset, g_min, einsum)
        X = unit_lower_inverse(beta[..., None] * KK)
        w = einsum("...ij,...jk->...ik", X, beta[..., None] * k * U)
        u = einsum("...ij,...jv->...iv", X, beta[..., None] * v)
        return A, q * U, k * D, U[..., -1, :], w, u

    A, qU, kD, Ul, w, u = prepare(q, k, v_chunks, g, beta)
    slot = None if alignment is None else alignment.slot
    final_state, (S, e) = _scan_states(initial_state.astype(dtype), (w, u, kD, Ul), slot, einsum)
    o = scale * (einsum("nbhck,nbhkv->nbhcv", qU, S) + einsum("nbhij,nbhjv->nbhiv", A, e))
    o = _from_chunks(o).astype(v.dtype)
    o = o[:, : v.shape[1]] if alignment is None else o[:, alignment.target]
    return o, final_state, S


def _gather(x: Array, alignment: Alignment) -> Array:
    valid = alignment.valid.reshape(1, -1, *(1,) * (x.ndim - 2))
    return jnp.where(valid, x[:, alignment.source], 0)
