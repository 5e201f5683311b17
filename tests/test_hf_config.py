"""config.json to a HybridConfig and back: nothing lost, nothing silently ignored."""

import dataclasses
import json
import pathlib

import pytest

from kda_jax.layers import MixerConfig, MoEConfig
from kda_jax.models import hf_config
from kda_jax.models.presets import PRESETS

GOLDEN = pathlib.Path(__file__).parent / "golden"


def document(name):
    return json.loads((GOLDEN / name / "config.json").read_text())


def test_fields():
    """The published twins of each kind, read by hand."""
    config = hf_config.from_json(document("kimi_linear_tiny"))
    assert (config.width, config.num_heads, config.head_dim, config.mlp_width) == (48, 3, 16, 96)
    assert config.layers == ("kda", "kda", "kda", "mla")
    assert config.moe == MoEConfig(num_experts=6, top_k=2, expert_width=24, shared_experts=1, scaling=2.446)
    assert (config.dense_layers, config.situ, config.residual_block) == (1, None, None)
    assert config.mixer == MixerConfig()

    config = hf_config.from_json(document("kimi_k3_tiny"))
    assert config.mixer == MixerConfig(lower_bound=-5.0, output_gate="full", float32_taps=True)
    assert (config.mla.query_rank, config.mla.output_gate, config.residual_block) == (24, True, 4)
    assert (config.situ.beta, config.situ.linear_beta) == (4.0, 25.0)
    assert (config.moe.latent_dim, config.moe.storage, config.moe.shared_experts) == (32, "mxfp4", 2)


@pytest.mark.parametrize("name", ["kimi_linear_tiny", "kimi_k3_tiny"])
def test_unknown_keys_stay(name):
    there = document(name) | {"eos_token_id": [1, 2], "vision_config": {"depth": 3}}
    there.setdefault("text_config", there)
    text = there.pop("text_config") if name == "kimi_linear_tiny" else there["text_config"]
    text |= {"rope_theta": 1e6, "rope_scaling": None, "sliding_window": None}
    assert hf_config.to_json(hf_config.from_json(there)) == there


@pytest.mark.parametrize("name", ["kimi_linear_tiny", "kimi_k3_tiny"])
def test_null_is_absence_and_stays(name):
    there = document(name) | {"dtype": None, "torch_dtype": None}
    text = there.get("text_config", there)
    text |= {"dtype": None, "torch_dtype": None}
    if name == "kimi_linear_tiny":
        there["quantization_config"] = None
    else:
        text["quantization_config"] = None
    config = hf_config.from_json(there, "bfloat16")
    assert (config.dtype, config.param_dtype) == ("bfloat16", "bfloat16")
    assert hf_config.to_json(config) == there


def test_changes_reach_every_alias():
    """Two layers more, another top-k, no experts in the first two, half the heads: wherever the file says so."""
    config = hf_config.from_json(document("kimi_linear_tiny"))
    changed = dataclasses.replace(
        config,
        pattern=("kda", "mla") * 3,
        num_heads=6,
        dense_layers=2,
        moe=dataclasses.replace(config.moe, top_k=3),
        dtype="bfloat16",
        param_dtype="bfloat16",
    )
    written = hf_config.to_json(changed)
    assert written["num_hidden_layers"] == 6
    assert written["layer_types"] == ["linear_attention", "full_attention"] * 3
    assert written["linear_attn_config"]["full_attn_layers"] == [2, 4, 6]
    assert written["mlp_layer_types"] == ["dense"] * 2 + ["sparse"] * 4
    assert (written["num_experts_per_token"], written["dtype"]) == (3, "bfloat16")
    assert written["num_key_value_heads"] == written["linear_num_heads"] == 6
    assert hf_config.from_json(written) == changed


def test_how_it_is_computed_is_not_written():
    config = PRESETS["kimi_linear_small"]
    other = dataclasses.replace(
        config,
        dtype="bfloat16",
        remat=True,
        implementation=("scan",),
        pattern=("kda",) * 3 + ("mla",),
        mixer=dataclasses.replace(config.mixer, chunk_size=16, decay_init="slow"),
    )
    assert hf_config.to_json(other) == hf_config.to_json(config)


def test_new_documents_are_explicit():
    """Readers differ in what the absence of these means; transformers takes it for the 48B model's values."""
    config = dataclasses.replace(PRESETS["kimi_linear_small"], moe=MoEConfig(num_experts=4, top_k=1, expert_width=8))
    written = hf_config.to_json(config)
    assert (written["routed_scaling_factor"], written["num_shared_experts"], written["moe_renormalize"]) == (1, 0, True)
    assert all(written[f"{name}_token_id"] is None for name in ("bos", "eos", "pad"))
    assert (written["mla_use_nope"], written["moe_router_activation_func"]) == (True, "sigmoid")


def test_k3_without_a_bound():
    """A file of K3's kind that has no gate_lower_bound has the unbounded decay."""
    there = document("kimi_k3_tiny")
    del there["text_config"]["linear_attn_config"]["gate_lower_bound"]
    config = hf_config.from_json(there)
    assert config.mixer.lower_bound is None
    assert hf_config.to_json(config) == there


