"""The presets against the published tables of tensors and counts of parameters; the small twins train."""

import dataclasses
import functools
import json
import lzma
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kda_jax.models import HybridLM, hf_config
from kda_jax.models.hf_tensors import entries
from kda_jax.models.hybrid import parameter_counts
from kda_jax.models.presets import PRESETS

GOLDEN = pathlib.Path(__file__).parent / "golden"
DTYPES = {"bfloat16": "bf16", "float32": "f32", "uint8": "u8"}


@functools.cache
def abstract(name):
    return nnx.eval_shape(lambda: HybridLM(PRESETS[name], rngs=nnx.Rngs(0)))


def published(table):
    """(name, shape, dtype) of every tensor; a name with {expert} stands for as many as there are experts."""
    for name, (shape, dtype, *experts) in json.loads(lzma.decompress((GOLDEN / table).read_bytes())).items():
        names = [name.replace("{expert}", str(e)) for e in range(experts[0])] if experts else [name]
        yield from ((n, tuple(shape), dtype) for n in names)


@pytest.mark.parametrize(
    ("name", "table", "count"),
    [
        ("kimi_linear_48b", "kimi_linear_48b_tensors.json.xz", 20_493),
        ("kimi_k3", "kimi_k3_text_tensors.json.xz", 497_220 - 168),
    ],
)
def test_tensors(name, table, count):
    """Names, shapes, dtypes and how many; K3's 168 others are those of its vision tower."""
    tensors = [t for entry in entries(PRESETS[name], abstract(name)) for t in entry.tensors()]
    got = {(t.name, t.shape, DTYPES[t.dtype.name]) for t in tensors}
    want = set(published(table))
    assert not got - want
    assert not want - got
    assert len(tensors) == len(want) == count


@pytest.mark.parametrize(
    ("name", "total", "active"), [("kimi_linear_48b", "49.1B", "3B"), ("kimi_k3", "2779.5B", "104.2B")]
)
def test_parameter_counts(name, total, active):
    """To the digits that were published."""
    for count, text in zip(parameter_counts(abstract(name)), (total, active), strict=True):
        digits = len(text.partition(".")[2]) - 1 if "." in text else 0
        assert f"{count / 1e9:.{digits}f}B" == text


@pytest.mark.parametrize("name", PRESETS)
def test_config_survives_json(name):
    document = hf_config.to_json(PRESETS[name])
    again = hf_config.from_json(json.loads(json.dumps(document)))
    assert again == PRESETS[name]
    assert hf_config.to_json(again) == document


@pytest.mark.parametrize("name", ["kimi_linear_small", "kimi_k3_small"])
def test_small_twins_train(name, rng):
    """A few steps on one batch lower the loss; gradients reach every parameter, and the balance moves the biases.

    Of each kind of layer there is one here: compilation is most of the time.
    """
    mixer = dataclasses.replace(PRESETS[name].mixer, chunk_size=16)
    config = dataclasses.replace(PRESETS[name], pattern=("kda", "mla"), mixer=mixer, remat=name == "kimi_k3_small")
    tokens = jnp.asarray(rng.integers(256, size=(2, 17)))

    @jax.jit
    def train():
        graphdef, params, rest = nnx.split(HybridLM(config, rngs=nnx.Rngs(0)), nnx.Param, ...)

        def loss(params, rest):
            logits, loads = nnx.merge(graphdef, params, rest).logits_and_loads(tokens[:, :-1])
            nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
            return jnp.mean(nats), loads

        def step(carry, _):
            params, rest = carry
            (value, loads), gradient = jax.value_and_grad(loss, has_aux=True)(params, rest)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
            model = nnx.merge(graphdef, params, rest)
            model.balance(loads)
            norms = jax.tree.map(lambda g: jnp.max(jnp.abs(g)), gradient)
            return tuple(nnx.state(model, nnx.Param, ...)), (value, norms, loads)

        return jax.lax.scan(step, (params, rest), length=4)

    (_, rest), (losses, norms, loads) = train()
    assert np.all(np.diff(losses) < 0), losses
    unreached = [path for path, x in nnx.to_flat_state(norms) if not x.get_value()[-1] > 0]
    assert unreached == unread(config)
    assert len(loads) == len(config.layers) - config.dense_layers
    assert all(np.all(load.sum(-1) == 2 * 16 * config.moe.top_k) for load in loads)
    assert all(np.any(x.get_value() != 0) for _, x in nnx.to_flat_state(rest))


def unread(config):
    """The first layer reads the embedding alone: there is nothing to choose from."""
    if config.residual_block is None:
        return []
    return [("blocks", 0, "mixer_residual", "norm", "scale"), ("blocks", 0, "mixer_residual", "proj", "kernel")]
