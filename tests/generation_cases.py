"""A model with every kind of cache, and what generation must give: the model asked anew for every token."""

import dataclasses
import functools

import jax
import layer_cases
import numpy as np
from flax import nnx

from kda_jax.layers import MixerConfig, MLAConfig, MoEConfig
from kda_jax.models import HybridConfig, HybridLM

VOCAB = 13
CONFIG = HybridConfig(
    vocab_size=VOCAB,
    width=12,
    num_heads=2,
    head_dim=4,
    pattern=("kda", "attention", "mla"),
    mlp_width=10,
    rope_theta=100.0,
    mixer=MixerConfig(chunk_size=16),
    mla=MLAConfig(latent_dim=7, key_dim=4, shared_dim=2, value_dim=5),
)
EXPERTS = dataclasses.replace(
    CONFIG,
    pattern=("kda", "mla"),
    mixer=MixerConfig(chunk_size=16, lower_bound=-5.0),
    moe=MoEConfig(num_experts=5, top_k=2, expert_width=6, shared_experts=1, scaling=2.0),
    residual_block=1,
)
LENGTH = 48  # of the rows that the model is asked about, so that it is compiled once


@functools.cache
def build(config: HybridConfig = CONFIG) -> HybridLM:
    """Random parameters, and a head that chooses: logits apart by more than rounding moves them."""
    model = layer_cases.randomize(
        nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0))), np.random.default_rng(len(str(config)))
    )
    model.lm_head.kernel[...] = 3 * model.lm_head.kernel[...]
    return model


@nnx.jit
def call(model, tokens, segment_ids=None, cache=None):
    return model(tokens, segment_ids=segment_ids, cache=cache)


def continue_greedily(model: HybridLM, prompt, max_new_tokens: int, stop=()) -> list[int]:
    """The likeliest token again and again, each from all the tokens before it and no cache."""
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : len(tokens)] = tokens
        tokens.append(int(call(model, row)[0][0, len(tokens) - 1].argmax()))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def prompts(rng: np.random.Generator, lengths) -> list[list[int]]:
    return [rng.integers(VOCAB, size=length).tolist() for length in lengths]


def assert_same(a, b) -> None:
    """Two pytrees, bit for bit, NaN equal to NaN."""
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    bits = lambda tree: [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]  # noqa: E731
    for x, y in zip(bits(a), bits(b), strict=True):
        np.testing.assert_array_equal(x, y)
