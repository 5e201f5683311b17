"""The model of an experiment: the library's language model, each of its layers with the mixer that is compared."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from experiments.errors import ConfigError
from kda_jax.layers.mixer import MIXERS as LINEAR_MIXERS
from kda_jax.layers.mixer import MixerConfig
from kda_jax.models.config import HybridConfig
from kda_jax.models.hybrid import HybridLM

MIXERS = (*LINEAR_MIXERS, "attention")
Build = Callable[[nnx.Rngs], HybridLM]


def parse(mixer: str) -> list[str]:
    """The mixers of `config.model.mixer`: one, or several with commas between."""
    mixers = list(dict.fromkeys(name.strip() for name in mixer.split(",")))
    for name in mixers:
        if name not in MIXERS:
            raise ConfigError(f"model.mixer names {name!r}: give one or several, with commas, of {', '.join(MIXERS)}")
    return mixers


def builder(config: Mapping[str, Any], mixer: str, vocab_size: int) -> Build:
    """A function of the generators that builds the model of the config's `model` with `mixer` in every layer."""
    try:
        choices = HybridConfig(
            vocab_size=vocab_size,
            width=config["width"],
            num_heads=config["heads"],
            head_dim=config["head_dim"],
            pattern=(mixer,),
            num_layers=config["layers"],
            mixer=MixerConfig(chunk_size=config["chunk_size"], decay_init=config["decay_init"]),
            rope_theta=config["rope_theta"],
            dtype=config["dtype"],
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model: {error}") from error
    return lambda rngs: HybridLM(choices, rngs=rngs)
