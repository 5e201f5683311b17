"""Runs: what is trained, that a kill at any moment leaves no trace, and that what cannot run says why in one line."""

import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from experiments import models, report, sweep
from experiments.configs import mqar, overwrite, palindrome, stack, text
from experiments.errors import ConfigError
from experiments.tasks import registry
from experiments.train import Checkpoints, Program, Schedule, held_out, optimizer

ROOT = Path(__file__).parent.parent


def small(mixer: str = "attention", **train: object) -> ConfigDict:
    """A run of a second: two seeds, two rates, and attention because it compiles fast."""
    config = mqar.get_config("tiny")
    config.task.update(length=10, rows=4, eval_rows=4, distinct=3, num_keys=4, num_values=4)
    config.model.update(mixer=mixer, layers=1, width=8, heads=1, head_dim=8, chunk_size=16)
    config.train.update(steps=60, warmup=10, log_every=5, eval_every=10, checkpoint_every=10, seeds=(0, 1))
    config.train.update(learning_rates=(1e-2, 1e-3))
    config.train.update(train)
    return config


def program(config: ConfigDict) -> Program:
    task = registry.make(config.task)
    return Program(models.builder(config.model, config.model.mixer, task.vocab_size), task, Schedule(**config.train))


def test_every_config_builds_every_mixer():
    for module in (mqar, overwrite, palindrome, stack, text):
        for variant in ("published", "tiny"):
            config = module.get_config(variant)
            task, schedule = registry.make(config.task), Schedule(**config.train)
            assert len(schedule.seeds) * len(schedule.learning_rates) == len(schedule.members)
            for mixer in models.parse(config.model.mixer) if module is mqar else ["kda"]:
                shapes = nnx.eval_shape(
                    lambda m=mixer, c=config, v=task.vocab_size: models.builder(c.model, m, v)(nnx.Rngs(0))
                )
                assert shapes.config.layers == (mixer,) * config.model.layers


def test_no_weight_decay_on_decay_parameters_and_vectors():
    build = models.builder(small("kda").model, "kda", 10)
    tx = optimizer(Schedule(**small().train), 0.5)

    @jax.jit
    def idle():
        """The parameters and the second step's change without a gradient; at the first step the rate is 0."""
        params = nnx.state(build(nnx.Rngs(0)))
        zero = jax.tree.map(jnp.zeros_like, params)
        return params, tx.update(zero, tx.update(zero, tx.init(params), params)[1], params)[0]

    params, change = idle()
    kept, shrunk = set(), set()
    for (path, before), delta in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(change), strict=True):
        name = next(part for part in path[::-1] if isinstance(part, jax.tree_util.DictKey)).key
        (shrunk if np.any(delta) else kept).add(name)
        np.testing.assert_allclose(delta, -0.5 * 0.1 * 0.1 * before * bool(np.any(delta)), rtol=1e-5)
    assert {"A_log", "dt_bias", "scale"} <= kept
    assert {"kernel", "embedding"} <= shrunk
    assert not kept & shrunk


def test_a_member_of_the_grid_is_the_run_on_its_own():
    config = small(seeds=(0, 3), learning_rates=(1e-2, 1e-3))
    alone = small(seeds=(3,), learning_rates=(1e-2,))
    results = []
    for p in (program(config), program(alone)):
        state = p.init(p.seeds, p.rates)
        for step in (0, 5):
            state, scalars = p.train(p.task, state, jnp.int32(step), p.seeds, p.rates)
        member = p.schedule.members.index((3, 1e-2))
        scores = p.evaluate(p.task, state.params, held_out(p.task, p.seeds))
        results.append(jax.tree.map(lambda x, g=member: np.asarray(x[g]), (state.params, scalars, scores)))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-5)


def test_kda_learns(tmp_path):
    config = small("kda", steps=200, warmup=20, log_every=20, eval_every=40, checkpoint_every=200, seeds=(0,))
    config.train.learning_rates = (1e-2,)
    config.model.update(width=16)
    config.task.rows = 32
    (run,) = sweep.run(config, tmp_path)
    assert run.lines[-1]["eval_accuracy"] > 0.9
    assert run.header["seed"] == [0]
    assert run.header["config"] == config.to_dict() | {"train": run.header["config"]["train"]}
    assert set(run.header["versions"]) >= {"jax", "flax", "optax", "python"}
    assert (tmp_path / "plot.png").exists()
    assert (tmp_path / "report.md").read_text().strip() == report.table([run]).strip()


