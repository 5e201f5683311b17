"""The published models as data, and small twins of the same parts that train on a CPU or on one GPU.

HybridLM(presets.KIMI_LINEAR_SMALL, rngs=nnx.Rngs(0))
"""

import dataclasses
import json
from typing import Any

from kda_jax.layers.mixer import MixerConfig
from kda_jax.layers.mla import MLAConfig
from kda_jax.layers.mlp import SiTU
from kda_jax.layers.moe import MoEConfig
from kda_jax.models.config import HybridConfig

_TOKENS = {"bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839}

KIMI_LINEAR_48B = HybridConfig(
    vocab_size=163840,
    width=2304,
    num_heads=32,
    head_dim=128,
    pattern=("kda", "kda", "kda", "mla") * 6 + ("kda", "kda", "mla"),
    mlp_width=9216,
    mla=MLAConfig(latent_dim=512, key_dim=128, shared_dim=64, value_dim=128),
    moe=MoEConfig(num_experts=256, top_k=8, expert_width=1024, shared_experts=1, scaling=2.446),
    dense_layers=1,
    dtype="bfloat16",
    param_dtype="bfloat16",
    metadata=json.dumps(
        {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "dtype": "bfloat16",
            "model_max_length": 1048576,
            "initializer_range": 0.02,
            "moe_router_activation_func": "sigmoid",
            "moe_layer_freq": 1,
            "mla_use_nope": True,
            "use_grouped_topk": True,
            "num_expert_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            **_TOKENS,
        }
    ),
)
"""Kimi-Linear-48B-A3B (arXiv 2510.26692)."""

KIMI_K3 = HybridConfig(
    vocab_size=163840,
    width=7168,
    num_heads=96,
    head_dim=128,
    pattern=("kda", "kda", "kda", "mla") * 23 + ("mla",),
    mlp_width=33792,
    mixer=MixerConfig(lower_bound=-5.0, output_gate="full", float32_taps=True),
    mla=MLAConfig(latent_dim=512, key_dim=128, shared_dim=64, value_dim=128, query_rank=1536, output_gate=True),
    moe=MoEConfig(num_experts=896, top_k=16, expert_width=3072, shared_experts=2, latent_dim=3584, storage="mxfp4"),
    dense_layers=1,
    situ=SiTU(beta=4.0, linear_beta=25.0),
    residual_block=12,
    dtype="bfloat16",
    param_dtype="bfloat16",
    metadata=json.dumps(
        {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "model_type": "kimi_k3",
            "dtype": "bfloat16",
            **_TOKENS,
            "text_config": {
                "model_type": "kimi_linear",
                "max_position_embeddings": 1048576,
                "moe_router_activation_func": "sigmoid",
                "moe_layer_freq": 1,
                "mla_use_nope": True,
                "use_grouped_topk": True,
                "topk_method": "noaux_tc",
                "num_nextn_predict_layers": 0,
            },
        }
    ),
)
"""The text model of Kimi K3 (arXiv 2607.24653); its experts are MXFP4 in the checkpoint."""


def _twin(published: HybridConfig, **changes: Any) -> HybridConfig:
    """The same parts for bytes, in float32 and small."""
    return dataclasses.replace(
        published,
        vocab_size=256,
        width=128,
        num_heads=2,
        head_dim=32,
        mlp_width=256,
        dtype="float32",
        param_dtype="float32",
        metadata="{}",
        **changes,
    )


PRESETS = {
    "kimi_linear_48b": KIMI_LINEAR_48B,
    "kimi_k3": KIMI_K3,
    "kimi_linear_small": _twin(
        KIMI_LINEAR_48B,
        pattern=("kda", "kda", "kda", "mla"),
        mla=MLAConfig(latent_dim=64, key_dim=32, shared_dim=16, value_dim=32),
        moe=MoEConfig(num_experts=8, top_k=2, expert_width=64, shared_experts=1, scaling=2.446),
    ),
    "kimi_k3_small": _twin(
        KIMI_K3,
        pattern=("kda", "kda", "kda", "mla", "mla"),
        mla=MLAConfig(latent_dim=64, key_dim=32, shared_dim=16, value_dim=32, query_rank=48, output_gate=True),
        moe=MoEConfig(num_experts=8, top_k=2, expert_width=64, shared_experts=2, latent_dim=64),
        residual_block=2,
    ),
}
"""By name. Small twins have every part of the published model; experts of the small K3 are saved as they are held."""
