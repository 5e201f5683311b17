"""Causal softmax attention over all earlier tokens, and the piece of it that MLA shares."""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kda_jax.layers.cache import AttentionCache, Tokens, append, init_attention_cache, locate
from kda_jax.layers.inputs import check_inputs, no_tokens, zero_padding
from kda_jax.ops.types import SegmentIds, state_dtype

AttentionImplementation = Literal["xla", "cudnn"]
"""Of `jax.nn.dot_product_attention`."""


def check_implementation(implementation: AttentionImplementation | None) -> None:
    """Raises ValueError for a name that `jax.nn.dot_product_attention` does not have."""
    if implementation not in (None, *get_args(AttentionImplementation)):
        raise ValueError(f'implementation must be None, "xla" or "cudnn", got {implementation!r}')


def attend(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G V"],
    mask: Bool[Array, "B 1 T S"] | None,
    *,
    scale: float,
    implementation: AttentionImplementation | None = None,
) -> Float[Array, "B T H V"]:
    """o_t = sum_s softmax_s(scale q_t^T k_s) v_s over the s that `mask` admits, all s <= t without one; V at most K."""
    wide = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, k.shape[-1] - v.shape[-1])))  # the primitive wants V = K
    o = jax.nn.dot_product_attention(
        q, k, wide, mask=mask, scale=scale, is_causal=mask is None, implementation=implementation
    )
    return o[..., : v.shape[-1]]


def settle(o: Float[Array, "B T C"], tokens: Tokens, cache: AttentionCache | None) -> Float[Array, "B T C"]:
    """Zero for padding, NaN for a row whose cache has overflowed."""
    o = jnp.where(tokens.valid[..., None], o, 0)
    return o if cache is None else jnp.where((cache.length > cache.capacity)[:, None, None], jnp.nan, o)


def rotate(x: Float[Array, "B T H K"], position: Int[Array, "B T"], theta: float) -> Float[Array, "B T H K"]:
    """Rotary positions: channels i and i + K/2 turn by position * theta^(-2i/K)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=state_dtype(x.dtype)) / half)
    angle = position[:, :, None, None].astype(frequency.dtype) * frequency[None, None, None]
    left, right = x[..., :half].astype(angle.dtype), x[..., half:].astype(angle.dtype)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """y = W_o softmax(K^-1/2 q k^T) v, causal, without biases; without positions (NoPE) unless `rope_theta` is given.

    Args:
      in_features: width of x and y.
      num_heads: query heads.
      head_dim: channels K of a head.
      num_kv_heads: key and value heads, of which num_heads is a multiple; by default num_heads.
      rope_theta: base of the rotary positions, counted within each sequence; None for no positions.
      dtype, param_dtype: of the computation (by default that of x and the weights together) and of the weights.
      implementation: of `jax.nn.dot_product_attention`: None, "xla" or "cudnn".

    Raises:
      ValueError: for sizes that are not positive or do not divide, an odd head_dim with positions, or another
        implementation.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        rope_theta: float | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        implementation: AttentionImplementation | None = None,
        rngs: nnx.Rngs,
    ):
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if min(in_features, num_heads, head_dim, kv_heads) < 1 or num_heads % kv_heads:
            raise ValueError(
                "in_features, num_heads, head_dim and num_kv_heads must be positive and num_kv_heads divide num_heads, "
                f"got {in_features=}, {num_heads=}, {head_dim=}, {num_kv_heads=}"
            )
        check_implementation(implementation)
        if rope_theta is not None and head_dim % 2:
            raise ValueError(f"rope_theta needs an even head_dim, got {head_dim=}")
        self.in_features, self.num_heads, self.num_kv_heads, self.head_dim = in_features, num_heads, kv_heads, head_dim
        self.rope_theta, self.dtype, self.param_dtype, self.implementation = (
            rope_theta,
            dtype,
            param_dtype,
            implementation,
        )
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.q_proj = linear(in_features, num_heads * head_dim)
        self.k_proj = linear(in_features, kv_heads * head_dim)
        self.v_proj = linear(in_features, kv_heads * head_dim)
        self.o_proj = linear(num_heads * head_dim, in_features)

    def init_cache(self, batch_size: int, capacity: int) -> AttentionCache:
        """An empty cache for at most `capacity` tokens a row, padding not counted."""
        entry = jax.ShapeDtypeStruct((self.num_kv_heads, self.head_dim), self.dtype or self.param_dtype)
        return init_attention_cache(batch_size, capacity, (entry, entry))

    def __call__(
        self, x: Float[Array, "B T D"], *, segment_ids: SegmentIds | None = None, cache: AttentionCache | None = None
    ) -> tuple[Float[Array, "B T D"], AttentionCache | None]:
        """The attended tokens and the cache after them; without a cache the call stands alone and returns None for it.

        Args:
          x: [B, T, in_features].
          segment_ids: [B, T] integers; equal ids are one sequence, 0 is padding: its output is 0, it takes no place.
          cache: from `init_cache` or an earlier call; it belongs to the row's first sequence.

        Raises:
          ValueError: for a wrong shape, or a cache that overflows where that can be known: outside `jit`, or when the
            call alone is too long. Under `jit` the output of a row that overflows is NaN.
        """
        check_inputs(x, self.in_features, segment_ids, cache)
        if 0 in x.shape[:2]:
            return no_tokens(x, self.dtype, self.param_dtype), cache
        x = zero_padding(x, segment_ids)
        tokens = locate(segment_ids, x, cache)
        heads = lambda y: y.reshape(*x.shape[:2], -1, self.head_dim)  # noqa: E731
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        if self.rope_theta is not None:
            q, k = (rotate(y, tokens.position, self.rope_theta) for y in (q, k))
        if cache is None:
            mask = None if segment_ids is None else tokens.mask()
        else:
            cache, mask = append(cache, (k, v), tokens)
            k, v = (entry.astype(q.dtype) for entry in cache.entries)
        o = attend(q, k, v, mask, scale=self.head_dim**-0.5, implementation=self.implementation)
        return self.o_proj(settle(o.reshape(*x.shape[:2], -1), tokens, cache)), cache
