"""What KDA is compared with: the same recurrence with less decay or no correction, and the one with more freedom.

    linear_attention   S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T    or I alone
    dplr_attention     S_t = (Diag(exp g_t) + a_t c_t^T) S_{t-1} + k_t v_t^T                    diagonal plus low rank

| decay       | with the delta rule                   | without                                                  |
|-------------|---------------------------------------|----------------------------------------------------------|
| per channel | KDA (arXiv 2510.26692)                | GLA (arXiv 2312.06635), with a write strength            |
| per head    | Gated DeltaNet (arXiv 2412.06464)     | Mamba-2 / SSD (arXiv 2405.21060), beta the step size     |
| none        | DeltaNet (arXiv 2406.06484)           | linear attention (arXiv 2006.16236)                      |

KDA is DPLR with a_t = -beta_t k_t, c_t = exp(g_t) k_t and beta_t k_t for k_t (Kimi Linear, section 3.2).
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kda_jax.ops import validate
from kda_jax.ops.chunk import from_chunks, heads_first, kda_chunk, to_chunks
from kda_jax.ops.intra import decayed_scores, on_diagonal, unit_lower_inverse
from kda_jax.ops.prepare import resolve_state, run_sequence
from kda_jax.ops.types import Beta, CuSeqlens, Keys, LogDecay, Queries, SegmentIds, State, Values, state_dtype


def linear_attention(
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecay | Float[Array, "B T HV"] | None = None,
    beta: Beta | None = None,
    *,
    delta_rule: bool = True,
    scale: float | None = None,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    cu_seqlens: CuSeqlens | None = None,
    chunk_size: int = 64,
) -> tuple[Values, State]:
    """The family of the table above, all by the chunkwise form of `kda`.

    Args:
      q, k, v: as in `kda`.
      g: log decay in nats, <= 0: [B, T, HV, K] per channel, [B, T, HV] per head, or None for none.
      beta: [B, T, HV] write strength, 1 if None.
      delta_rule: whether a write first removes what the key held.
      scale, initial_state, segment_ids, cu_seqlens, chunk_size: as in `kda`.

    Returns:
      o [B, T, HV, V] in v's dtype and the final state [N, HV, K, V].

    Raises:
      ValueError, TypeError: at trace time, naming the argument, what it is and what was expected.
    """
    validate.check_chunking(chunk_size, None)
    sizes: dict[str, int] = {}
    validate.check_array("k", k, "B T H K", sizes)
    validate.check_array("v", v, "B T HV V", sizes)
    full = tuple(sizes[axis] for axis in ("B", "T", "HV", "K"))
    if g is None:
        g = jnp.zeros(full, state_dtype(v.dtype))
    elif getattr(g, "ndim", None) == 3:
        validate.check_array("g", g, "B T HV", sizes)
        g = jnp.broadcast_to(g[..., None], full)
    beta = jnp.ones(full[:3], state_dtype(v.dtype)) if beta is None else beta
    o, final_state, *_ = run_sequence(
        functools.partial(kda_chunk, delta_rule=delta_rule),
        {"q": q, "k": k, "v": v, "g": g, "beta": beta},
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        g_min=None,
        chunk_size=chunk_size,
    )
    return o, final_state


def dplr_attention(
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecay,
    a: Keys,
    c: Keys,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    chunk_size: int = 64,
) -> tuple[Values, State]:
    """Attention with a diagonal-plus-low-rank transition, over chunks (the general form in Kimi Linear, section 3.2):

        S_t = (Diag(exp g_t) + a_t c_t^T) S_{t-1} + k_t v_t^T          o_t = scale * S_t^T q_t

    With e_t = S_{t-1}^T c_t, a chunk needs four score matrices, of q and c with k and a, where KDA needs two.

    Args:
      q, k, v, g: as in `kda`, with as many value heads as key heads.
      a, c: [B, T, H, K], the rank-one part; c meets the state before the token's decay.
      scale, initial_state, chunk_size: as in `kda`.

    Returns:
      o [B, T, H, V] in v's dtype and the final state [B, H, K, V].

    Raises:
      ValueError, TypeError: at trace time, naming the argument, what it is and what was expected.
    """
    validate.check_chunking(chunk_size, None)
    arrays = {"q": q, "k": k, "v": v, "g": g, "a": a, "c": c}
    dims = ("B T H K", "B T H K", "B T H V", "B T H K", "B T H K", "B T H K")
    sizes: dict[str, int] = {}
    for (name, x), axes in zip(arrays.items(), dims, strict=True):
        validate.check_array(name, x, axes, sizes)
    if initial_state is not None:
        validate.check_array("initial_state", initial_state, "B H K V", sizes)
    scale = validate.check_scale(scale, sizes)
    S = resolve_state(initial_state, tuple(sizes[axis] for axis in ("B", "H", "K", "V")), tuple(arrays.values()))
    if 0 in v.shape:
        return jnp.zeros_like(v), S
    einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    q, k, v_chunks, g, a, c = (heads_first(to_chunks(x.astype(S.dtype), chunk_size)) for x in arrays.values())

    # A token's e reads the state before it: c sits one row early among the rows, and a chunk's first c reads S itself.
    early = jnp.concatenate([c[..., 1:, :], jnp.zeros_like(c[..., :1, :])], axis=-2)
    with_k, U, D = decayed_scores((q, early), k, g, None, None, einsum)
    with_a, _, _ = decayed_scores((q, early), a, g, None, None, einsum)
    Qk, Ck = (scores + _own(x, k) for scores, x in zip(with_k, (q, early), strict=True))
    Qa, Ca = (scores + _own(x, a) for scores, x in zip(with_a, (q, early), strict=True))
    cU = jnp.concatenate([c[..., :1, :], c[..., 1:, :] * U[..., :-1, :]], axis=-2)
    X = unit_lower_inverse(-_later(Ca))
    w = einsum("...ij,...jk->...ik", X, cU)
    u = einsum("...ij,...jv->...iv", X, einsum("...ij,...jv->...iv", _later(Ck), v_chunks))

    def chunk(S, inputs):
        w, u, aD, written, Ul = inputs
        e = u + einsum("bhck,bhkv->bhcv", w, S)
        return Ul[..., None] * S + einsum("bhck,bhcv->bhkv", aD, e) + written, (S, e)

    written = einsum("...ck,...cv->...kv", k * D, v_chunks)
    final_state, (before, e) = jax.lax.scan(chunk, S, (w, u, a * D, written, U[..., -1, :]))
    o = einsum("...ck,...kv->...cv", q * U, before) + einsum("...ij,...jv->...iv", Qa, e)
    o = scale * (o + einsum("...ij,...jv->...iv", Qk, v_chunks))
    return from_chunks(heads_first(o))[:, : v.shape[1]].astype(v.dtype), final_state


def _own(x: Array, y: Array) -> Array:
    """The diagonal matrices of x_i . y_i."""
    return on_diagonal(jnp.sum(x * y, axis=-1))


def _later(x: Float[Array, "*chunk C n"]) -> Float[Array, "*chunk C n"]:
    """Every row one token later, the first zero."""
    return jnp.concatenate([jnp.zeros_like(x[..., :1, :]), x[..., :-1, :]], axis=-2)
