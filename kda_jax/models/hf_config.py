"""The published config.json of Kimi Linear and Kimi K3 as a `HybridConfig`, and back with nothing lost.

A `HybridConfig` keeps the document that it was read from as `metadata`. Writing starts from there and sets what the
fields say, so that what the model does not use (token ids, context length, vision tower) stays. Both ways check
themselves: a document that would not be written as it was read is refused, and so is a config that the format cannot
hold.
"""

import dataclasses
import itertools
import json
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from kda_jax.layers.mixer import MixerConfig, mixer_config
from kda_jax.layers.mla import MLAConfig
from kda_jax.layers.mlp import SiTU
from kda_jax.layers.moe import MoEConfig
from kda_jax.models import hf_fields
from kda_jax.models.config import HybridConfig, is_floating
from kda_jax.models.hf_fields import LAYER_TYPES

Document = dict[str, Any]

MXFP4 = "mxfp4-pack-quantized"
DTYPES = ("dtype", "torch_dtype")  # the key's new and old name
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
EXPERT_SIZES = ("num_experts", "num_experts_per_token", "moe_intermediate_size")  # null in a dense model
SITU = ("activation_situ_beta", "activation_situ_linear_beta")
NEEDED = (*SIZES, "hidden_act", "linear_attn_config")
KINDS = (  # of JSON's values, where nothing later would tell
    ("an integer", (int,), (*SIZES, *EXPERT_SIZES)),
    ("a number", (int, float), ("routed_scaling_factor", "gate_lower_bound", *SITU)),
    ("true or false", (bool,), ("moe_renormalize", "mla_use_output_gate", "tie_word_embeddings", "use_full_rank_gate")),
    ("a list", (list,), ("kda_layers", "full_attn_layers", "mlp_layer_types")),
    ("an object", (dict,), ("quantization_config",)),
)
NULLABLE = (*EXPERT_SIZES, "gate_lower_bound", "quantization_config")  # null means that the model has none


def from_json(document: Document, dtype: DTypeLike = jnp.float32) -> HybridConfig:
    """The config that a published config.json describes, of the text model where there are others beside it.

    Args:
      document: the parsed file.
      dtype: of the weights where the document names none.

    Raises:
      ValueError: listing every key that is missing, or whose value this library does not have.
    """
    _check_kinds(document)
    config = _read(document, dtype)
    written = _write(config)
    text, written_text = _text(document), _text(written)
    differences = _differences(text, written_text)
    differences += [] if text is document else _differences(document, written)
    if differences:
        raise ValueError("config.json has values that this library does not have:\n  " + "\n  ".join(differences))
    return config


def to_json(config: HybridConfig) -> Document:
    """The published config.json of a config; how it is computed (dtype, remat, implementations) is no part of it.

    Raises:
      ValueError: for a model that the format cannot hold, naming the fields.
    """
    unknown = set(config.layers) - set(LAYER_TYPES)
    if unknown:
        raise ValueError(f"the published format has the layers {', '.join(LAYER_TYPES)}, not {', '.join(unknown)}")
    document = _write(config)
    model = _model(config)
    back = _model(_read(document, config.param_dtype))
    lost = [
        f"{field.name} = {getattr(model, field.name)!r}"
        for field in dataclasses.fields(HybridConfig)
        if field.compare and getattr(model, field.name) != getattr(back, field.name)
    ]
    if lost:
        raise ValueError("the published format cannot hold these fields of the config:\n  " + "\n  ".join(lost))
    return document


def is_k3(config: HybridConfig) -> bool:
    """Whether the model is published as Kimi K3's: a text model beside others, A_log padded, some weights float32."""
    return config.mixer.float32_taps


def _model(config: HybridConfig) -> HybridConfig:
    """The config with what follows from other fields written out, and what is no part of the model at its default."""
    mixer = dataclasses.replace(mixer_config("kda", config.mixer), chunk_size=64, decay_init="published")
    return dataclasses.replace(
        config,
        pattern=config.layers,
        num_layers=None,
        num_value_heads=None if config.num_value_heads == config.num_heads else config.num_value_heads,
        mlp_width=config.mlp_width or 4 * config.width,
        dense_layers=0 if config.moe is None else config.dense_layers,
        mixer=dataclasses.replace(mixer, value_dim=None if mixer.value_dim == config.head_dim else mixer.value_dim),
        dtype=config.param_dtype,
        remat=False,
        implementation=None,
        attention_implementation=None,
    )


def _text(document: Document) -> Document:
    return document.get("text_config", document)


def _differences(document: Document, written: Document) -> list[str]:
    return [
        f"{key} is {value!r}, expected {written.get(key)!r}"
        for key, value in document.items()
        if key != "text_config" and value != written.get(key)
    ]


def _check_object(name: str, section: Any) -> None:
    if not isinstance(section, dict):
        raise ValueError(f"{name} must be an object, got {section!r}")


def _check_kinds(document: Any) -> None:
    """Raises ValueError where a section is no object, a value not of its kind or the dtype none of JAX's."""
    _check_object("config.json", document)
    text = document.get("text_config", document)
    _check_object("text_config", text)
    linear = text.get("linear_attn_config", {})
    _check_object("linear_attn_config", linear)
    for expected, kinds, keys in KINDS:
        for section, key in itertools.product((document, text, linear), keys):
            value = section.get(key)
            if key in section and type(value) not in kinds and not (value is None and key in NULLABLE):
                raise ValueError(f"{key} must be {expected}, got {value!r}")
    for name in (part[key] for part in (text, document) for key in DTYPES if part.get(key)):
        if not is_floating(name):
            raise ValueError(f"dtype must be a floating one, got {name!r}")


