"""What the benchmarks' commands share: flags, error lines and the file of results."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from experiments import metrics
from experiments.errors import ConfigError

SIZE = flags.DEFINE_string("size", None, "Of a model: 1.3b or tiny; by default 1.3b on a GPU, tiny on a CPU.")
OUTPUT = flags.DEFINE_string("output", os.devnull, "A file for the lines of JSON, which are printed too.")

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
      ConfigError: if it cannot be written.
    """
    path = Path(OUTPUT.value)
    try:
        return metrics.Log(path, header, 0)
    except OSError as error:
        raise ConfigError(f"--output={path}: {error.strerror}; give a file that can be written") from error


def one_line(error: BaseException) -> str:
    """The error's type and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
