"""A decoder-only language model whose layers mix linear and softmax attention in any pattern."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kda_jax.layers.attention import Attention
from kda_jax.layers.cache import AttentionCache, DeltaCache
from kda_jax.layers.kda import KimiDeltaAttention
from kda_jax.layers.mixer import mixer_config
from kda_jax.layers.mla import LatentAttention
from kda_jax.layers.mlp import GatedMLP, swiglu
from kda_jax.layers.moe import MixtureOfExperts, balanced_bias
from kda_jax.layers.norm import EPSILON
from kda_jax.layers.residual import AttentionResidual, Stream
from kda_jax.models.config import HybridConfig
from kda_jax.ops.types import RESULT_NAMES, SegmentIds

LayerCache = DeltaCache | AttentionCache
Cache = tuple[LayerCache, ...]
Load = Int[Array, " E"]


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


def build_residual(config: HybridConfig, rngs: nnx.Rngs) -> AttentionResidual | None:
    """What one sublayer reads the stream by; None for its total."""
    if config.residual_block is None:
        return None
    return AttentionResidual(config.width, param_dtype=config.param_dtype, rngs=rngs)


class Block(nnx.Module):
    """x <- x + mixer(norm(x)); x <- x + mlp(norm(x)).

    With attention residuals, each sublayer adds to the stream's total but reads a mixture of the stream's blocks.
    """

    def __init__(self, index: int, config: HybridConfig, *, rngs: nnx.Rngs):
        common: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype, "rngs": rngs}
        self.mixer_norm = nnx.RMSNorm(config.width, epsilon=EPSILON, **common)
        self.mixer = build_mixer(config.layers[index], config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, epsilon=EPSILON, **common)
        activation = swiglu if config.situ is None else config.situ
        self.mlp: GatedMLP | MixtureOfExperts
        if config.moe is None or index < config.dense_layers:
            self.mlp = GatedMLP(config.width, config.mlp_width or 4 * config.width, activation=activation, **common)
        else:
            self.mlp = MixtureOfExperts(config.width, config.moe, activation=activation, **common)
        self.mixer_residual, self.mlp_residual = build_residual(config, rngs), build_residual(config, rngs)
        self.begins_block = config.residual_block is not None and index % config.residual_block == 0

    def __call__(
        self, stream: Stream, segment_ids: SegmentIds | None, cache: LayerCache | None
    ) -> tuple[Stream, LayerCache | None, Load | None]:
        """The stream and the cache after the block, and how many tokens chose each expert, None for a dense MLP."""
        x = stream.read(self.mixer_residual)
        stream = stream.begin_block() if self.begins_block else stream
        mixed, cache = self.mixer(self.mixer_norm(x), segment_ids=segment_ids, cache=cache)
        stream = stream.add(mixed)
        x = self.mlp_norm(stream.read(self.mlp_residual))
        if isinstance(self.mlp, GatedMLP):
            return stream.add(self.mlp(x)), cache, None
        y, load = self.mlp(x, segment_ids=segment_ids)
        return stream.add(y), cache, load


def _recompute(block: Block, *inputs: Any) -> Any:
    """The block's outputs, computed again in the backward; all but what kernels of KDA made, which do not run twice.

    Unlike with `nnx.remat`, variables outside the gradient may come from an outer trace: the block changes none.
    """
    graphdef, state = nnx.split(block)
    policy = jax.checkpoint_policies.save_only_these_names(*RESULT_NAMES)
    return jax.checkpoint(lambda state, *inputs: nnx.merge(graphdef, state)(*inputs), policy=policy)(state, *inputs)


def parameter_counts(model: "HybridLM") -> tuple[int, int]:
    """How many parameters a model has, and how many of them compute with a token.

    Those are all but the embedding, which is looked up, and the experts beyond the `top_k` that a token is sent to.
    """
    total = active = 0
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        size = variable.get_value().size
        total += size
        if path[0] == "embed" and not model.config.tie_embeddings:
            continue
        moe = model.config.moe
        active += size * moe.top_k // moe.num_experts if moe is not None and "experts" in path else size
    return total, active


class HybridLM(nnx.Module):
    """Embedding, pre-norm blocks of a mixer and an MLP or experts, RMSNorm, logits (Kimi Linear, section 4).

    Positions come from the linear mixers' decay and convolutions (and from `rope_theta`, if set).

    Args:
      config: see `HybridConfig`.
    """

    def __init__(self, config: HybridConfig, *, rngs: nnx.Rngs):
        common: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype, "rngs": rngs}
        self.config = config
        self.embed = nnx.Embed(config.vocab_size, config.width, **common)
        self.blocks = nnx.List([Block(index, config, rngs=rngs) for index in range(len(config.layers))])
        self.residual = build_residual(config, rngs)
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
        logits, cache, _ = self._forward(tokens, segment_ids, cache)
        return logits, cache

    def logits_and_loads(
        self, tokens: Int[Array, "B T"], *, segment_ids: SegmentIds | None = None
    ) -> tuple[Float[Array, "B T vocab"], tuple[Load, ...]]:
        """The logits of a plain call, and for each layer of experts how many tokens chose each, [E] int32."""
        logits, _, loads = self._forward(tokens, segment_ids, None)
        return logits, loads

    def balance(self, loads: tuple[Load, ...], rate: float = 1e-3) -> None:
        """Moves the routers' correction biases towards equal loads: after a training step, see `balanced_bias`."""
        routers = [block.mlp.router for block in self.blocks if isinstance(block.mlp, MixtureOfExperts)]
        for router, load in zip(routers, loads, strict=True):
            router.bias[...] = balanced_bias(router.bias[...], load, rate)

    def _forward(
        self, tokens: Int[Array, "B T"], segment_ids: SegmentIds | None, cache: Cache | None
    ) -> tuple[Float[Array, "B T vocab"], Cache | None, tuple[Load, ...]]:
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers [B, T], got {tokens.dtype} {tokens.shape}")
        if cache is not None and len(cache) != len(self.blocks):
            raise ValueError(f"cache must have one entry for each of {len(self.blocks)} layers, got {len(cache)}")
        apply = _recompute if self.config.remat else Block.__call__
        stream = Stream(self.embed(tokens))
        caches: list[Any] = []
        loads: list[Load] = []
        for i, block in enumerate(self.blocks):
            stream, layer_cache, load = apply(block, stream, segment_ids, None if cache is None else cache[i])
            caches.append(layer_cache)
            loads.extend([] if load is None else [load])
        x = self.norm(stream.read(self.residual))
        logits = self.embed.attend(x) if self.config.tie_embeddings else self.lm_head(x)
        return logits.astype(jnp.float32), None if cache is None else tuple(caches), tuple(loads)