def _read(document: Document, dtype: DTypeLike) -> HybridConfig:
    """The config by the document's own keys, without the check of what it does not read."""
    text = _text(document)
    missing = [] if "model_type" in document else ["model_type"]
    missing += [key for key in NEEDED if key not in text]
    linear = text.get("linear_attn_config", {})
    missing += [
        f"linear_attn_config.{key}"
        for key in ("head_dim", "num_heads", "short_conv_kernel_size", "kda_layers", "full_attn_layers")
        if key not in linear
    ]
    sparse = text.get("num_experts") is not None
    if sparse:
        missing += [key for key in ("num_experts_per_token", "moe_intermediate_size") if key not in text]
        if "first_k_dense_replace" not in text and "mlp_layer_types" not in text:
            missing.append("first_k_dense_replace")
    situ = text.get("hidden_act") == "situ"
    if situ:
        missing += [key for key in SITU if key not in text]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    layers = linear["kda_layers"] + linear["full_attn_layers"]
    count = text["num_hidden_layers"]
    if len(layers) != count or not all(layer in layers for layer in range(1, count + 1)):
        raise ValueError(
            "linear_attn_config.kda_layers and full_attn_layers must name each of the layers 1 to "
            f"{count}, got {linear['kda_layers']} and {linear['full_attn_layers']}"
        )
    names = [part[key] for part in (text, document) for key in DTYPES if part.get(key)]
    dtype = jnp.dtype(names[0] if names else dtype)
    return HybridConfig(
        vocab_size=text["vocab_size"],
        width=text["hidden_size"],
        num_heads=linear["num_heads"],
        head_dim=linear["head_dim"],
        pattern=tuple("kda" if layer in linear["kda_layers"] else "mla" for layer in range(1, count + 1)),
        mlp_width=text["intermediate_size"],
        mixer=MixerConfig(
            lower_bound=linear.get("gate_lower_bound"),
            conv_width=linear["short_conv_kernel_size"],
            output_gate="full" if linear.get("use_full_rank_gate") else "low_rank",
            float32_taps=text is not document,
        ),
        mla=MLAConfig(
            latent_dim=text["kv_lora_rank"],
            key_dim=text["qk_nope_head_dim"],
            shared_dim=text["qk_rope_head_dim"],
            value_dim=text["v_head_dim"],
            query_rank=text.get("q_lora_rank"),
            output_gate=text.get("mla_use_output_gate", False),
        ),
        moe=_read_moe(document) if sparse else None,
        dense_layers=_dense_layers(text) if sparse else 0,
        situ=SiTU(*(text[key] for key in SITU)) if situ else None,
        residual_block=text.get("attn_res_block_size") or None,
        tie_embeddings=text.get("tie_word_embeddings", False),
        dtype=dtype,
        param_dtype=dtype,
        metadata=json.dumps(document),
    )


def _read_moe(document: Document) -> MoEConfig:
    text = _text(document)
    quantization = document.get("quantization_config") or text.get("quantization_config")
    if quantization is not None and quantization.get("format") != MXFP4:
        raise ValueError(f"quantization_config.format must be {MXFP4!r}, got {quantization.get('format')!r}")
    return MoEConfig(
        num_experts=text["num_experts"],
        top_k=text["num_experts_per_token"],
        expert_width=text["moe_intermediate_size"],
        shared_experts=text.get("num_shared_experts") or 0,
        num_groups=text.get("num_expert_group", 1),
        top_groups=text.get("topk_group", 1),
        renormalize=text.get("moe_renormalize", True),
        scaling=text.get("routed_scaling_factor", 1.0),
        latent_dim=text.get("routed_expert_hidden_size"),
        storage=None if quantization is None else "mxfp4",
    )


def _dense_layers(text: Document) -> int:
    if "mlp_layer_types" in text:
        return text["mlp_layer_types"].count("dense")
    return text["first_k_dense_replace"]


def _write(config: HybridConfig) -> Document:
    """The config's document, with its fields set over what its metadata say."""
    document = json.loads(config.metadata) or _new(config)
    text = _text(document)
    linear = text.setdefault("linear_attn_config", {})
    dtype = jnp.dtype(config.param_dtype).name
    if config.moe is not None and "mlp_layer_types" not in text:
        text["first_k_dense_replace"] = config.dense_layers
    hf_fields.text(config).set(text)
    hf_fields.linear(config).set(linear)
    for part in (document, text):
        part.update({key: dtype for key in DTYPES if part.get(key) is not None})
    if text is not document:
        hf_fields.Fields(implied={"model_type": "kimi_k3"}).set(document)
    quantized = [part for part in (document, text) if part.get("quantization_config") is not None]
    if config.moe is None or config.moe.storage is None:
        for part in quantized:
            part.pop("quantization_config", None)
    elif not quantized:
        document["quantization_config"] = {"quant_method": "compressed-tensors", "format": MXFP4, "group_size": 32}
    return document


def _new(config: HybridConfig) -> Document:
    """A document that names the architecture, and every key whose absence readers take differently."""
    text: Document = {"model_type": "kimi_linear", "dtype": "", "q_lora_rank": None, "mla_use_nope": True}
    text |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if config.moe is not None:
        text |= dict.fromkeys(("num_shared_experts", "num_expert_group", "topk_group", "moe_renormalize"))
        text |= dict.fromkeys(("routed_scaling_factor", "moe_router_activation_func", "moe_layer_freq"))
    if is_k3(config):
        return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}
    return {"architectures": ["KimiLinearForCausalLM"], **text}
