"""First parameters, dtypes, errors, and parameters saved and restored."""

import dataclasses

import jax
import jax.numpy as jnp
import layer_cases
import numpy as np
import pytest
import tolerances
from flax import nnx

from kda_jax.layers import MIXERS, Attention, KimiDeltaAttention, LatentAttention, MixerConfig, MLAConfig, mixer_config
from kda_jax.layers.mixer import init_decay


def rates(heads=4000, channels=3, **changes):
    """(A, dt) that a layer starts with."""
    A_log, dt_bias = init_decay(jax.random.key(0), heads, channels, MixerConfig(**changes))
    assert A_log.dtype == dt_bias.dtype == jnp.float32
    assert A_log.shape == (heads,)
    assert dt_bias.shape == (heads, channels)
    return np.exp(np.asarray(A_log, np.float64)), np.log1p(np.exp(np.asarray(dt_bias, np.float64)))


@pytest.mark.parametrize(
    ("name", "A_high", "dt_high"), [("published", 16, 1e-1), ("tied", 16, 1e-1), ("slow", 2, 2e-3)]
)
def test_decay_init(name, A_high, dt_high):
    """A is uniform and log dt is uniform: ends, mean and deviation."""
    A, dt = rates(decay_init=name)
    for values, low, high in ((A, 1, A_high), (np.log(dt), np.log(1e-3), np.log(dt_high))):
        width = high - low
        assert low - 1e-3 <= values.min() < low + 0.01 * width
        assert high - 0.01 * width < values.max() <= high + 1e-3
        assert abs(values.mean() - (low + high) / 2) < 0.02 * width
        assert abs(values.std() - width / np.sqrt(12)) < 0.02 * width
    same = np.all(dt == dt[:, :1], axis=1)
    assert same.all() if name == "tied" else not same.any()


def test_decay_init_spread_and_bounded():
    A, dt = rates(heads=5, decay_init="spread")
    np.testing.assert_array_equal(A, 1)
    np.testing.assert_allclose(dt, np.repeat(10.0 ** np.linspace(-3, -1, 5)[:, None], 3, axis=1), rtol=1e-4)
    A, dt = rates(lower_bound=-5.0)
    np.testing.assert_array_equal(A, 1)
    assert 0.9e-3 < dt.min() < 1.1e-3 < 0.9e-1 < dt.max() < 1.1e-1


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_bfloat16(mixer):
    """With bfloat16 weights: finite first parameters, A_log, dt_bias, state in float32, an output near float32's."""
    config = mixer_config(mixer, MixerConfig(chunk_size=16))

    @jax.jit
    def both(x):
        layer = KimiDeltaAttention(8, 2, 4, mixer=config, dtype="bfloat16", param_dtype="bfloat16", rngs=nnx.Rngs(0))
        wide = KimiDeltaAttention(8, 2, 4, mixer=config, rngs=nnx.Rngs(0))
        nnx.update(wide, jax.tree.map(lambda p: p.astype(jnp.float32), nnx.state(layer)))
        return nnx.state(layer), layer(x), wide(x)

    x = jax.random.normal(jax.random.key(1), (2, 19, 8)).astype(jnp.bfloat16).astype(jnp.float32)
    params, (y, cache), (want, _) = both(x)
    for path, value in nnx.to_flat_state(params):
        assert bool(jnp.isfinite(value[...]).all()), path
        assert value[...].dtype == (jnp.float32 if path[-1] in ("A_log", "dt_bias") else jnp.bfloat16), path
    assert y.dtype == jnp.bfloat16
    assert cache.state.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(cache.tails)} == {jnp.dtype(jnp.bfloat16)}
    tolerances.assert_close(y, want, 2e-2, "bfloat16 layer")


@pytest.mark.parametrize("name", ["kda", "gdn", "mamba2", "attention", "mla_gated"])
def test_save_and_restore_is_bitwise(name, rng, tmp_path):
    """Another layer with the saved parameters gives the same bits: nothing, A_log included, is drawn anew."""
    layer = layer_cases.build(name, rng)
    flat = {".".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(nnx.state(layer))}
    np.savez(tmp_path / "parameters.npz", **{key: np.asarray(value) for key, value in flat.items()})
    other = layer_cases.build(name, rng)
    saved = np.load(tmp_path / "parameters.npz")
    assert sorted(saved.files) == sorted(flat)
    state = nnx.state(other)
    restored = [(path, v.replace(jnp.asarray(saved[".".join(map(str, path))]))) for path, v in nnx.to_flat_state(state)]
    nnx.update(other, nnx.from_flat_state(restored))
    x = rng.normal(size=(2, 5, layer_cases.WIDTH)).astype(np.float32)
    run = nnx.jit(lambda layer, x: layer(x)[0])
    np.testing.assert_array_equal(run(layer, x), run(other, x))