def test_what_the_library_lacks_is_listed():
    there = document("kimi_linear_tiny") | {
        "mla_use_nope": False,
        "hidden_act": "gelu",
        "moe_router_activation_func": "softmax",
        "num_nextn_predict_layers": 1,
        "qk_head_dim": 25,
        "rope_scaling": {"type": "yarn", "factor": 4.0},
        "sliding_window": 4096,
        "rms_norm_eps": 1e-6,
        "quantization_config": None,
    }
    with pytest.raises(ValueError, match="values that this library does not have") as error:
        hf_config.from_json(there)
    assert str(error.value).splitlines()[1:] == [
        "  hidden_act is 'gelu', expected 'silu'",
        "  qk_head_dim is 25, expected 24",
        "  rms_norm_eps is 1e-06, expected 1e-05",
        "  mla_use_nope is False, expected True",
        "  moe_router_activation_func is 'softmax', expected 'sigmoid'",
        "  num_nextn_predict_layers is 1, expected 0",
        "  rope_scaling is {'type': 'yarn', 'factor': 4.0}, expected None",
        "  sliding_window is 4096, expected None",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": ..., "linear_attn_config": ...},
            r"lacks hidden_size, linear_attn_config, linear_attn_config\.",
        ),
        ({"num_experts_per_token": ...}, "lacks num_experts_per_token"),
        ({"hidden_act": "situ"}, "lacks activation_situ_beta, activation_situ_linear_beta"),
        ({"num_hidden_layers": 5}, "must name each of the layers 1 to 5, got"),
        ({"num_attention_heads": 6}, "num_attention_heads is 6, expected 3"),
        ({"linear_attn_config": None}, "linear_attn_config must be an object, got None"),
        ({"model_type": "llama"}, "model_type is 'llama', expected 'kimi_linear'"),
        ({"model_type": ...}, "lacks model_type"),
        ({"num_experts": True}, "num_experts must be an integer, got True"),
        ({"num_experts_per_token": 2.0}, "num_experts_per_token must be an integer, got 2.0"),
        ({"hidden_size": "8"}, "hidden_size must be an integer, got '8'"),
        ({"dtype": "foo"}, "dtype must be a floating one, got 'foo'"),
        ({"dtype": "pi"}, "dtype must be a floating one, got 'pi'"),
        ({"mlp_layer_types": None}, "mlp_layer_types must be a list, got None"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor must be a number, got None"),
        ({"moe_renormalize": None}, "moe_renormalize must be true or false, got None"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"num_hidden_layers": 10**30}, "must name each of the layers 1 to 10{30}, got"),
        ({"quantization_config": "mxfp4"}, "quantization_config must be an object, got 'mxfp4'"),
        ({"quantization_config": {"format": "int-quantized"}}, "format must be 'mxfp4-pack-quantized', got 'int-q"),
    ],
)
def test_bad_documents(changes, message):
    there = {key: value for key, value in (document("kimi_linear_tiny") | changes).items() if value is not ...}
    with pytest.raises(ValueError, match=message):
        hf_config.from_json(there)


def test_another_model_of_k3s_form():
    there = document("kimi_k3_tiny") | {"model_type": "llava"}
    with pytest.raises(ValueError, match="model_type is 'llava', expected 'kimi_k3'"):
        hf_config.from_json(there)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kda_layers", None, "kda_layers must be a list, got None"),
        ("kda_layers", [1, [2], 3], r"must name each of the layers 1 to 6, got \[1, \[2\], 3\]"),
        ("full_attn_layers", [4, "6"], r"must name each of the layers 1 to 6, got .* and \[4, '6'\]"),
        ("gate_lower_bound", "-5", "gate_lower_bound must be a number, got '-5'"),
        ("use_full_rank_gate", 1, "use_full_rank_gate must be true or false, got 1"),
        ("head_dim", "16", "head_dim must be an integer of at least 1, got '16'"),
    ],
)
def test_bad_values_of_linear_attention(key, value, message):
    there = document("kimi_k3_tiny")
    there["text_config"]["linear_attn_config"][key] = value
    with pytest.raises(ValueError, match=message):
        hf_config.from_json(there)


@pytest.mark.parametrize(("there", "section"), [([], "config.json"), ({"text_config": None}, "text_config")])
def test_sections_that_are_none(there, section):
    with pytest.raises(ValueError, match=f"{section} must be an object"):
        hf_config.from_json(there)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": ("kda", "gdn")}, "has the layers kda, mla, not gdn"),
        ({"mixer": MixerConfig(negative_eigenvalues=True)}, "cannot hold these fields of the config:\n  mixer = "),
        ({"num_value_heads": 4}, "num_value_heads = 4"),
        ({"rope_theta": 1e4}, "rope_theta = 10000.0"),
    ],
)
def test_configs_without_a_published_form(changes, message):
    with pytest.raises(ValueError, match=message):
        hf_config.to_json(dataclasses.replace(PRESETS["kimi_linear_small"], **changes))
