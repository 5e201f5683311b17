"""Small models of every published kind, and how two of them are compared."""

import dataclasses
import functools

import jax.numpy as jnp
import layer_cases
import numpy as np
from flax import nnx

from kda_jax.layers import MixerConfig, MLAConfig, MoEConfig, SiTU
from kda_jax.models import HybridConfig, HybridLM, mxfp4

LINEAR = HybridConfig(
    vocab_size=11,
    width=8,
    num_heads=2,
    head_dim=4,
    pattern=("kda", "mla", "kda"),
    mlp_width=6,
    mla=MLAConfig(latent_dim=5, key_dim=4, shared_dim=2, value_dim=3),
    moe=MoEConfig(num_experts=4, top_k=2, expert_width=3, shared_experts=1),
    dense_layers=1,
)
K3 = dataclasses.replace(
    LINEAR,
    width=32,
    mixer=MixerConfig(lower_bound=-5.0, output_gate="full", float32_taps=True),
    mla=MLAConfig(latent_dim=5, key_dim=4, shared_dim=2, value_dim=3, query_rank=6, output_gate=True),
    moe=MoEConfig(num_experts=3, top_k=2, expert_width=32, shared_experts=2, latent_dim=32, storage="mxfp4"),
    situ=SiTU(),
    residual_block=2,
)
CONFIGS = {
    "kimi_linear": LINEAR,
    "bfloat16": dataclasses.replace(LINEAR, dtype="bfloat16", param_dtype="bfloat16"),
    "tied": dataclasses.replace(LINEAR, tie_embeddings=True, moe=None, dense_layers=0),
    "kimi_k3": dataclasses.replace(K3, dtype="bfloat16", param_dtype="bfloat16"),
}


@functools.cache
def build(name):
    """Random parameters; where they are saved as MXFP4, such numbers."""
    rng = np.random.default_rng(0)
    config = CONFIGS[name]
    model = layer_cases.randomize(nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0))), rng)
    for block in model.blocks if config.moe is not None and config.moe.storage else ():
        if hasattr(block.mlp, "experts"):
            for parameter in (block.mlp.experts.gate_proj, block.mlp.experts.up_proj, block.mlp.experts.down_proj):
                codes = rng.integers(256, size=(3, 32, 16), dtype=np.uint8)
                weights = mxfp4.unpack(codes, rng.integers(118, 124, size=(3, 32, 1), dtype=np.uint8))
                parameter[...] = jnp.asarray(weights.swapaxes(1, 2), parameter.dtype)
    return model


def assert_same(model, other):
    """Bitwise, with the same paths and dtypes."""
    for (path, a), (other_path, b) in zip(*(nnx.to_flat_state(nnx.state(m)) for m in (model, other)), strict=True):
        assert path == other_path
        assert a.get_value().dtype == b.get_value().dtype
        np.testing.assert_array_equal(a.get_value(), b.get_value(), err_msg=str(path))
