"""Compare mixers: one run each inside one workdir, then a table and a figure of all that are there."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from experiments import metrics, models, plot, report
from experiments.errors import ConfigError
from experiments.tasks import registry
from experiments.train import Program, Schedule, fit


def run(config: ConfigDict, workdir: Path) -> list[report.Run]:
    """Train `config.model.mixer`, one mixer or several with commas between, each in its own folder of `workdir`.

    Finished runs are skipped and an interrupted one goes on from its last checkpoint: the same command resumes. More
    mixers may join later; all else must be as in the workdir's config.json. report.md and plot.png show all runs.

    Raises:
      ConfigError: for a setting that cannot be used, before anything is trained.
    """
    task = registry.make(config.task)
    schedule = Schedule(**config.train)
    mixers = models.parse(config.model.mixer)
    builds = {mixer: models.builder(config.model, mixer, task.vocab_size) for mixer in mixers}
    claim(workdir, config)
    with lock(workdir):
        for mixer, build in builds.items():
            program = Program(build, task, schedule)
            fit(program, workdir / mixer, header(config, mixer, program), mixer)
        runs = report.load(workdir)
        (workdir / "report.md").write_text("\n".join([report.table(runs), report.slices(runs)]))
        plot.save(workdir / "plot.png", {config.task.name: runs})
    return runs


@contextlib.contextmanager
def lock(workdir: Path) -> Iterator[None]:
    """Keep other processes out of `workdir`; the system lets go when this one ends, however it ends."""
    with open(workdir / "config.json") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"--workdir={workdir}: another process trains there; wait for it or give another"
            ) from error
        yield


def header(config: ConfigDict, mixer: str, program: Program) -> dict[str, Any]:
    """The first line of a run's logs."""
    own = config.to_dict()
    own["model"]["mixer"] = mixer
    return {"config": own, "seed": program.schedule.seeds, "parameters": program.parameters, **metrics.provenance()}


def claim(workdir: Path, config: ConfigDict) -> None:
    """Write the config into a new workdir, or check that an old one holds the same."""
    common = config.to_dict()
    del common["model"]["mixer"]  # each run's own
    wanted = json.dumps(common, indent=2)
    path = workdir / "config.json"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            draft = path.with_suffix(".draft")
            draft.write_text(wanted)
            draft.replace(path)  # complete or absent
        found = path.read_text()
    except OSError as error:
        raise ConfigError(f"--workdir={workdir}: {error.strerror}; give a folder that can be written") from error
    if not os.access(workdir, os.W_OK):
        raise ConfigError(f"--workdir={workdir}: not writable; give a folder that can be written")
    here, there = dict(_flat(json.loads(wanted))), dict(_flat(json.loads(found)))
    for name in here | there:
        if here.get(name) != there.get(name):
            differs = f"config.{name} is {here.get(name)} here but {there.get(name)} in {path}"
            raise ConfigError(f"{differs}; give the same value, or another --workdir")


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
