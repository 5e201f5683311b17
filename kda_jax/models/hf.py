"""Published checkpoints of Kimi Linear and Kimi K3 (config.json and safetensors) as a `HybridLM`, and back.

    config, model = hf.load(directory)      # hf.load_config(directory): the first alone
    hf.save(directory, config, model)

Saving needs the extra [hf], the package safetensors.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from tqdm import tqdm

from kda_jax.models import hf_config
from kda_jax.models.config import HybridConfig
from kda_jax.models.hf_files import INDEX, Files, read_object
from kda_jax.models.hf_tensors import Entry, Tensor, entries
from kda_jax.models.hybrid import HybridLM
from kda_jax.models.sharding import Shard

CONFIG = "config.json"


def load_config(directory: str | Path) -> HybridConfig:
    """The configuration of a checkpoint; no weight is read.

    Raises:
      FileNotFoundError, ValueError: as `load`, of config.json and of missing files.
    """
    return _open(Path(directory))[0]


def _open(directory: Path) -> tuple[HybridConfig, Files]:
    """What config.json and the files' headers say."""
    document = read_object(directory / CONFIG)
    files = Files.of(directory)
    return hf_config.from_json(document, files.dtype), files


def load(
    directory: str | Path, *, dtype: DTypeLike | None = None, shard: Shard | None = None
) -> tuple[HybridConfig, HybridLM]:
    """The model of a checkpoint, read one parameter at a time, each device getting its own part alone.

    Args:
      directory: has config.json and safetensors files, with an index where there are several.
      dtype: of the weights and the computation; by default what config.json says, or else what the embedding has.
      shard: where each parameter belongs; by default on the default device.

    Raises:
      FileNotFoundError: without config.json or safetensors files.
      ValueError: for a config.json that is none, or with values that this library does not have, listing them.
      CheckpointError: listing every tensor that is missing, superfluous, there twice, of a wrong shape or dtype, or
        truncated.
    """
    config, files = _open(Path(directory))
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype, param_dtype=dtype)
    model = nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    for entry in _progress("loading", files.locate(entries(config, model))):
        flat[entry.path] = flat[entry.path].replace(_place(entry, files, shard))
    return config, nnx.merge(graphdef, nnx.from_flat_state(flat))


def save(directory: str | Path, config: HybridConfig, model: HybridLM, *, shard_bytes: int = 5 * 10**9) -> None:
    """Writes config.json and the weights in the published layout, from which `load` gives the same model bitwise.

    What an error or an interrupt leaves half written is removed.

    Args:
      directory: made if it is not there; must not hold weights already.
      config: of the model.
      model: experts with `MoEConfig.storage` "mxfp4" must hold exactly such numbers, as they do when just loaded.
      shard_bytes: the most bytes of a file, as far as one tensor allows; more than one file come with an index.

    Raises:
      FileExistsError: if the directory has safetensors files or an index of such.
      ImportError: without the package safetensors.
      ValueError: for a model that is not the config's, that the published format cannot hold, or whose experts are no
        MXFP4 numbers.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise ImportError("hf.save needs the package safetensors: pip install 'kda-jax[hf]'") from error
    directory = Path(directory)
    document = hf_config.to_json(config)
    plan = entries(config, model)
    if plan != entries(config, nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0)))):
        raise ValueError("model is not the config's: they differ in the names, shapes or dtypes of the parameters")
    directory.mkdir(parents=True, exist_ok=True)
    present = [*sorted(directory.glob("*.safetensors")), *directory.glob(INDEX)]
    if present:
        raise FileExistsError(f"{directory} holds a checkpoint already: {present[0].name}")
    groups = _groups([tensor for entry in plan for tensor in entry.tensors()], shard_bytes)
    files = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    files = files if len(files) > 1 else ["model.safetensors"]
    arrays, unfinished = _encoded(plan, model), f"{CONFIG}.unfinished"
    try:
        for file, group in zip(files, groups, strict=True):
            save_file(dict(next(arrays) for _ in group), directory / file, metadata={"format": "pt"})
        if len(files) > 1:
            weight_map = {tensor.name: file for file, group in zip(files, groups, strict=True) for tensor in group}
            total = sum(tensor.size for group in groups for tensor in group)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        (directory / unfinished).write_text(json.dumps(document, indent=2) + "\n")
        (directory / unfinished).replace(directory / CONFIG)
    except BaseException:
        for file in (*files, INDEX, unfinished):
            (directory / file).unlink(missing_ok=True)
        raise


def _place(entry: Entry, files: Files, shard: Shard | None) -> jax.Array:
    if shard is None:
        return jnp.asarray(entry.decode(files.read, (slice(None),) * len(entry.shape)))

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return entry.decode(files.read, index)

    return jax.make_array_from_callback(entry.shape, shard(entry.path, entry.shape), part)


def _encoded(plan: list[Entry], model: HybridLM) -> Iterator[tuple[str, np.ndarray]]:
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    for entry in _progress("saving", plan):
        yield from entry.encode(flat[entry.path].get_value())


def _groups(tensors: list[Tensor], most: int) -> list[list[Tensor]]:
    """The tensors in their order, in groups of at most `most` bytes or of one tensor."""
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.size > most:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.size
    return groups


def _progress(title: str, plan: list[Entry]) -> Iterator[Entry]:
    """The entries, with a progress bar in bytes on a terminal."""
    total = sum(entry.size for entry in plan)
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=None) as bar:
        for entry in plan:
            yield entry
            bar.update(entry.size)
