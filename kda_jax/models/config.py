"""What a hybrid language model consists of, as data."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from kda_jax.layers.attention import AttentionImplementation
from kda_jax.layers.mixer import MIXERS, MixerConfig
from kda_jax.layers.mla import MLAConfig
from kda_jax.layers.mlp import SiTU
from kda_jax.layers.moe import MoEConfig
from kda_jax.layers.sizes import check_sizes

KINDS = (*MIXERS, "attention", "mla")
"""What a layer of the pattern may be: a mixer of `kda_jax.layers.MIXERS`, full attention, or latent attention."""


def is_floating(dtype: Any) -> bool:
    """Whether it is a floating dtype or the name of one; None, which NumPy takes for float64, is none."""
    try:
        return dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except (TypeError, ValueError):
        return False


@dataclasses.dataclass(frozen=True)
class HybridConfig:
    """Sizes and choices of a `HybridLM`.

    Attributes:
      vocab_size: number of tokens.
      width: of the residual stream.
      num_heads, head_dim: of every mixer but MLA, whose head sizes are in `mla`.
      pattern: the layers in order, each one of `KINDS`, repeated until there are `num_layers`:
        ("kda", "kda", "kda", "mla") is the report's 3:1 hybrid.
      num_layers: by default the length of the pattern; the last repetition may be cut.
      num_value_heads: of the linear mixers, a multiple of num_heads; by default num_heads.
      mlp_width: hidden width of the dense gated MLP, by default 4 * width.
      mixer: choices of the linear mixers; the name in the pattern sets the fields that define it.
      mla: sizes of the MLA layers.
      moe: experts in place of the dense MLP, in all but the first `dense_layers` layers; None for dense alone.
      situ: bounds of every MLP's activation (Kimi K3); None for SwiGLU.
      residual_block: layers in a block of attention residuals (Kimi K3); None for plain residuals.
      rope_theta: base of rotary positions in the "attention" layers; None for none (NoPE).
      tie_embeddings: the output projection is the embedding's transpose.
      dtype, param_dtype: of the computation and of the weights; A_log, dt_bias, decays and states are always float32.
      remat: recompute each layer in the backward instead of storing its intermediates. Where KDA runs on its kernels
        their outputs are stored, and only the backward's run then.
      implementation: of the KDA operator; attention_implementation: of `jax.nn.dot_product_attention`. None chooses.
      metadata: what else a checkpoint's config.json says, as JSON; kept for saving, no part of the model.

    Raises:
      ValueError: for a value out of range, naming the field.
    """

    vocab_size: int
    width: int
    num_heads: int
    head_dim: int
    pattern: tuple[str, ...]
    num_layers: int | None = None
    num_value_heads: int | None = None
    mlp_width: int | None = None
    mixer: MixerConfig = dataclasses.field(default_factory=MixerConfig)
    mla: MLAConfig = dataclasses.field(default_factory=MLAConfig)
    moe: MoEConfig | None = None
    dense_layers: int = 0
    situ: SiTU | None = None
    residual_block: int | None = None
    rope_theta: float | None = None
    tie_embeddings: bool = False
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    remat: bool = False
    implementation: str | tuple[str, ...] | None = None
    attention_implementation: AttentionImplementation | None = None
    metadata: str = dataclasses.field(default="{}", compare=False, repr=False)

    def __post_init__(self) -> None:
        required = ("vocab_size", "width", "num_heads", "head_dim")
        optional = ("num_layers", "num_value_heads", "mlp_width", "residual_block")
        check_sizes(self, {**dict.fromkeys(required + optional, 1), "dense_layers": 0}, optional)
        if not self.pattern or isinstance(self.pattern, str):
            raise ValueError(f"HybridConfig.pattern must be a sequence of layer kinds, got {self.pattern!r}")
        object.__setattr__(self, "pattern", tuple(self.pattern))
        for kind in self.pattern:
            if kind not in KINDS:
                raise ValueError(f"HybridConfig.pattern: unknown layer kind {kind!r}; the kinds are {', '.join(KINDS)}")
        if self.num_value_heads is not None and self.num_value_heads % self.num_heads:
            raise ValueError(
                f"HybridConfig.num_value_heads must be a multiple of {self.num_heads=}, got {self.num_value_heads}"
            )
        if self.rope_theta is not None and self.rope_theta <= 0:
            raise ValueError(f"HybridConfig.rope_theta must be None or above 0, got {self.rope_theta}")
        if self.rope_theta is not None and "attention" in self.pattern and self.head_dim % 2:
            raise ValueError(f"HybridConfig.rope_theta needs an even head_dim, got {self.head_dim=}")
        for name in ("dtype", "param_dtype"):
            value = getattr(self, name)
            if not is_floating(value):
                raise ValueError(f"HybridConfig.{name} must be a floating dtype, got {value!r}")
            object.__setattr__(self, name, jnp.dtype(value))

    @property
    def layers(self) -> tuple[str, ...]:
        """The kind of every layer, in order."""
        count = len(self.pattern) if self.num_layers is None else self.num_layers
        return tuple(self.pattern[i % len(self.pattern)] for i in range(count))
