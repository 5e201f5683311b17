"""Time a training step of a hybrid with three layers of KDA to one of latent attention, and say its MFU.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m experiments.step_bench [--size=1.3b|tiny] [--rows=8]
        [--micro_batches=1] [--output=FILE.jsonl]

A step is a whole one: loss and gradients on random tokens, AdamW on float32 weights, computing in bfloat16. No
activation is recomputed; where those of all rows do not fit the memory, take the rows in micro batches, one after the
other. A line of JSON is one measurement and the first says of what.

MFU is the rate of the model's operations over the device's dense bfloat16 peak. A token's operations, forward and
backward: 6 for every weight that multiplies it (embedding and logits share one matrix, counted once), 3 H T (K + V) a
layer of attention (its causal half), and 18 H K V a layer of KDA: those of the recurrence, three products of a vector
and the state, not those that the chunks add.
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import app, flags
from flax import nnx
from jaxtyping import Array, Int

from experiments import commands, metrics
from experiments.commands import SIZE, Row, one_line, read_flags, record
from experiments.errors import ConfigError
from kda_jax.layers import MLAConfig
from kda_jax.models import HybridConfig, HybridLM
from kda_jax.models.hybrid import parameter_counts

flags.adopt_module_key_flags(commands)  # --help explains them too
_ROWS = flags.DEFINE_integer("rows", 8, "Sequences a step.", lower_bound=1)
_MICRO_BATCHES = flags.DEFINE_integer("micro_batches", 1, "In how many parts they are taken.", lower_bound=1)

ROUNDS = 10
PEAK = {"NVIDIA H200": 989.4e12, "NVIDIA H100 80GB HBM3": 989.4e12}  # dense bfloat16, operations a second
OPTIMIZER = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
PATTERN = ("kda", "kda", "kda", "mla")

# Queries and keys of 128 channels, values of as many: what cuDNN's attention takes.
SIZES = {
    "1.3b": (
        4096,
        HybridConfig(
            vocab_size=32768,
            width=2048,
            num_heads=16,
            head_dim=128,
            pattern=PATTERN,
            num_layers=24,
            mlp_width=5632,
            mla=MLAConfig(latent_dim=512, key_dim=96, shared_dim=32, value_dim=128),
            tie_embeddings=True,
            dtype=jnp.bfloat16,
            attention_implementation="cudnn",
        ),
    ),
    "tiny": (
        32,
        HybridConfig(
            vocab_size=64,
            width=16,
            num_heads=2,
            head_dim=8,
            pattern=PATTERN,
            mlp_width=32,
            mla=MLAConfig(latent_dim=8, key_dim=8, shared_dim=4, value_dim=8),
            tie_embeddings=True,
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure, checked."""

    size: str
    rows: int
    micro_batches: int


def parse(size: str | None, rows: int, micro_batches: int) -> Settings:
    """The values of the flags.

    Raises:
      ConfigError: names the flag, its value and what is possible.
    """
    size = size or ("1.3b" if jax.default_backend() == "gpu" else "tiny")
    if size not in SIZES:
        raise ConfigError(f"--size={size}: give one of {', '.join(SIZES)}")
    if rows % micro_batches:
        raise ConfigError(f"--micro_batches={micro_batches}: give a divisor of --rows={rows}")
    return Settings(size, rows, micro_batches)


def header(settings: Settings) -> Row:
    """The first line: on what and with what the others were measured."""
    length, config = SIZES[settings.size]
    return {
        "config": dataclasses.asdict(settings) | {"length": length, "rounds": ROUNDS},
        "model": repr(config),
        "device": jax.devices()[0].device_kind,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        **metrics.provenance(("jax", "jaxlib", "flax", "optax", "numpy")),
    }


def operations(config: HybridConfig, parameters: int, length: int) -> float:
    """A token's, forward and backward; see the module's docstring. parameters: those that multiply a token."""
    attention = 3 * length * config.num_heads * (config.mla.key_dim + config.mla.shared_dim + config.mla.value_dim)
    kda = 18 * config.num_heads * config.head_dim**2
    return 6 * parameters + sum(attention if kind == "mla" else kda for kind in config.layers)


