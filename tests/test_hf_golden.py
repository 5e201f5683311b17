"""Published layouts with logits that other public implementations computed from them.

kimi_linear_tiny: transformers 5.24.0; kimi_k3_tiny: a NumPy forward written from the published facts.

Checked by hand, with transformers 5.24.0 and torch 2.13.0 on a CPU: it loads what `hf.save` writes of kimi_linear_tiny,
in one file and in seven, with nothing missing or left over, the same logits bitwise and the same greedy tokens as from
the original; and its logits of a saved small twin are within 5e-5 of ours.
"""

import functools
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kda_jax.models import hf, hf_config
from kda_jax.models.generate import generate

GOLDEN = pathlib.Path(__file__).parent / "golden"


@functools.cache
def load(name):
    return hf.load(GOLDEN / name)


@functools.cache
def expected(name):
    return dict(np.load(GOLDEN / name / "expected.npz"))


@nnx.jit
def call(model, tokens, cache=None):
    return model(tokens, cache=cache)


@pytest.mark.parametrize(("name", "tolerance"), [("kimi_linear_tiny", 2e-5), ("kimi_k3_tiny", 2e-4)])
def test_logits(name, tolerance):
    _, model = load(name)
    want = expected(name)
    logits, _ = call(model, jnp.asarray(want["input_ids"], jnp.int32))
    np.testing.assert_allclose(logits, want["logits"], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "key", "tolerance"), [("kimi_linear_tiny", "decode_logits", 5e-5), ("kimi_k3_tiny", "logits", 2e-4)]
)
def test_decoding(name, key, tolerance):
    """All but the last tokens at once, those one by one."""
    _, model = load(name)
    want = expected(name)
    tokens = jnp.asarray(want["input_ids"], jnp.int32)
    steps = min(want[key].shape[1], 13)
    cache = model.init_cache(2, tokens.shape[1])
    _, cache = call(model, tokens[:, :-steps], cache)
    for step in range(-steps, 0):
        logits, cache = call(model, tokens[:, step, None], cache)
        np.testing.assert_allclose(logits[:, 0], want[key][:, step], rtol=0, atol=tolerance)


def test_greedy():
    """Twenty tokens of the first row, then the most likely one, again and again: by hand, and as `generate` does."""
    _, model = load("kimi_linear_tiny")
    tokens = expected("kimi_linear_tiny")["greedy"]
    logits, cache = call(model, jnp.asarray(tokens[:, :20], jnp.int32), model.init_cache(1, tokens.shape[1]))
    generated = []
    for _ in range(20, tokens.shape[1]):
        generated.append(int(jnp.argmax(logits[0, -1])))
        logits, cache = call(model, jnp.array([[generated[-1]]]), cache)
    assert generated == tokens[0, 20:].tolist()
    (row,) = generate(model, [tokens[0, :20].tolist()], max_new_tokens=len(generated), chunk_size=8)
    assert row == generated


@pytest.mark.parametrize("name", ["kimi_linear_tiny", "kimi_k3_tiny"])
def test_config(name):
    """The decay is bounded if and only if the file has gate_lower_bound; nothing of the file is lost."""
    document = json.loads((GOLDEN / name / "config.json").read_text())
    config, _ = load(name)
    text = document.get("text_config", document)
    assert config.mixer.lower_bound == text["linear_attn_config"].get("gate_lower_bound")
    assert hf_config.to_json(config) == document
