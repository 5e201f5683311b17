"""Language models built on the layers."""

from kda_jax.models import hf
from kda_jax.models.config import KINDS, HybridConfig
from kda_jax.models.hybrid import HybridLM
from kda_jax.models.presets import PRESETS

__all__ = ["KINDS", "PRESETS", "HybridConfig", "HybridLM", "hf"]
