"""The hybrid language model against a float64 NumPy forward; caches, packing, recomputation, training, errors."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import layer_cases
import numpy as np
import pytest
import reference_layers as oracle
import tolerances
from flax import nnx

from kda_jax.layers import MixerConfig, MLAConfig
from kda_jax.models import HybridConfig, HybridLM

VOCAB, WIDTH, HEADS, DIM = 11, 12, 2, 4
CONFIG = HybridConfig(
    vocab_size=VOCAB,
    width=WIDTH,
    num_heads=HEADS,
    head_dim=DIM,
    pattern=("kda", "attention", "mla"),
    num_layers=4,
    mlp_width=10,
    mixer=MixerConfig(chunk_size=16),
    mla=MLAConfig(latent_dim=7, key_dim=4, shared_dim=2, value_dim=5),
)
IDS = layer_cases.SEGMENT_IDS
MIXERS = {
    "kda": functools.partial(oracle.linear_mixer, heads=HEADS, value_heads=HEADS, channels=DIM),
    "attention": functools.partial(oracle.attention, heads=HEADS, kv_heads=HEADS),
    "mla": functools.partial(oracle.latent_attention, heads=HEADS, latent_dim=7, key_dim=4),
}


@functools.cache
def build(config=CONFIG):
    return layer_cases.randomize(
        nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0))), np.random.default_rng(len(str(config)))
    )


@nnx.jit
def call(model, tokens, segment_ids=None, cache=None):
    return model(tokens, segment_ids=segment_ids, cache=cache)


def naive(model, tokens, segment_ids):
    """Logits of every sequence on its own; zero elsewhere."""
    params, config = layer_cases.parameters(model), model.config
    logits = np.zeros((*tokens.shape, VOCAB))
    head = params["embed"]["embedding"].T if config.tie_embeddings else params["lm_head"]["kernel"]
    for row, places in layer_cases.sequences(segment_ids):
        x = params["embed"]["embedding"][tokens[row, places]]
        for i, kind in enumerate(("kda", "attention", "mla", "kda")):
            block = params["blocks"][i]
            x = x + MIXERS[kind](block["mixer"], oracle.rms_norm(x, block["mixer_norm"]["scale"]))
            x = x + oracle.swiglu(block["mlp"], oracle.rms_norm(x, block["mlp_norm"]["scale"]))
        logits[row, places] = oracle.rms_norm(x, params["norm"]["scale"]) @ head
    return logits


@pytest.mark.parametrize("tied", [False, True])
def test_logits(tied, rng):
    model = build(dataclasses.replace(CONFIG, tie_embeddings=tied))
    tokens = rng.integers(VOCAB, size=IDS.shape)
    logits, cache = call(model, tokens, IDS)
    assert cache is None
    assert logits.dtype == jnp.float32
    want = naive(model, tokens, IDS)
    tolerances.assert_close(np.where(IDS[..., None], logits, 0), want, tolerances.FORWARD["float32"])


def test_prefill_continuation_and_decoding(rng):
    """Unequal prompts padded on the left, a prompt continued, tokens decoded."""
    model = build()
    ids = np.array([[0, 0, 0, 1, 1, 1, 1, *([1] * 9)], [1] * 16], np.int32)
    tokens = rng.integers(VOCAB, size=ids.shape)
    cache, outputs, start = model.init_cache(2, 16), [], 0
    for length in (7, 7, 1, 1):
        piece = slice(start, start + length)
        logits, cache = call(model, tokens[:, piece], ids[:, piece] if start == 0 else None, cache)
        outputs.append(logits)
        start += length
    got = np.where(ids[..., None], np.concatenate(outputs, axis=1), 0)
    tolerances.assert_close(got, naive(model, tokens, ids), tolerances.FORWARD["float32"])


def test_causality(rng):
    tokens = rng.integers(VOCAB, size=IDS.shape)
    changed = tokens.copy()
    changed[:, 11] = (changed[:, 11] + 1) % VOCAB
    before, after = call(build(), tokens)[0], call(build(), changed)[0]
    np.testing.assert_array_equal(before[:, :11], after[:, :11])
    assert np.all(np.any(before[:, 11:] != after[:, 11:], axis=-1))


def loss(model, tokens):
    logits, _ = model(tokens[:, :-1])
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1))


def test_remat_recomputes_and_changes_nothing(rng):
    plain, remat = build(), build(dataclasses.replace(CONFIG, remat=True))
    nnx.update(remat, nnx.state(plain))
    tokens = rng.integers(VOCAB, size=(2, 9))
    grad = nnx.jit(nnx.value_and_grad(loss))
    got, want = grad(remat, tokens), grad(plain, tokens)
    jax.tree.map(lambda a, b: tolerances.assert_close(a, b, tolerances.GRADIENT["float32"]), got, want)

    def layers_checkpointed(model):
        graphdef, params = nnx.split(model)
        jaxpr = jax.make_jaxpr(lambda params: loss(nnx.merge(graphdef, params), tokens))(params)
        return sum(equation.primitive.name == "remat2" for equation in jaxpr.jaxpr.eqns)

    assert layers_checkpointed(remat) == len(CONFIG.layers)
    assert layers_checkpointed(plain) == 0


@pytest.mark.parametrize("length", [1, 7, 63, 64, 65])
def test_trains(length, rng):
    """Gradient descent on one batch lowers its loss at every step, at lengths around the chunk's."""
    config = dataclasses.replace(CONFIG, num_layers=None, pattern=("kda",), mixer=MixerConfig())
    tokens = jnp.asarray(rng.integers(VOCAB, size=(2, length + 1)))

    @jax.jit
    def train():
        graphdef, params = nnx.split(HybridLM(config, rngs=nnx.Rngs(0)))
        objective = jax.value_and_grad(lambda params: loss(nnx.merge(graphdef, params), tokens))

        def update(params, _):
            value, gradient = objective(params)
            return jax.tree.map(lambda p, g: p - 0.02 * g, params, gradient), value

        return jax.lax.scan(update, params, length=4)[1]

    losses = np.asarray(train())
    assert np.all(np.diff(losses) < 0), losses


