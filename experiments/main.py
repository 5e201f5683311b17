"""Run an ablation; intentionally kept short.

    python -m experiments.main --config=experiments/configs/mqar.py:tiny --workdir=runs/mqar [--config.FIELD=VALUE ...]

The same command resumes an interrupted run. The configs' docstrings say what each costs and shows.
"""

import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from experiments import report, sweep
from experiments.errors import ConfigError

_CONFIG = config_flags.DEFINE_config_file(
    "config", help_string="FILE.py[:VARIANT], of experiments/configs.", lock_config=True
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for metrics, checkpoints, report.md and plot.png.", required=True
)


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)  # the checkpoint library tells every step of a save
    try:
        runs = sweep.run(_CONFIG.value, Path(_WORKDIR.value))
    except ConfigError as error:
        sys.exit(f"error: {error}")
    print(report.table(runs))
    print(f"More in {_WORKDIR.value}/report.md; the plot is {_WORKDIR.value}/plot.png")


def parse(argv: list[str]) -> list[str]:
    """Read the flags; a wrong one is a one-line error."""
    try:
        rest = flags.FLAGS(argv)
        _CONFIG.value.keys()  # a file that is missing shows only now
    except (flags.Error, OSError) as error:
        cause = error.__context__
        sys.exit(f"error: {_one_line(cause if isinstance(cause, ConfigError) else error)}")
    except (AttributeError, KeyError) as error:
        sys.exit(
            f"error: no such config field: {_one_line(error.__context__ or error)}; see the file given as --config"
        )
    return rest


def _one_line(error: BaseException) -> str:
    return " ".join(str(error.args[0]).split())


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
