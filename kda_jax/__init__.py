"""Kimi Delta Attention in JAX: exact operators, Flax layers, hybrid models."""

import importlib

from kda_jax.ops.api import kda, kda_raw
from kda_jax.ops.decode import kda_raw_step, kda_step
from kda_jax.ops.gates import Decay, bounded_decay, l2_normalize, softplus_decay, write_strength
from kda_jax.ops.states import kda_with_states

# Flax is imported when a name of these is first used: the operators do without it.
_FLAX = {
    "KimiDeltaAttention": "kda_jax.layers.kda",
    "HybridConfig": "kda_jax.models.config",
    "HybridLM": "kda_jax.models.hybrid",
}

__all__ = [
    "Decay",
    "HybridConfig",
    "HybridLM",
    "KimiDeltaAttention",
    "bounded_decay",
    "kda",
    "kda_raw",
    "kda_raw_step",
    "kda_step",
    "kda_with_states",
    "l2_normalize",
    "softplus_decay",
    "write_strength",
]


def __getattr__(name: str) -> object:
    if name in _FLAX:
        return getattr(importlib.import_module(_FLAX[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
