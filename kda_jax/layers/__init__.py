"""Flax layers built on the operators: NNX modules, and in `linen` the same for Linen."""

from kda_jax.layers import linen
from kda_jax.layers.attention import Attention
from kda_jax.layers.cache import AttentionCache, DeltaCache
from kda_jax.layers.conv import ShortConvolution
from kda_jax.layers.kda import KimiDeltaAttention
from kda_jax.layers.mixer import MIXERS, MixerConfig, mixer_config
from kda_jax.layers.mla import LatentAttention, MLAConfig
from kda_jax.layers.mlp import GatedMLP, SiTU
from kda_jax.layers.moe import MixtureOfExperts, MoEConfig, balanced_bias
from kda_jax.layers.norm import GatedRMSNorm
from kda_jax.layers.residual import AttentionResidual

__all__ = [
    "MIXERS",
    "Attention",
    "AttentionCache",
    "AttentionResidual",
    "DeltaCache",
    "GatedMLP",
    "GatedRMSNorm",
    "KimiDeltaAttention",
    "LatentAttention",
    "MLAConfig",
    "MixerConfig",
    "MixtureOfExperts",
    "MoEConfig",
    "ShortConvolution",
    "SiTU",
    "balanced_bias",
    "linen",
    "mixer_config",
]