def test_vmap_over_models(rng):
    """Several seeds in one program."""
    models = [build(), build(dataclasses.replace(CONFIG, remat=True))]
    graphdef = nnx.graphdef(models[0])
    states = [nnx.state(model) for model in models]
    tokens = rng.integers(VOCAB, size=IDS.shape)
    run = lambda params: nnx.merge(graphdef, params)(tokens, segment_ids=IDS)[0]  # noqa: E731
    together = jax.jit(jax.vmap(run))(jax.tree.map(lambda *x: jnp.stack(x), *states))
    for model, logits in zip(models, together, strict=True):
        np.testing.assert_allclose(logits, call(model, tokens, IDS)[0], rtol=1e-5, atol=1e-5)


def test_layers_repeat_the_pattern():
    config = dataclasses.replace(CONFIG, pattern=["kda", "kda", "kda", "mla"], num_layers=6)
    assert config.layers == ("kda", "kda", "kda", "mla", "kda", "kda")
    assert dataclasses.replace(config, num_layers=None).layers == ("kda", "kda", "kda", "mla")
    assert hash(config) == hash(dataclasses.replace(config))


def test_sizes_are_kept_as_plain_integers():
    """JSON has no others: a config of NumPy's could be trained but not saved."""
    mla = dataclasses.replace(CONFIG.mla, key_dim=np.int32(4))
    config = dataclasses.replace(CONFIG, width=np.int64(WIDTH), num_layers=np.int64(4), mla=mla)
    assert config == CONFIG
    assert json.loads(json.dumps([config.width, config.num_layers, config.mla.key_dim])) == [WIDTH, 4, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be an integer of at least 1, got 0"),
        ({"width": -4}, "width must be an integer of at least 1, got -4"),
        ({"num_heads": None}, "num_heads must be an integer of at least 1, got None"),
        ({"width": 32.0}, "HybridConfig.width must be an integer of at least 1, got 32.0"),
        ({"num_layers": True}, "num_layers must be an integer of at least 1, got True"),
        ({"mlp_width": 0}, "mlp_width must be an integer of at least 1, got 0"),
        ({"num_layers": 0}, "num_layers must be an integer of at least 1, got 0"),
        ({"pattern": ()}, r"pattern must be a sequence of layer kinds, got \(\)"),
        ({"pattern": "kda"}, "pattern must be a sequence of layer kinds, got 'kda'"),
        ({"pattern": ("kda", "mlp")}, "unknown layer kind 'mlp'; the kinds are kda, "),
        ({"num_value_heads": 3}, "num_value_heads must be a multiple of self.num_heads=2, got 3"),
        ({"dtype": "int32"}, "dtype must be a floating dtype, got 'int32'"),
        ({"param_dtype": "bf16"}, "param_dtype must be a floating dtype, got 'bf16'"),
        ({"dtype": None}, "HybridConfig.dtype must be a floating dtype, got None"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_call_errors():
    model = build()
    tokens = jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(ValueError, match=r"tokens must be integers \[B, T\], got float32 \(2, 3\)"):
        model(tokens.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"tokens must be integers \[B, T\], got int32 \(3,\)"):
        model(tokens[0])
    with pytest.raises(ValueError, match="cache must have one entry for each of 4 layers, got 3"):
        model(tokens, cache=model.init_cache(2, 5)[:3])
