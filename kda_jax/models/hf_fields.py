"""The fields of a `HybridConfig` under the keys of the published config.json."""

import dataclasses
from typing import Any

from kda_jax.layers.norm import EPSILON
from kda_jax.models.config import HybridConfig

LAYER_TYPES = {"kda": "linear_attention", "mla": "full_attention"}


@dataclasses.dataclass(frozen=True)
class Fields:
    """Keys and values of one section.

    Attributes:
      needed: always written.
      optional: (value, what its absence means); written where that differs, or the key stands already.
      implied: follow from others, or are all that this library has; written where the key stands already.
    """

    needed: dict[str, Any] = dataclasses.field(default_factory=dict)
    optional: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    implied: dict[str, Any] = dataclasses.field(default_factory=dict)

    def set(self, section: dict[str, Any]) -> None:
        """Writes them over what the section says."""
        section.update(self.needed)
        section.update({k: value for k, (value, absent) in self.optional.items() if k in section or value != absent})
        section.update({k: value for k, value in self.implied.items() if k in section})


def linear(config: HybridConfig) -> Fields:
    """Those of the section `linear_attn_config`."""
    layers = {kind: [i for i, layer in enumerate(config.layers, 1) if layer == kind] for kind in LAYER_TYPES}
    needed = {
        "head_dim": config.head_dim,
        "num_heads": config.num_heads,
        "short_conv_kernel_size": config.mixer.conv_width,
        "kda_layers": layers["kda"],
        "full_attn_layers": layers["mla"],
    }
    optional = {
        "use_full_rank_gate": (config.mixer.output_gate == "full", False),
        "gate_lower_bound": (config.mixer.lower_bound, None),
    }
    return Fields(needed, optional)


def text(config: HybridConfig) -> Fields:
    """Those of the text model itself."""
    mla, situ = config.mla, config.situ
    needed = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width or 4 * config.width,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "kv_lora_rank": mla.latent_dim,
        "qk_nope_head_dim": mla.key_dim,
        "qk_rope_head_dim": mla.shared_dim,
        "v_head_dim": mla.value_dim,
        "hidden_act": "silu" if situ is None else "situ",
        "rms_norm_eps": EPSILON,
        "tie_word_embeddings": config.tie_embeddings,
    }
    if situ is not None:
        needed |= {"activation_situ_beta": situ.beta, "activation_situ_linear_beta": situ.linear_beta}
    optional = {
        "q_lora_rank": (mla.query_rank, None),
        "mla_use_output_gate": (mla.output_gate, False),
        "attn_res_block_size": (config.residual_block or 0, 0),
    }
    implied = {
        "model_type": "kimi_linear",
        "mla_use_nope": True,
        "rope_scaling": None,
        "sliding_window": None,
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
        "qk_head_dim": mla.key_dim + mla.shared_dim,
        "layer_types": [LAYER_TYPES[kind] for kind in config.layers],
        "linear_head_dim": config.head_dim,
        "linear_num_heads": config.num_heads,
        "linear_conv_kernel_dim": config.mixer.conv_width,
    }
    return Fields(needed, optional | _moe(config), implied | _moe_aliases(config))


def _moe(config: HybridConfig) -> dict[str, tuple[Any, Any]]:
    moe = config.moe
    if moe is None:
        return {"num_experts": (None, None)}
    return {
        "num_experts": (moe.num_experts, None),
        "num_experts_per_token": (moe.top_k, None),
        "moe_intermediate_size": (moe.expert_width, None),
        "num_shared_experts": (moe.shared_experts, 0),
        "num_expert_group": (moe.num_groups, 1),
        "topk_group": (moe.top_groups, 1),
        "moe_renormalize": (moe.renormalize, True),
        "routed_scaling_factor": (moe.scaling, 1.0),
        "routed_expert_hidden_size": (moe.latent_dim, None),
        "latent_moe_use_norm": (moe.latent_dim is not None, False),
    }


def _moe_aliases(config: HybridConfig) -> dict[str, Any]:
    if config.moe is None:
        return {}
    count = len(config.layers)
    implied = {
        "mlp_layer_types": ["dense" if i < config.dense_layers else "sparse" for i in range(count)],
        "first_k_dense_replace": config.dense_layers,
        "moe_router_activation_func": "sigmoid",
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
    }
    return implied if config.moe.num_groups == 1 else implied | {"use_grouped_topk": True}
