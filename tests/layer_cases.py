"""The layers under test, each with its oracle and random parameters: every head and channel has another decay."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import reference_layers as oracle
from flax import nnx

from kda_jax.layers import Attention, KimiDeltaAttention, LatentAttention, MixerConfig, MLAConfig, mixer_config

WIDTH = 12
BASE = MixerConfig(value_dim=3, chunk_size=16)
SMALL = MLAConfig(latent_dim=7, key_dim=4, shared_dim=2, value_dim=5)


@dataclasses.dataclass(frozen=True)
class Case:
    build: Callable[..., nnx.Module]
    oracle: Callable[[dict, np.ndarray], np.ndarray]


def linear_mixer(config: MixerConfig, heads: int = 2, value_heads: int = 2, **options) -> Case:
    build = functools.partial(
        KimiDeltaAttention, WIDTH, heads, 4, num_value_heads=value_heads, mixer=config, param_dtype=jnp.float32
    )
    options |= {"decay": config.decay, "delta_rule": config.delta_rule, "write": config.write}
    options |= {"normalize": config.normalize, "lower_bound": config.lower_bound}
    return Case(
        build, functools.partial(oracle.linear_mixer, heads=heads, value_heads=value_heads, channels=4, **options)
    )


def attention(kv_heads: int, rope_theta: float | None) -> Case:
    options = {"rope_theta": rope_theta}
    return Case(
        functools.partial(Attention, WIDTH, 4, 6, num_kv_heads=kv_heads, **options),
        functools.partial(oracle.attention, heads=4, kv_heads=kv_heads, **options),
    )


def latent_attention(config: MLAConfig) -> Case:
    return Case(
        functools.partial(LatentAttention, WIDTH, 3, config),
        functools.partial(oracle.latent_attention, heads=3, latent_dim=config.latent_dim, key_dim=config.key_dim),
    )


CASES = {
    "kda": linear_mixer(BASE, value_heads=4),
    "kda_bounded": linear_mixer(
        dataclasses.replace(BASE, lower_bound=-5.0, output_gate="full", negative_eigenvalues=True), beta_scale=2.0
    ),
    "kda_bare": linear_mixer(dataclasses.replace(BASE, conv_width=0, output_gate=None)),
    "kda_swish": linear_mixer(
        dataclasses.replace(BASE, conv_width=3, gate_activation="silu", value_dim=None), gate_activation=oracle.silu
    ),
    **{n: linear_mixer(mixer_config(n, BASE)) for n in ("gdn", "deltanet", "gla", "sgla", "linear", "mamba2")},
    "attention": attention(4, None),
    "attention_rope": attention(2, 100.0),
    "mla": latent_attention(SMALL),
    "mla_gated": latent_attention(dataclasses.replace(SMALL, query_rank=5, output_gate=True, latent_dim=16)),
}

# Padding before, within and after sequences; a sequence of one token; a row of one sequence; a row of padding alone.
SEGMENT_IDS = np.array(
    [
        [0, 0, 5, 5, 5, 0, 5, 5, 5, 5, 0, 2, 2, 0, 9, 0, 3, 3, 0],
        [7] * 19,
        [0] * 19,
    ],
    np.int32,
)


def build(name: str, rng: np.random.Generator) -> nnx.Module:
    """The layer of a case with every parameter random; nothing is compiled for it."""
    return randomize(nnx.eval_shape(lambda: CASES[name].build(rngs=nnx.Rngs(0))), rng)


def randomize(module: nnx.Module, rng: np.random.Generator) -> nnx.Module:
    """An abstract module with random parameters: decays from slow to fast, scales around 1, weights by their fan-in."""
    mean = {"A_log": 1.0, "dt_bias": -2.0, "scale": 1.0}

    def value(path, x):
        noise = rng.normal(size=x.shape)
        return jnp.asarray(mean[path[-1]] + 0.5 * noise if path[-1] in mean else noise / np.sqrt(x.shape[0]), x.dtype)

    graphdef, params = nnx.split(module)
    flat = [(path, variable.replace(value(path, variable.get_value()))) for path, variable in nnx.to_flat_state(params)]
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def parameters(layer: nnx.Module) -> dict:
    """The layer's parameters as nested dicts of float64 NumPy arrays."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(layer)))


def sequences(segment_ids: np.ndarray):
    """(row, tokens) of every sequence."""
    for row, ids in enumerate(segment_ids):
        tokens = np.flatnonzero(ids)
        starts = np.flatnonzero(np.diff(ids[tokens])) + 1
        yield from ((row, part) for part in np.split(tokens, starts) if len(part))


def run_oracle(name: str, params: dict, x: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
    """Each sequence on its own through the oracle; zero elsewhere."""
    y = np.zeros_like(x, np.float64)
    for row, tokens in sequences(segment_ids):
        y[row, tokens] = CASES[name].oracle(params, x[row, tokens].astype(np.float64))
    return y