# Each runs the same training; all but the last kill it: in the middle of a line, between the log and the checkpoint it
# leads to, and while a checkpoint is being written.
INTERRUPTIONS = [
    """
    append = metrics.Log.append
    def half(log, lines):
        if lines[0].get("step") == 25:
            log._file.write('{"step": 25, "se'); log._file.flush(); die()
        append(log, lines)
    metrics.Log.append = half
    """,
    """
    save = train.Checkpoints.save
    train.Checkpoints.save = lambda self, step, state: die() if step == 40 else save(self, step, state)
    """,
    """
    save = train.Checkpoints.save
    def during(self, step, state):
        if step == 50:
            threading.Timer(0.02, die).start()
        save(self, step, state)
    train.Checkpoints.save = during
    """,
    "",
]
CHILD = """
import os, signal, sys, threading
from pathlib import Path
sys.path.insert(0, "tests")
from experiments import metrics, sweep, train
from test_experiments_runs import small
def die():
    os.kill(os.getpid(), signal.SIGKILL)
{interruption}
sweep.run(small(), Path(sys.argv[1]))
"""


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    sweep.run(small(), whole)
    for interruption in INTERRUPTIONS:
        command = [sys.executable, "-c", CHILD.format(interruption=textwrap.dedent(interruption)), killed]
        child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert child.returncode == (-signal.SIGKILL if interruption else 0), child.stderr
    logs = [(folder / "attention" / "metrics.jsonl").read_text() for folder in (whole, killed)]
    assert logs[0] == logs[1]
    assert len(logs[0].splitlines()) == 1 + 12 * 4
    states = []
    for folder in (whole, killed):
        p = program(small())
        checkpoints = Checkpoints(folder / "attention" / "checkpoints")
        assert checkpoints.step == 60
        states.append(checkpoints.restore(jax.eval_shape(p.init, p.seeds, p.rates)))
        checkpoints.close()
    assert all(map(np.array_equal, *map(jax.tree.leaves, states)))


def test_a_workdir_keeps_to_its_config(tmp_path):
    config = small()
    sweep.claim(tmp_path, config)
    config.model.mixer = "kda,gla"  # more mixers may join
    sweep.claim(tmp_path, config)
    config.train.steps = 120
    with pytest.raises(
        ConfigError, match=r"config.train.steps is 120 here but 60 in .*config.json; give the same value, or"
    ):
        sweep.claim(tmp_path, config)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--workdir=.*file: .*; give a folder that can be written"):
        sweep.claim(tmp_path / "file", config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 61}, "train.steps is 61: give a multiple of train.log_every = 5"),
        ({"warmup": 0}, "train.warmup is 0: give at least 1"),
        ({"seeds": ("a",)}, "train.seeds is .'a',.: give integers"),
        ({"learning_rates": (0.0,)}, "train.learning_rates is .0.0,.: give numbers above 0"),
        ({"seeds": (1, 1)}, "give each value once"),
    ],
)
def test_a_schedule_that_cannot_be_says_why(fields, message):
    with pytest.raises(ConfigError, match=message):
        Schedule(**small(**fields).train)


def test_a_model_that_cannot_be_says_why():
    with pytest.raises(ConfigError, match=r"model.mixer names 'gnd': give one or several, with commas, of kda, "):
        models.parse("kda,gnd")
    config = small()
    for name, value, message in (
        ("heads", 0, "num_heads must be an integer of at least 1"),
        ("decay_init", "fast", "decay_init must be"),
    ):
        broken = config.copy_and_resolve_references()
        broken.model[name] = value
        with pytest.raises(ConfigError, match=f"model: .*{message}"):
            models.builder(broken.model, "kda", 9)


COMMANDS = {
    "misspelt field": (["--config.model.heds=4"], "no such config field: 'heds' Did you mean \"heads\""),
    "wrong type": (["--config.model.heads=2.5"], r"--config.model.heads=2.5: invalid literal for int"),
    "misspelt flag": (["--wrokdir=x"], "Unknown command line flag 'wrokdir'. Did you mean: workdir"),
    "unwritable": (["--workdir=/dev/null/x"], "--workdir=/dev/null/x: .*; give a folder that can be written"),
    "no such variant": (["--config=experiments/configs/mqar.py:tny"], "--config=...:tny: give one of published, tiny"),
    "no such file": (
        ["--config=experiments/configs/mqr.py"],
        "--config: .*No such file or directory: .*mqr.py'; give --config=FILE.py$",
    ),
    "config of None": (["--config=None"], "--config: .*; give --config=FILE.py$"),
    "no config": (["--workdir=x"], "--config=None: give --config=FILE.py$"),
    "impossible value": (["--config.task.length=9"], "task.length is 9: give at least 25"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return code and error output of every one of COMMANDS, run side by side."""
    start = [sys.executable, "-m", "experiments.main", f"--workdir={tmp_path_factory.mktemp('runs')}"]
    config = {name: ["--config=experiments/configs/mqar.py:tiny"] for name in COMMANDS} | {"no config": []}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    children = {
        name: subprocess.Popen([*start, *config[name], *flags], cwd=ROOT, **pipes)
        for name, (flags, _) in COMMANDS.items()
    }
    return {name: (child.communicate()[1], child.returncode) for name, child in children.items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_command_is_a_one_line_error(name, answers):
    error, code = answers[name]
    assert code == 1
    lines = [line for line in error.splitlines() if line]
    assert len(lines) == 1
    assert re.match(f"error: (flag )?{COMMANDS[name][1]}", lines[0])