def test_parameters_are_as_published(rng):
    """Names and shapes of Kimi Linear's layer, and no bias."""
    layer = nnx.eval_shape(lambda: KimiDeltaAttention(10, 2, 4, num_value_heads=4, rngs=nnx.Rngs(0)))
    shapes = {".".join(path): value.shape for path, value in nnx.to_flat_state(nnx.state(layer))}
    assert shapes == {
        "q_proj.kernel": (10, 8),
        "k_proj.kernel": (10, 8),
        "v_proj.kernel": (10, 16),
        "q_conv.weight": (4, 8),
        "k_conv.weight": (4, 8),
        "v_conv.weight": (4, 16),
        "f_a_proj.kernel": (10, 4),
        "f_b_proj.kernel": (4, 16),
        "A_log": (4,),
        "dt_bias": (4, 4),
        "b_proj.kernel": (10, 4),
        "g_a_proj.kernel": (10, 4),
        "g_b_proj.kernel": (4, 16),
        "o_norm.scale": (4,),
        "o_proj.kernel": (16, 10),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decay": "token"}, "decay must be one of .* got 'token'"),
        ({"write": "gate"}, "write must be one of"),
        ({"output_gate": "none"}, "output_gate must be one of"),
        ({"gate_activation": "tanh"}, "gate_activation must be one of"),
        ({"decay_init": "fast"}, "decay_init must be one of"),
        ({"lower_bound": -6.0}, r"MixerConfig.lower_bound must be .* got -6.0"),
        ({"lower_bound": -1.0, "decay": None}, "needs a decay"),
        ({"write": "dt"}, 'write="dt" needs decay="head"'),
        ({"conv_width": -1}, "conv_width must be an integer of at least 0, got -1"),
        ({"conv_width": None}, "MixerConfig.conv_width must be an integer of at least 0, got None"),
        ({"value_dim": 0}, "value_dim must be an integer of at least 1, got 0"),
        ({"chunk_size": 0}, "chunk_size must be a power of two, got 0"),
    ],
)
def test_mixer_config_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MixerConfig(), **changes)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda r: KimiDeltaAttention(8, 2, 4, num_value_heads=3, rngs=r), "multiple of num_heads=2, got 3"),
        (lambda r: KimiDeltaAttention(8, 0, 4, rngs=r), "num_heads must be at least 1, got 0"),
        (lambda r: KimiDeltaAttention(8, 2, 4, mixer=mixer_config("gdn"), implementation="scan", rngs=r), "'scan'"),
        (lambda r: mixer_config("rwkv"), "unknown mixer 'rwkv'; the mixers are kda, gdn"),
        (lambda r: Attention(8, 4, 4, num_kv_heads=3, rngs=r), "num_kv_heads=3"),
        (lambda r: Attention(8, 4, 3, rope_theta=1e4, rngs=r), "even head_dim, got head_dim=3"),
        (lambda r: LatentAttention(0, 4, rngs=r), "in_features=0"),
        (lambda r: Attention(8, 4, 4, implementation="foo", rngs=r), "implementation must be None, .* got 'foo'"),
        (lambda r: LatentAttention(8, 4, implementation="foo", rngs=r), "implementation must be None, .* got 'foo'"),
        (lambda r: MLAConfig(latent_dim=0), "latent_dim must be an integer of at least 1, got 0"),
        (lambda r: MLAConfig(key_dim=4, shared_dim=2, value_dim=7), "value_dim must be at most"),
    ],
)
def test_constructor_errors(build, message):
    with pytest.raises(ValueError, match=message):
        build(nnx.Rngs(0))


def test_implementation_reaches_the_operator(rng):
    layer = layer_cases.build("kda", rng)
    layer.implementation = "abacus"
    with pytest.raises(ValueError, match="abacus"):
        layer(jnp.zeros((2, 5, layer_cases.WIDTH)))


@pytest.mark.parametrize("name", ["kda", "attention", "mla"])
def test_call_errors(name, rng):
    layer = layer_cases.build(name, rng)
    x = jnp.zeros((2, 5, layer_cases.WIDTH))
    for wrong in (x[0], x[..., :-1]):
        with pytest.raises(ValueError, match=r"x must be \[B, T, 12\], got"):
            layer(wrong)
    for wrong in (jnp.ones((2, 4), jnp.int32), jnp.ones((2, 5))):
        with pytest.raises(ValueError, match=r"segment_ids must be integers \(2, 5\), got"):
            layer(x, segment_ids=wrong)
    with pytest.raises(ValueError, match=r"cache .* 3 rows .* 2"):
        layer(x, cache=layer.init_cache(3, 8))
