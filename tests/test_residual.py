"""Attention residuals against a float64 NumPy loop, alone and in the model."""

import dataclasses

import jax
import jax.numpy as jnp
import layer_cases
import numpy as np
import pytest
import reference_layers as oracle
import tolerances
from flax import nnx

from kda_jax.layers import AttentionResidual, MLAConfig
from kda_jax.models import HybridConfig, HybridLM

WIDTH = 6
CONFIG = HybridConfig(
    vocab_size=7,
    width=WIDTH,
    num_heads=2,
    head_dim=3,
    pattern=("attention", "mla", "mla", "attention", "attention"),
    mlp_width=5,
    mla=MLAConfig(latent_dim=4, key_dim=3, shared_dim=2, value_dim=2),
    residual_block=2,
)


def build(module, rng):
    return layer_cases.randomize(nnx.eval_shape(module), rng)


def test_mixture(rng):
    layer = build(lambda: AttentionResidual(WIDTH, rngs=nnx.Rngs(0)), rng)
    sources = [np.float32(3**i) * rng.normal(size=(2, 4, WIDTH)).astype(np.float32) for i in range(3)]
    params = layer_cases.parameters(layer)
    want = [oracle.attention_residual(params, [x[row].astype(np.float64) for x in sources]) for row in range(2)]
    tolerances.assert_close(layer(tuple(map(jnp.asarray, sources))), np.stack(want), tolerances.FORWARD["float32"])


def test_starts_as_the_mean(rng):
    layer = AttentionResidual(WIDTH, rngs=nnx.Rngs(0))
    sources = tuple(jnp.asarray(rng.normal(size=(1, 2, WIDTH)), jnp.float32) for _ in range(3))
    np.testing.assert_allclose(layer(sources), sum(sources) / 3, rtol=1e-5, atol=1e-6)


def test_bfloat16(rng):
    """Mixed in float32: 256 + 1 is no bfloat16 number, their mean of 128.5 is not 128."""
    layer = AttentionResidual(WIDTH, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    sources = tuple(jnp.full((1, 1, WIDTH), value, jnp.bfloat16) for value in (1.0, 256.0, 2.0, 255.0))
    y = layer(sources)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, jnp.full((1, 1, WIDTH), 128.5, jnp.bfloat16))


def naive(params, tokens):
    """The published order: read, then close a block, then write."""
    mixers = {
        "attention": lambda p, x: oracle.attention(p, x, heads=2, kv_heads=2),
        "mla": lambda p, x: oracle.latent_attention(p, x, heads=2, latent_dim=4, key_dim=3),
    }
    total, blocks = params["embed"]["embedding"][tokens], []
    for i, kind in enumerate(CONFIG.layers):
        block = params["blocks"][i]
        x = oracle.attention_residual(block["mixer_residual"], [*blocks, total]) if blocks else total
        if i % 2 == 0:
            blocks, total = [*blocks, total], 0.0
        total = total + mixers[kind](block["mixer"], oracle.rms_norm(x, block["mixer_norm"]["scale"]))
        x = oracle.attention_residual(block["mlp_residual"], [*blocks, total])
        total = total + oracle.swiglu(block["mlp"], oracle.rms_norm(x, block["mlp_norm"]["scale"]))
    x = oracle.attention_residual(params["residual"], [*blocks, total])
    return oracle.rms_norm(x, params["norm"]["scale"]) @ params["lm_head"]["kernel"]


def test_model(rng):
    model = build(lambda: HybridLM(CONFIG, rngs=nnx.Rngs(0)), rng)
    tokens = rng.integers(7, size=(2, 6))
    logits, _ = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
    want = np.stack([naive(layer_cases.parameters(model), row) for row in tokens])
    tolerances.assert_close(logits, want, tolerances.FORWARD["float32"])


def test_remat_changes_nothing(rng):
    """A block's stream is recomputed too."""
    plain = build(lambda: HybridLM(CONFIG, rngs=nnx.Rngs(0)), rng)
    remat = nnx.eval_shape(lambda: HybridLM(dataclasses.replace(CONFIG, remat=True), rngs=nnx.Rngs(0)))
    nnx.update(remat, nnx.state(plain))
    tokens = rng.integers(7, size=(2, 6))
    grad = nnx.jit(nnx.grad(lambda model: jnp.sum(jnp.sin(model(tokens)[0]))))
    close = lambda a, b: tolerances.assert_close(a, b, tolerances.GRADIENT["float32"])  # noqa: E731
    jax.tree.map(close, grad(remat), grad(plain))


def test_config_error():
    with pytest.raises(ValueError, match="residual_block must be an integer of at least 1, got 0"):
        dataclasses.replace(CONFIG, residual_block=0)
