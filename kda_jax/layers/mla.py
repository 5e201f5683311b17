"""Multi-head latent attention without positions, as Kimi Linear and Kimi K3 have it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kda_jax.layers.attention import AttentionImplementation, attend, check_implementation, settle
from kda_jax.layers.cache import AttentionCache, append, init_attention_cache, locate, window
from kda_jax.layers.inputs import check_inputs, no_tokens, zero_padding
from kda_jax.layers.sizes import check_sizes
from kda_jax.ops.latent_attention import latent_attention
from kda_jax.ops.types import SegmentIds


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Sizes of a `LatentAttention` layer; the defaults are Kimi Linear's.

    Attributes:
      latent_dim: channels R of the latent that keys and values are made from.
      key_dim: channels P of a head's own part of query and key.
      shared_dim: channels E of the key part that all heads share; rotary in other models, never rotated here.
      value_dim: channels V of a head's value.
      query_rank: rank of the query projection, with an RMSNorm between; None for full rank.
      output_gate: multiply the output by sigmoid(g_proj x), as Kimi K3.

    Raises:
      ValueError: for a size that is no positive integer, or a value wider than the whole key.
    """

    latent_dim: int = 512
    key_dim: int = 128
    shared_dim: int = 64
    value_dim: int = 128
    query_rank: int | None = None
    output_gate: bool = False

    def __post_init__(self) -> None:
        sizes = ("latent_dim", "key_dim", "shared_dim", "value_dim", "query_rank")
        check_sizes(self, dict.fromkeys(sizes, 1), optional=("query_rank",))
        if self.value_dim > self.key_dim + self.shared_dim:
            raise ValueError(f"MLAConfig.value_dim must be at most key_dim + shared_dim, got {self}")


KIMI_LINEAR = MLAConfig()
EPSILON = 1e-6  # of the norms within: a tenth of the other norms' in the published models