def make_step(graph: Any, micro_batches: int) -> Callable[[Any, Array], tuple[Any, Array]]:
    """((weights, moments), tokens [B, T + 1]) -> ((weights, moments), loss before the step)."""

    def loss(weights: Any, tokens: Int[Array, "B T"]) -> Array:
        logits, _ = nnx.merge(graph, weights)(tokens[:, :-1])
        # One-hot labels, which stay within XLA's fusions: integer ones are gathered and scattered, through more memory.
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(tokens[:, 1:], logits.shape[-1])).mean()

    def step(state: Any, tokens: Int[Array, "B T"]) -> tuple[Any, Array]:
        weights, moments = state

        def add(total: Any, part: Int[Array, "B T"]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(weights, part[0])[::-1]), None

        zero = jax.tree.map(jnp.zeros_like, weights), jnp.zeros(())
        parts = tokens.reshape(micro_batches, 1, -1, tokens.shape[1])
        sums, _ = jax.lax.scan(add, zero, parts)
        gradient, value = jax.tree.map(lambda x: x / micro_batches, sums)
        change, moments = OPTIMIZER.update(gradient, moments, weights)
        return (optax.apply_updates(weights, change), moments), value

    return step


class Trainer:
    """A model in training: its weights and AdamW's state, and a compiled step that replaces them."""

    def __init__(self, config: HybridConfig, micro_batches: int):
        model = HybridLM(config, rngs=nnx.Rngs(0))  # under jit all layers' initialisers would compile one by one
        self.parameters, self.multiplied = parameter_counts(model)
        graph, weights = nnx.split(model)
        self.state = weights, OPTIMIZER.init(weights)
        self._step: Any = jax.jit(make_step(graph, micro_batches), donate_argnums=0)

    def compile(self, tokens: Int[Array, "B T"]) -> int:
        """Compile for the shape of tokens; bytes of temporary memory."""
        self._step = self._step.lower(self.state, tokens).compile()
        return self._step.memory_analysis().temp_size_in_bytes

    def __call__(self, tokens: Int[Array, "B T"]) -> float:
        """Take a step and return the loss before it."""
        self.state, value = self._step(self.state, tokens)
        return float(value)


def run(settings: Settings) -> Iterator[Row]:
    """The measurement, or what went wrong."""
    length, config = SIZES[settings.size]
    row: Row = {"measurement": "training step", "tokens": settings.rows * length}
    try:
        trainer = Trainer(config, settings.micro_batches)
        tokens = jax.random.randint(jax.random.key(1), (settings.rows, length + 1), 0, config.vocab_size)
        start = time.perf_counter()
        temporary = trainer.compile(tokens)
        row |= {"compile_s": time.perf_counter() - start, "temporary_bytes": temporary}
        losses, samples = [trainer(tokens)], []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            losses.append(trainer(tokens))
            samples.append(time.perf_counter() - start)
    except Exception as error:  # out of memory: the line says so
        yield row | {"error": one_line(error)}
        return
    seconds = statistics.median(samples)
    rate = row["tokens"] / seconds * operations(config, trainer.multiplied, length)
    device = jax.devices()[0]
    peak = PEAK.get(device.device_kind)
    yield row | {
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "parameters": trainer.parameters,
        "operations_a_token": operations(config, trainer.multiplied, length),
        "median_ms": 1e3 * seconds,
        "min_ms": 1e3 * min(samples),
        "tokens_a_second": row["tokens"] / seconds,
        "TFLOP/s": rate / 1e12,
        "mfu": rate / peak if peak else None,
        "losses": losses,
    }


def main(argv: list[str]) -> None:
    def plan() -> tuple[Row, Iterator[Row]]:
        settings = parse(SIZE.value, _ROWS.value, _MICRO_BATCHES.value)
        return header(settings), run(settings)

    record(argv, plan)


if __name__ == "__main__":
    app.run(main, flags_parser=read_flags)
