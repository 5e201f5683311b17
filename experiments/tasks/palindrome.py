"""Palindrome: read a random sequence, then say it backwards (Kimi Linear, arXiv 2510.26692, section 5.1)."""

import dataclasses

import jax
import jax.numpy as jnp

from experiments.tasks import Batch, Synthetic


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Palindrome(Synthetic):
    """n = `length` / 2 random tokens, a separator, then their reversal; the loss is on the reversal.

    The first reversed token is given, so n - 1 positions count. With `length` 14 and "|" the separator:

        inputs   O G R S U N E | E N U S R G
        targets  - - - - - - - - N U S R G O

    Chance is 1 / `symbols`.
    """

    symbols: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 4 or self.length % 2:
            raise ValueError(f"task.length is {self.length}: give an even number of at least 4")

    @property
    def vocab_size(self) -> int:
        return self.symbols + 1  # the separator is the last token

    def row(self, key: jax.Array) -> Batch:
        n = self.length // 2
        forth = jax.random.randint(key, (n,), 0, self.symbols)
        tokens = jnp.concatenate([forth, jnp.array([self.symbols]), forth[::-1]])
        return Batch(tokens[:-1], tokens[1:], jnp.arange(self.length) > n)
