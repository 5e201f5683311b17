"""A decoder-only language model whose layers mix linear and softmax attention in any pattern."""

from typing import Any, Protocol

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kda_jax.layers.attention import Attention
from kda_jax.layers.cache import AttentionCache, DeltaCache
from kda_jax.layers.kda import KimiDeltaAttention
from kda_jax.layers.mixer import mixer_config
from kda_jax.layers.mla import LatentAttention
from kda_jax.layers.mlp import SwiGLU
from kda_jax.layers.norm import EPSILON
from kda_jax.models.config import HybridConfig
from kda_jax.ops.types import SegmentIds

LayerCache = DeltaCache | AttentionCache
Cache = tuple[LayerCache, ...]


class TokenMixer(Protocol):
    """What a block asks of its mixer; each kind has a cache type of its own."""

    def init_cache(self, batch_size: int, capacity: int) -> LayerCache: ...

    def __call__(self, x: Array, *, segment_ids: SegmentIds | None, cache: Any) -> tuple[Array, Any]: ...


def build_mixer(kind: str, config: HybridConfig, rngs: nnx.Rngs) -> TokenMixer:
    """The token mixer `kind`, one of `KINDS`, with the sizes of `config`."""
    common: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype, "rngs": rngs}
    heads = (config.width, config.num_heads, config.head_dim)
    if kind == "attention":
        return Attention(*heads, rope_theta=config.rope_theta, implementation=config.attention_implementation, **common)
    if kind == "mla":
        return LatentAttention(
            config.width, config.num_heads, config.mla, implementation=config.attention_implementation, **common
        )
    mixer = mixer_config(kind, config.mixer)
    implementation = config.implementation if mixer.is_kda else None
    return KimiDeltaAttention(
        *heads, num_value_heads=config.num_value_heads, mixer=mixer, implementation=implementation, **common
    )


class Block(nnx.Module):
    """x <- x + mixer(norm(x)); x <- x + mlp(norm(x))."""

    def __init__(self, kind: str, config: HybridConfig, *, rngs: nnx.Rngs):
        common: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype, "rngs": rngs}
        self.mixer_norm = nnx.RMSNorm(config.width, epsilon=EPSILON, **common)
        self.mixer = build_mixer(kind, config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, epsilon=EPSILON, **common)
        self.mlp = SwiGLU(config.width, config.mlp_width or 4 * config.width, **common)

    def __call__(
        self, x: Float[Array, "B T D"], segment_ids: SegmentIds | None, cache: LayerCache | None
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        mixed, cache = self.mixer(self.mixer_norm(x), segment_ids=segment_ids, cache=cache)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class HybridLM(nnx.Module):
    """Embedding, pre-norm blocks of a mixer and a SwiGLU, RMSNorm, logits (Kimi Linear, section 4, with dense MLPs).

    Positions come from the linear mixers' decay and convolutions (and from `rope_theta`, if set).

    Args:
      config: see `HybridConfig`.
    """

    def __init__(self, config: HybridConfig, *, rngs: nnx.Rngs):
        common: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype, "rngs": rngs}
        self.config = config
        self.embed = nnx.Embed(config.vocab_size, config.width, **common)
        self.blocks = nnx.List([Block(kind, config, rngs=rngs) for kind in config.layers])
        self.norm = nnx.RMSNorm(config.width, epsilon=EPSILON, **common)
        if not config.tie_embeddings:
            small = nnx.initializers.normal(0.02)  # the published deviation: training starts near the uniform guess
            self.lm_head = nnx.Linear(config.width, config.vocab_size, use_bias=False, kernel_init=small, **common)

    def init_cache(self, batch_size: int, capacity: int) -> Cache:
        """Every layer's empty cache. Attention layers hold at most `capacity` tokens a row, padding not counted."""
        return tuple(block.mixer.init_cache(batch_size, capacity) for block in self.blocks)

    def __call__(
        self, tokens: Int[Array, "B T"], *, segment_ids: SegmentIds | None = None, cache: Cache | None = None
    ) -> tuple[Float[Array, "B T vocab"], Cache | None]:
        """Next-token logits, float32, and the cache after the tokens; a call without a cache returns None for it.

        Args:
          tokens: [B, T] integers.
          segment_ids: [B, T] integers; equal ids are one sequence, 0 is padding, whose logits mean nothing.
          cache: from `init_cache` or an earlier call: one call prefills, continues a prefill, and decodes.

        Raises:
          ValueError: for a wrong shape or dtype, a cache of another length, or one that overflows (see `Attention`).
        """
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers [B, T], got {tokens.dtype} {tokens.shape}")
        if cache is not None and len(cache) != len(self.blocks):
            raise ValueError(f"cache must have one entry for each of {len(self.blocks)} layers, got {len(cache)}")
        apply = nnx.remat(Block.__call__) if self.config.remat else Block.__call__
        x = self.embed(tokens)
        caches: list[Any] = []
        for i, block in enumerate(self.blocks):
            x, layer_cache = apply(block, x, segment_ids, None if cache is None else cache[i])
            caches.append(layer_cache)
        x = self.norm(x)
        logits = self.embed.attend(x) if self.config.tie_embeddings else self.lm_head(x)
        return logits.astype(jnp.float32), None if cache is None else tuple(caches)
