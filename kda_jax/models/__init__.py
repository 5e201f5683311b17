"""Language models built on the layers."""

from kda_jax.models.config import KINDS, HybridConfig
from kda_jax.models.hybrid import HybridLM

__all__ = ["KINDS", "HybridConfig", "HybridLM"]
