"""The safetensors files of a checkpoint directory: what is in them, and each tensor as a view of its file."""

import dataclasses
import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from kda_jax.models.hf_tensors import OTHER_MODELS, Entry, Tensor

INDEX = "model.safetensors.index.json"
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "U8": np.dtype(np.uint8),
}
FLOATING = f"one of {', '.join(name for name in DTYPES if name != 'U8')}"

MALFORMED = (ValueError, LookupError, TypeError, AttributeError)  # what reading JSON of another form gives


def read_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; raises ValueError, naming the file, if it holds none."""
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} must hold an object, got {document!r}")
    return document


class CheckpointError(ValueError):
    """A checkpoint that does not hold the model: lists every tensor that is wrong."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor where it lies: `dtype` as the file names it, `start` and `end` in bytes of the file, of `size` bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    size: int

    def view(self) -> np.ndarray:
        """The tensor, read from the file as it is used."""
        return np.memmap(self.file, DTYPES[self.dtype], "r", self.start, self.shape)

    def flaw(self, wanted: Tensor, shapes: Iterable[tuple[int, ...]]) -> str | None:
        """What keeps it from being `wanted` in one of `shapes`: another shape or dtype, or bytes that are not there."""
        floating = wanted.dtype != np.uint8
        if self.dtype not in DTYPES or (self.dtype != "U8") != floating:
            return f"dtype {self.dtype}, expected {FLOATING if floating else 'U8'}"
        if self.shape not in shapes:
            return f"shape {list(self.shape)}, expected {' or '.join(str(list(shape)) for shape in shapes)}"
        needed = math.prod(self.shape) * DTYPES[self.dtype].itemsize
        if self.end - self.start != needed or self.end > self.size:
            return f"truncated: {max(0, min(self.end, self.size) - self.start)} bytes of {needed} in {self.file.name}"
        return None


@dataclasses.dataclass(frozen=True)
class Files:
    """The tensors of a directory by name, and what is wrong with its files."""

    tensors: dict[str, Stored]
    flaws: list[str]

    @classmethod
    def of(cls, directory: Path) -> "Files":
        """Those that the index names, or all safetensors files of the directory where there is no index.

        Raises:
          FileNotFoundError: if there are none.
          CheckpointError: if the index is none.
        """
        index = directory / INDEX
        if index.exists():
            try:
                files = [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
            except MALFORMED as error:
                raise CheckpointError(f"{INDEX} names no files: {error!r}") from error
        else:
            files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no safetensors files in {directory}")
        tensors: dict[str, Stored] = {}
        flaws = []
        for file in files:
            try:
                found = _header(file)
            except (OSError, struct.error, *MALFORMED) as error:
                flaws.append(f"unreadable: {file.name}: {error}")
                continue
            twice = [name for name in found if name in tensors]
            flaws += [f"twice: {name}, in {tensors[name].file.name} and {file.name}" for name in twice]
            tensors |= found
        return cls(tensors, flaws)

    def locate(self, entries: list[Entry]) -> list[Entry]:
        """The entries under the names that the files have, once every tensor has been found sound.

        Raises:
          CheckpointError: listing all that is missing, superfluous, there twice, of a wrong shape or dtype, or
            truncated.
        """
        entries = [self._present(entry) for entry in entries]
        flaws = list(self.flaws)
        wanted = {tensor.name: (tensor, entry) for entry in entries for tensor in entry.tensors()}
        for name, (tensor, entry) in wanted.items():
            if name not in self.tensors:
                flaws.append(f"missing: {name}")
                continue
            shapes = (tensor.shape,) if entry.packed else entry.shapes
            flaw = self.tensors[name].flaw(tensor, shapes)
            flaws += [] if flaw is None else [f"{name}: {flaw}"]
        flaws += [f"superfluous: {n}" for n in self.tensors if n not in wanted and not n.startswith(OTHER_MODELS)]
        if flaws:
            raise CheckpointError(f"the checkpoint does not hold this model, {len(flaws)} flaws:\n" + "\n".join(flaws))
        return entries

    @property
    def dtype(self) -> np.dtype:
        """Of the embedding; float32 where that is not found."""
        found = [x.dtype for name, x in self.tensors.items() if name.endswith("embed_tokens.weight")]
        return DTYPES.get(found[0], DTYPES["F32"]) if found else DTYPES["F32"]

    def read(self, name: str) -> np.ndarray:
        """A tensor as a view of its file."""
        return self.tensors[name].view()

    def _present(self, entry: Entry) -> Entry:
        if entry.alias is not None and entry.name not in self.tensors and entry.alias in self.tensors:
            return dataclasses.replace(entry, name=entry.alias)
        return entry


def _header(file: Path) -> dict[str, Stored]:
    """The tensors of one file: eight bytes for the length of the JSON header, the header, the data."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > size:
            raise ValueError(f"the header would take {length} bytes of {size}")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    start = 8 + length
    if not all(isinstance(entry["dtype"], str) for entry in header.values()):
        raise ValueError("a dtype is no string")
    if any(entry["data_offsets"][0] < 0 for entry in header.values()):
        raise ValueError("a tensor would begin before the data")
    return {
        name: Stored(
            file,
            entry["dtype"],
            tuple(entry["shape"]),
            start + entry["data_offsets"][0],
            start + entry["data_offsets"][1],
            size,
        )
        for name, entry in header.items()
    }
