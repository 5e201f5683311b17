"""JSON lines that read the same whether or not the run was interrupted.

The first line of a file is its header: config, seed, versions and commit. Each later line has `step` and scalars. A log
that is opened again at a checkpoint's step drops every later line, so that the steps after it are written once.
"""

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "optax", "orbax-checkpoint")


class Log:
    """Appends lines to `path`: if `step` is 0 a new file that begins with `header`, else what it held up to `step`."""

    def __init__(self, path: Path, header: Mapping[str, Any], step: int):
        if step > 0:
            os.truncate(path, _length_up_to(path, step))
            self._file = path.open("a")
        else:
            self._file = path.open("w")
            self.append([header])

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write `lines` and hand them to the operating system, where they outlive this process."""
        self._file.write("".join(json.dumps(line) + "\n" for line in lines))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _length_up_to(path: Path, step: int) -> int:
    """Bytes of the header and of the lines of step <= `step`."""
    length = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True)):
        if not line.endswith(b"\n") or (number > 0 and json.loads(line)["step"] > step):
            break
        length += len(line)
    return length


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the lines after it; a last line cut short by a kill is left out."""
    header, *lines = (json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n"))
    return header, lines


def provenance(packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """The versions of what computes, and the commit of this source ("-dirty" if edited, null outside a checkout)."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        commit = found.stdout.strip() or None
    except FileNotFoundError:
        commit = None
    versions = {"python": platform.python_version()} | {name: metadata.version(name) for name in packages}
    return {"versions": versions, "commit": commit}
