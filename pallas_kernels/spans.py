"""Spans of chunks, which a scan takes side by side: rows, packed sequences, or pieces of long rows.

A piece acts on the state before it as an affine map, S -> M S + N, and on the gradient of the state behind it as
another, dS -> M^T dS + dN. Composed, they give each piece what it starts from, exactly, however slowly the state fades.
"""

from typing import Any

import jax
import jax.numpy as jnp


def find_spans(rows: int, chunks: int, pieces: int = 1, sequences: jax.Array | None = None) -> jax.Array:
    """Spans [N, 3] int32, each a row, its first chunk there and its number of chunks: every row in pieces of equal
    length but the last; or the `sequences` [N, 2] of the only row, each its first chunk and its number of chunks.

    Computed in the program: a partitioned function may hold no constant array.
    """
    if sequences is not None:
        return jnp.pad(sequences, ((0, 0), (1, 0)))
    span, length = jax.lax.iota(jnp.int32, rows * pieces), -(-chunks // pieces)
    first = jnp.minimum(span % pieces * length, chunks)
    return jnp.stack([span // pieces, first, jnp.minimum(length, chunks - first)], axis=1)


def compose(M: jax.Array, N: jax.Array, start: jax.Array, *, reverse: bool = False) -> tuple[jax.Array, jax.Array]:
    """What each piece starts from [B P, HV, K, V] and what leaves the last one [B, HV, K, V], of maps M [B P, HV, K,
    K], N [B P, HV, K, V] and what enters the first one [B, HV, K, V]. With `reverse` the order is from last to first.
    """
    B, order = start.shape[0], slice(None, None, -1 if reverse else 1)

    def apply(M: jax.Array, S: jax.Array) -> jax.Array:
        return jnp.einsum("...ij,...jv->...iv", M, S, precision="highest")

    def follow(first: Any, second: Any) -> Any:
        return apply(second[0], first[0]), apply(second[0], first[1]) + second[1]

    M, N = (x.reshape(B, -1, *x.shape[1:])[:, order] for x in (M, N))
    M, N = jax.lax.associative_scan(follow, (M, N), axis=1)
    after = apply(M, start[:, None]) + N
    before = jnp.concatenate([start[:, None], after[:, :-1]], 1)[:, order]
    return before.reshape(-1, *before.shape[2:]), after[:, -1]
