"""A model and its config as one Orbax checkpoint: any `HybridConfig`, any sharding, written and read in parallel.

orbax.save(there, *hf.load(here))        a published checkpoint to Orbax
hf.save(there, *orbax.load(here))        and back
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

from kda_jax.layers.mixer import MixerConfig
from kda_jax.layers.mla import MLAConfig
from kda_jax.layers.mlp import SiTU
from kda_jax.layers.moe import MoEConfig
from kda_jax.models.config import HybridConfig
from kda_jax.models.hybrid import HybridLM
from kda_jax.models.sharding import Shard

NESTED = {"mixer": MixerConfig, "mla": MLAConfig, "moe": MoEConfig, "situ": SiTU}


def save(directory: str | Path, config: HybridConfig, model: HybridLM) -> None:
    """Writes the config and the parameters, complete or not at all.

    Raises:
      ValueError: if the directory exists.
    """
    parameters = nnx.to_pure_dict(nnx.state(model))
    items = ocp.args.Composite(config=ocp.args.JsonSave(_to_dict(config)), parameters=ocp.args.StandardSave(parameters))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(Path(directory).absolute(), items)


def load(directory: str | Path, *, shard: Shard | None = None) -> tuple[HybridConfig, HybridLM]:
    """The config and the model, each device reading its own part.

    Args:
      directory: of a `save`.
      shard: where each parameter belongs; by default on the first device.

    Raises:
      FileNotFoundError: if there is no such directory.
      ValueError: if it is none of a `save`.
    """
    directory = Path(directory).absolute()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        if directory.is_dir() and not (directory / "config").is_dir():
            raise ValueError(f"{directory} must be what kda_jax.models.orbax.save wrote, but has no directory 'config'")
        stored = checkpointer.restore(directory, ocp.args.Composite(config=ocp.args.JsonRestore()))
        config = _from_dict(stored["config"])
        graphdef, state = nnx.split(nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0))))
        single = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        flat = {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=single if shard is None else shard(path, x.shape))
            for path, x in ((path, variable.get_value()) for path, variable in nnx.to_flat_state(state))
        }
        like = nnx.traversals.unflatten_mapping(flat)
        stored = checkpointer.restore(directory, ocp.args.Composite(parameters=ocp.args.StandardRestore(like)))
    nnx.replace_by_pure_dict(state, stored["parameters"])
    return config, nnx.merge(graphdef, state)


def _to_dict(config: HybridConfig) -> dict[str, Any]:
    names = {name: jnp.dtype(getattr(config, name)).name for name in ("dtype", "param_dtype")}
    return dataclasses.asdict(config) | names


def _from_dict(fields: dict[str, Any]) -> HybridConfig:
    """JSON has lists where the config has tuples."""
    nested = {name: NESTED[name](**fields[name]) for name in NESTED if fields[name] is not None}
    tuples = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return HybridConfig(**(fields | tuples | nested))
