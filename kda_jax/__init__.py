"""Kimi Delta Attention in JAX: exact operators, Flax layers, hybrid models."""

from kda_jax.ops.api import kda, kda_raw
from kda_jax.ops.decode import kda_raw_step, kda_step
from kda_jax.ops.gates import Decay, bounded_decay, l2_normalize, softplus_decay, write_strength
from kda_jax.ops.states import kda_with_states

__all__ = [
    "Decay",
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
