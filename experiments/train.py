"""Train one mixer on one task: a whole grid of seeds and learning rates in one compiled program."""

import dataclasses
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jaxtyping import Array, Int
from tqdm import tqdm

from experiments import metrics
from experiments.errors import ConfigError
from experiments.tasks import Batch, Task, mean

INIT, HELD_OUT, TRAINING = range(3)  # what a seed's key is split into
NO_WEIGHT_DECAY = ("A_log", "dt_bias")  # beside every vector: norms and biases


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How long to train, what grid of runs, and how often to log, evaluate and save; checks itself."""

    steps: int
    warmup: int
    log_every: int
    eval_every: int
    checkpoint_every: int
    seeds: tuple[int, ...]
    learning_rates: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("steps", "warmup", "log_every", "eval_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name} is {getattr(self, name)}: give at least 1")
        for name in ("steps", "eval_every", "checkpoint_every"):
            if getattr(self, name) % self.log_every:
                raise ConfigError(
                    f"train.{name} is {getattr(self, name)}: give a multiple of train.log_every = {self.log_every}"
                )
        if not self.seeds or not all(isinstance(seed, int) and 0 <= seed < 2**31 for seed in self.seeds):
            raise ConfigError(f"train.seeds is {self.seeds}: give integers from 0 to 2**31 - 1, such as (0,1,2)")
        if not self.learning_rates or not all(
            isinstance(rate, int | float) and rate > 0 for rate in self.learning_rates
        ):
            raise ConfigError(
                f"train.learning_rates is {self.learning_rates}: give numbers above 0, such as (1e-3,3e-3)"
            )
        if len(set(self.members)) < len(self.members):
            raise ConfigError(
                f"train.seeds {self.seeds}, train.learning_rates {self.learning_rates}: give each value once"
            )

    @property
    def members(self) -> list[tuple[int, float]]:
        """The grid, a (seed, learning rate) each."""
        return [(seed, rate) for rate in self.learning_rates for seed in self.seeds]

    @property
    def blocks(self) -> range:
        """The steps at which a line is logged."""
        return range(self.log_every, self.steps + 1, self.log_every)


class State(NamedTuple):
    params: Any
    optimizer: Any


def weight_decay_mask(params: Any) -> Any:
    """True for the matrices: no weight decay on A_log, dt_bias, norms and biases."""

    def decays(path: tuple[Any, ...], leaf: jax.Array) -> bool:
        return leaf.ndim >= 2 and not any(name in jax.tree_util.keystr(path) for name in NO_WEIGHT_DECAY)

    return jax.tree_util.tree_map_with_path(decays, params)


def optimizer(schedule: Schedule, rate: jax.Array | float) -> optax.GradientTransformation:
    """AdamW after clipping to norm 1; `rate` is reached after the warm-up and falls to a tenth along a cosine."""
    shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, schedule.warmup, max(schedule.steps, schedule.warmup + 1), 0.1)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.flatten(optax.scale_by_adam(b1=0.9, b2=0.95)),  # one kernel instead of one a parameter
        optax.add_decayed_weights(0.1, mask=weight_decay_mask),
        optax.scale_by_learning_rate(lambda step: rate * shape(step)),
    )


class Program:
    """The compiled functions of one run. Every member of the grid is one entry of the leading axis, G, of the state.

    A seed's key gives its initial parameters, its held-out rows and, folded with the step, its training rows: mixers
    and learning rates meet the same data, and a resumed run needs no state of a generator.
    """

    def __init__(self, build: Any, task: Task, schedule: Schedule):
        self.task = task
        self.seeds, self.rates = (jnp.array(column) for column in zip(*schedule.members, strict=True))
        self.schedule = schedule
        self._build = build
        self._graph, shapes = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        # Run once, so time spent on optimising it would be lost.
        self.init = jax.jit(jax.vmap(self._init), compiler_options={"xla_backend_optimization_level": 0})
        self.train = jax.jit(jax.vmap(self._train, in_axes=(None, 0, None, 0, 0)), donate_argnums=1)
        self.evaluate = jax.jit(jax.vmap(self._evaluate, in_axes=(None, 0, 0)))

    def _init(self, seed: jax.Array, rate: jax.Array) -> State:
        params = nnx.state(self._build(nnx.Rngs(_key(seed, INIT))))
        return State(params, optimizer(self.schedule, rate).init(params))

    def _train(self, task: Task, state: State, step: jax.Array, seed: jax.Array, rate: jax.Array):
        """`log_every` steps after `step`, and their mean loss and accuracy."""

        def update(state: State, step: jax.Array) -> tuple[State, dict[str, jax.Array]]:
            batch = task.batch(jax.random.fold_in(_key(seed, TRAINING), step))

            def loss(params: Any) -> tuple[jax.Array, jax.Array]:
                nats, correct = self._predict(params, batch)
                return mean(nats, batch.mask), mean(correct, batch.mask)

            (value, accuracy), gradient = jax.value_and_grad(loss, has_aux=True)(state.params)
            change, optimizer_state = optimizer(self.schedule, rate).update(gradient, state.optimizer, state.params)
            state = State(optax.apply_updates(state.params, change), optimizer_state)
            return state, {"loss": value, "accuracy": accuracy}

        state, scalars = jax.lax.scan(update, state, step + jnp.arange(self.schedule.log_every))
        return state, jax.tree.map(jnp.mean, scalars)

    def _evaluate(self, task: Task, params: Any, batch: Batch) -> dict[str, jax.Array]:
        """Scores on held-out rows, taken as many at a time as make a training batch's tokens."""
        rows = max(1, task.rows * task.length // batch.inputs.shape[1])

        def predict(row: Batch) -> tuple[jax.Array, jax.Array]:
            nats, correct = self._predict(params, jax.tree.map(lambda x: x[None], row))
            return nats[0], correct[0]

        nats, correct = jax.lax.map(predict, batch, batch_size=rows)
        return task.scores(nats, correct, batch)

    def _predict(self, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Cross-entropy in nats, and whether the most likely token is the target, at every position."""
        logits, _ = nnx.merge(self._graph, params)(batch.inputs, segment_ids=batch.segment_ids)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch.targets)
        return nats, jnp.argmax(logits, axis=-1) == batch.targets


@jax.jit
def held_out(task: Task, seeds: Int[Array, " G"]) -> Batch:
    """The held-out rows of every member of the grid; one program for all mixers."""
    return jax.vmap(lambda seed: task.held_out(_key(seed, HELD_OUT)))(seeds)


def _key(seed: jax.Array, purpose: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), purpose)


class Checkpoints:
    """The newest state of a run in `directory`; a save is complete or absent, whenever the process dies."""

    def __init__(self, directory: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    @property
    def step(self) -> int:
        """The step of the newest save, 0 before the first."""
        return self._manager.latest_step() or 0

    def save(self, step: int, state: State) -> None:
        self._manager.save(step, args=ocp.args.StandardSave(state._asdict()))

    def restore(self, like: State) -> State:
        """The newest save; `like` has the structure, shapes and types."""
        return State(**self._manager.restore(self.step, args=ocp.args.StandardRestore(like._asdict())))

    def close(self) -> None:
        self._manager.close()


def fit(program: Program, directory: Path, header: dict[str, Any], title: str) -> None:
    """Train to the last step, from where an earlier call that was killed left off.

    `directory` receives metrics.jsonl, a line a grid member every `log_every` steps; timing.jsonl, their speed, apart
    because no two runs share it; and checkpoints/. The lines up to a checkpoint are written before it, so that a log
    can always be cut back to the newest one.
    """
    schedule = program.schedule
    checkpoints = Checkpoints(directory / "checkpoints")
    start = checkpoints.step
    if start == schedule.steps:
        checkpoints.close()
        return
    tqdm.write(f"{title}: compiling", file=sys.stderr)
    like = jax.eval_shape(program.init, program.seeds, program.rates)
    state = checkpoints.restore(like) if start else program.init(program.seeds, program.rates)
    log = metrics.Log(directory / "metrics.jsonl", header, start)
    timing = metrics.Log(directory / "timing.jsonl", header, start)
    rows = held_out(program.task, program.seeds)
    lowered = (
        program.train.lower(program.task, state, jnp.int32(0), program.seeds, program.rates),
        program.evaluate.lower(program.task, state.params, rows),
    )
    with ThreadPoolExecutor() as pool:  # the compiler leaves Python's lock alone
        train, evaluate = pool.map(lambda program: program.compile(), lowered)
    tokens = program.task.rows * program.task.length * len(schedule.members) * schedule.log_every
    with tqdm(total=schedule.steps, initial=start, desc=title, unit="step") as bar:
        for step in (s for s in schedule.blocks if s > start):
            began = time.perf_counter()
            state, scalars = jax.block_until_ready(
                train(program.task, state, jnp.int32(step - schedule.log_every), program.seeds, program.rates)
            )
            speed = tokens / (time.perf_counter() - began)
            if step % schedule.eval_every == 0 or step == schedule.steps:
                scores = evaluate(program.task, state.params, rows)
                scalars |= {f"eval_{name}": value for name, value in scores.items()}
            lines = list(_lines(step, schedule, scalars))
            log.append(lines)
            timing.append([{"step": step, "tokens_per_second": speed}])
            if step % schedule.checkpoint_every == 0 or step == schedule.steps:
                checkpoints.save(step, state)
            best = max(lines, key=lambda line: line["accuracy"])
            bar.set_postfix_str(
                f"loss={best['loss']:.3f} accuracy={best['accuracy']:.3f} tokens/s={speed:,.0f}", refresh=False
            )
            bar.update(schedule.log_every)
    for closing in (log, timing, checkpoints):
        closing.close()


def _lines(step: int, schedule: Schedule, scalars: dict[str, jax.Array]) -> Iterator[dict[str, Any]]:
    """One line a member of the grid."""
    values = {name: np.asarray(value).tolist() for name, value in scalars.items()}
    for g, (seed, rate) in enumerate(schedule.members):
        yield {"step": step, "seed": seed, "learning_rate": rate} | {name: value[g] for name, value in values.items()}