class LatentAttention(nnx.Module):
    """Causal attention whose keys and values come from one latent a token (Kimi Linear, section 4; NoPE):

        c, e = split(W_kv_a x)      c <- RMSNorm(c)                [R], [E]
        k_h  = [W_uk_h c, e]        v_h = W_uv_h c                 W_uk, W_uv are the two parts of kv_b_proj
        y    = W_o concat_h(softmax((P + E)^-1/2 q_h k^T) v_h)     times sigmoid(W_g x) before W_o with an output gate

    The cache holds [c, e] alone. A call on a cache folds W_uk into the query and W_uv into the output ("absorbed"), so
    that heads attend to the latents directly, as long as that costs less than making keys and values of all the cache.

    Args:
      in_features: width of x and y.
      num_heads: heads H.
      config: the sizes within.
      dtype, param_dtype: of the computation (by default that of x and the weights together) and of the weights.
      epsilon: of the norms on the latent and the query.
      implementation: of `jax.nn.dot_product_attention`: None, "xla" or "cudnn". A single token on a cache has a kernel
        of its own where that is supported (see `latent_attention`), unless this is "xla".

    Raises:
      ValueError: for sizes that are not positive, or another implementation.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        config: MLAConfig = KIMI_LINEAR,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        epsilon: float = EPSILON,
        implementation: AttentionImplementation | None = None,
        rngs: nnx.Rngs,
    ):
        if min(in_features, num_heads) < 1:
            raise ValueError(f"in_features and num_heads must be at least 1, got {in_features=}, {num_heads=}")
        check_implementation(implementation)
        self.in_features, self.num_heads, self.config = in_features, num_heads, config
        self.dtype, self.param_dtype, self.implementation = dtype, param_dtype, implementation
        self.scale = (config.key_dim + config.shared_dim) ** -0.5
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        norm = functools.partial(nnx.RMSNorm, epsilon=epsilon, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        queries, values = num_heads * (config.key_dim + config.shared_dim), num_heads * config.value_dim
        if config.query_rank is None:
            self.q_proj = linear(in_features, queries)
        else:
            self.q_a_proj, self.q_b_proj = linear(in_features, config.query_rank), linear(config.query_rank, queries)
            self.q_a_norm = norm(config.query_rank)
        self.kv_a_proj = linear(in_features, config.latent_dim + config.shared_dim)
        self.kv_a_norm = norm(config.latent_dim)
        self.kv_b_proj = linear(config.latent_dim, num_heads * (config.key_dim + config.value_dim))
        if config.output_gate:
            self.g_proj = linear(in_features, values)
        self.o_proj = linear(values, in_features)

    def init_cache(self, batch_size: int, capacity: int) -> AttentionCache:
        """An empty cache for at most `capacity` tokens a row, padding not counted: R + E numbers a token."""
        size = self.config.latent_dim + self.config.shared_dim
        entry = jax.ShapeDtypeStruct((size,), self.dtype or self.param_dtype)
        return init_attention_cache(batch_size, capacity, (entry,))

    def __call__(
        self, x: Float[Array, "B T D"], *, segment_ids: SegmentIds | None = None, cache: AttentionCache | None = None
    ) -> tuple[Float[Array, "B T D"], AttentionCache | None]:
        """The attended tokens and the cache after them; arguments, cache and errors as in `Attention`."""
        check_inputs(x, self.in_features, segment_ids, cache)
        if 0 in x.shape[:2]:
            return no_tokens(x, self.dtype, self.param_dtype), cache
        x = zero_padding(x, segment_ids)
        tokens = locate(segment_ids, x, cache)
        q = self._queries(x)
        latent, shared = jnp.split(self.kv_a_proj(x), [self.config.latent_dim], axis=-1)
        entry = jnp.concatenate([self.kv_a_norm(latent), shared], axis=-1)
        if cache is None:
            o = self._expanded(q, entry, None if segment_ids is None else tokens.mask())
        else:
            cache, mask = append(cache, (entry,), tokens)
            held = cache.entries[0].astype(q.dtype)
            if self._absorbing_pays(x.shape[1]):
                o = self._absorbed(q, held, mask, window(cache, tokens) if x.shape[1] == 1 else None)
            else:
                o = self._expanded(q, held, mask)
        o = settle(o.reshape(*x.shape[:2], -1), tokens, cache)
        o = o * jax.nn.sigmoid(self.g_proj(x)) if self.config.output_gate else o
        return self.o_proj(o), cache

    def _queries(self, x: Float[Array, "B T D"]) -> Float[Array, "B T H P+E"]:
        q = self.q_proj(x) if self.config.query_rank is None else self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        return q.reshape(*x.shape[:2], self.num_heads, -1)

    def _absorbing_pays(self, num_tokens: int) -> bool:
        """Multiply-adds for each place and head: expanded R (P + V) + T (P + E + V), absorbed T (2 R + E)."""
        c = self.config
        expanded = c.latent_dim * (c.key_dim + c.value_dim) + num_tokens * (c.key_dim + c.shared_dim + c.value_dim)
        return num_tokens * (2 * c.latent_dim + c.shared_dim) < expanded

    def _expanded(self, q, entry, mask):
        """Attention over keys and values made from the latents `entry` [B, S, R + E]."""
        latent, shared = jnp.split(entry, [self.config.latent_dim], axis=-1)
        kv = self.kv_b_proj(latent).reshape(*entry.shape[:2], self.num_heads, -1)
        k, v = jnp.split(kv, [self.config.key_dim], axis=-1)
        shared = jnp.broadcast_to(shared[:, :, None], (*k.shape[:3], shared.shape[-1]))
        k = jnp.concatenate([k, shared], axis=-1)
        return attend(q, k, v, mask, scale=self.scale, implementation=self.implementation)

    def _absorbed(self, q, entry, mask, window):
        """The same with W_uk and W_uv moved to the queries' side: every head reads the one latent [B, S, R + E].

        A call of one token sees the places in `window` [B, 2]; where that is None, those of the mask.
        """
        c = self.config
        weight = self.kv_b_proj.kernel[...].astype(q.dtype).reshape(c.latent_dim, self.num_heads, -1)
        W_uk, W_uv = jnp.split(weight, [c.key_dim], axis=-1)
        own, shared = jnp.split(q, [c.key_dim], axis=-1)
        q = jnp.concatenate([jnp.einsum("bthp,rhp->bthr", own, W_uk), shared], axis=-1)
        if window is None:
            entry = entry[:, :, None]
            o = attend(q, entry, entry, mask, scale=self.scale, implementation=self.implementation)[..., : c.latent_dim]
        else:
            implementation = "xla" if self.implementation == "xla" else None
            options = {"value_channels": c.latent_dim, "scale": self.scale, "implementation": implementation}
            o = latent_attention(q[:, 0], entry, window, **options)[:, None]
        return jnp.einsum("bthr,rhv->bthv", o, W_uv)
