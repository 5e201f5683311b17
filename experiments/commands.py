"""What the benchmarks' commands share: flags, error lines and the file of results."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from experiments import metrics
from experiments.errors import ConfigError

SIZE = flags.DEFINE_string("size", None, "Of a model: 1.3b or tiny; by default 1.3b on a GPU, tiny on a CPU.")
OUTPUT = flags.DEFINE_string("output", os.devnull, "A new file for the lines of JSON, which are printed too.")

Row = dict[str, Any]


def read_flags(argv: list[str]) -> list[str]:
    """Read the flags; a wrong one ends the program with one line of error."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


def open_log(header: Mapping[str, Any]) -> metrics.Log:
    """A new log at --output.

    Raises:
      ConfigError: if there is a file already, or it cannot be written.
    """
    path = Path(OUTPUT.value)
    if path.is_file():
        raise ConfigError(f"--output={path}: holds results already; give a new file")
    try:
        return metrics.Log(path, header, 0)
    except OSError as error:
        raise ConfigError(f"--output={path}: {error.strerror}; give a file that can be written") from error


def one_line(error: BaseException) -> str:
    """The error's type and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class WrongResultError(RuntimeError):
    """A version is not the recurrence, so its speed means nothing."""


def record(argv: Sequence[str], plan: Callable[[], tuple[Mapping[str, Any], Iterable[Row]]]) -> list[Row]:
    """The rows of `plan()` behind its header, each printed and logged as it comes.

    A ConfigError or a WrongResultError ends the program with one line of error.
    """
    try:
        if argv[1:]:
            raise ConfigError(f"{argv[1]!r} is not a flag; see --help")
        header, measured = plan()
        log = open_log(header)
        print(json.dumps(header), flush=True)
        rows = []
        for row in measured:
            rows.append(row)
            log.append([row])
            print(json.dumps(row), flush=True)
    except (ConfigError, WrongResultError) as error:
        sys.exit(f"error: {error}")
    return rows
