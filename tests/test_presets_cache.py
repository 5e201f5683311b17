"""Whole, in chunks, token by token, packed: the same logits from models of every part and cache, in float32."""

import dataclasses
import functools

import jax.numpy as jnp
import layer_cases
import numpy as np
import pytest
import tolerances
from flax import nnx

from kda_jax.layers import MLAConfig, MoEConfig
from kda_jax.models import HybridConfig, HybridLM
from kda_jax.models.presets import PRESETS

VOCAB, LENGTH = 13, 23
SIZES = {"vocab_size": VOCAB, "width": 16, "num_heads": 2, "head_dim": 8, "mlp_width": 12}


def shrink(name, pattern) -> HybridConfig:
    """The preset's parts with small sizes."""
    config = PRESETS[name]
    moe = MoEConfig(num_experts=5, top_k=2, expert_width=6, shared_experts=config.moe.shared_experts, scaling=2.4)
    mla = MLAConfig(latent_dim=9, key_dim=4, shared_dim=2, value_dim=5)
    return dataclasses.replace(
        config,
        **SIZES,
        pattern=pattern,
        mixer=dataclasses.replace(config.mixer, chunk_size=16),
        mla=dataclasses.replace(mla, query_rank=config.mla.query_rank and 7, output_gate=config.mla.output_gate),
        moe=dataclasses.replace(moe, latent_dim=config.moe.latent_dim and 11),
        rope_theta=100.0,
    )


CONFIGS = {
    "kimi_linear": shrink("kimi_linear_small", ("kda", "mla", "attention", "gdn")),
    "kimi_k3": shrink("kimi_k3_small", ("kda", "mla", "kda", "attention")),
}


@functools.cache
def build(name):
    return layer_cases.randomize(
        nnx.eval_shape(lambda: HybridLM(CONFIGS[name], rngs=nnx.Rngs(0))), np.random.default_rng(0)
    )


@nnx.jit
def call(model, tokens, segment_ids=None, cache=None):
    return model(tokens, segment_ids=segment_ids, cache=cache)


@functools.cache
def case(name):
    """Tokens [2, T], and the logits of one call without a cache."""
    tokens = np.random.default_rng(1).integers(VOCAB, size=(2, LENGTH))
    return tokens, np.asarray(call(build(name), tokens)[0], np.float64)


@pytest.mark.parametrize(
    "lengths",
    [pytest.param((LENGTH,), id="prefill"), pytest.param((9, 9, 1, 1, 1, 1, 1), id="chunks"), (1,) * LENGTH],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_pieces(name, lengths):
    model, (tokens, want) = build(name), case(name)
    cache, outputs, start = model.init_cache(2, LENGTH), [], 0
    for length in lengths:
        logits, cache = call(model, tokens[:, start : start + length], None, cache)
        outputs.append(logits)
        start += length
    tolerances.assert_close(np.concatenate(outputs, axis=1), want, 1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed(name):
    """Both rows in one, with padding before, between and after them."""
    tokens, want = case(name)
    ids = np.repeat([0, 7, 0, 3, 0], [2, LENGTH, 3, LENGTH, 1])[None].astype(np.int32)
    row = np.zeros(ids.shape, np.int32)
    row[ids == 7], row[ids == 3] = tokens
    logits, _ = call(build(name), row, ids)
    for segment, expected in zip((7, 3), want, strict=True):
        tolerances.assert_close(logits[ids == segment], expected, 1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_left_padding(name):
    """Unequal prompts padded on the left, then decoded side by side."""
    model, (tokens, want) = build(name), case(name)
    ids = np.ones((2, 9), np.int32)
    ids[1, :4] = 0
    prompt = tokens[:, :9].copy()
    prompt[1, 4:] = tokens[1, :5]
    logits, cache = call(model, prompt, ids, model.init_cache(2, LENGTH))
    tolerances.assert_close(logits[0], want[0, :9], 1e-5)
    tolerances.assert_close(logits[1, 4:], want[1, :5], 1e-5)
    for step in range(3):
        token = jnp.array([[tokens[0, 9 + step]], [tokens[1, 5 + step]]])
        logits, cache = call(model, token, None, cache)
        tolerances.assert_close(logits[:, 0], np.stack([want[0, 9 + step], want[1, 5 + step]]), 1e-5)
