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
flags.register_validator("config", lambda config: config is not None, "give --config=FILE.py")
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
    except OSError as error:
        sys.exit(f"error: --config: {str(error).splitlines()[-1].strip()}; give --config=FILE.py")
    except flags.Error as error:
        sys.exit(f"error: {_one_line(error)}")
    except (AttributeError, KeyError) as error:
        name = _one_line(error.__context__ or error)
        sys.exit(f"error: no such config field: {name}; see experiments/configs/base.py and the file given as --config")
    return rest


def _one_line(error: BaseException) -> str:
    text = str(error.args[0]).strip()
    if "Traceback" in text:  # of the config file, whose own message ends it
        text = text.splitlines()[-1].partition(": ")[2]
    return " ".join(text.split())


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
