"""What a model is trained on.

A task makes its batches on the device from a key, so that a step's data depends on seed and step alone.
"""

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Batch(NamedTuple):
    """Tokens of B rows of T positions; the loss and the accuracy count `targets` where `mask` holds."""

    inputs: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    segment_ids: Int[Array, "B T"] | None = (
        None  # equal ids are one sequence, 0 is padding; None: a row is one sequence
    )


class Task(Protocol):
    """A frozen dataclass that is also a pytree: its arrays, if it has any, enter a compiled program as arguments."""

    @property
    def length(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def batch(self, key: jax.Array) -> Batch:
        """`rows` fresh rows to train on."""

    def held_out(self, key: jax.Array) -> Batch:
        """Rows to evaluate on."""

    def scores(self, nats: Float[Array, "B T"], correct: Bool[Array, "B T"], batch: Batch) -> dict[str, jax.Array]:
        """Scalars for held-out rows, from each position's cross-entropy and whether its most likely token was right."""


def mean(x: Array, mask: Bool[Array, "B T"]) -> jax.Array:
    """Mean of `x` where `mask` holds; 0 where it holds nowhere."""
    return jnp.sum(x, where=mask) / jnp.maximum(jnp.sum(mask), 1)


def require_positive(**fields: int) -> None:
    """Raise a ValueError that names the first of a task's `fields` below 1."""
    for name, value in fields.items():
        if value < 1:
            raise ValueError(f"task.{name} is {value}: give at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthetic:
    """A task drawn at random, row by row, whose targets have one right answer."""

    length: int
    rows: int
    eval_rows: int

    def __post_init__(self) -> None:
        require_positive(**dataclasses.asdict(self))

    def row(self, key: jax.Array) -> Batch:
        """One row: arrays of shape [T]."""
        raise NotImplementedError

    def batch(self, key: jax.Array) -> Batch:
        return jax.vmap(self.row)(jax.random.split(key, self.rows))

    def held_out(self, key: jax.Array) -> Batch:
        return jax.vmap(self.row)(jax.random.split(key, self.eval_rows))

    def scores(self, nats: Float[Array, "B T"], correct: Bool[Array, "B T"], batch: Batch) -> dict[str, jax.Array]:
        """`accuracy` counts tokens, `sequence_accuracy` rows with every target right."""
        return {
            "loss": mean(nats, batch.mask),
            "accuracy": mean(correct, batch.mask),
            "sequence_accuracy": jnp.mean(jnp.all(correct | ~batch.mask, axis=1)),
        }
