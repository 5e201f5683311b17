"""Multi-query associative recall and its overwriting variant.

Sources: Kimi Linear, arXiv 2510.26692, section 5.1; Zoology, arXiv 2312.04927.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from experiments.tasks import Batch, Synthetic


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall(Synthetic):
    """Key-value pairs, a separator, then every key once more, spread over the rest of the row; answer with its value.

    With 3 `distinct` keys (letters), `length` 13, "|" the separator, "." a blank that asks nothing:

        inputs   A 4 C 7 B 0 | . B . A C .
        targets  - - - - - - - - 0 - 4 7 -

    With `writes` of 2 each key is written twice, in random order, and the answer is the last value written:

        inputs   A 4 B 7 A 1 C 0 C 3 B 5 | B A C
        targets  - - - - - - - - - - - - - 5 1 3

    Keys are drawn from `num_keys` tokens without repetition, values from `num_values` other tokens. The answer is due
    at the key itself. Chance is 1 / `num_values`.
    """

    distinct: int
    num_keys: int
    num_values: int
    writes: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distinct > self.num_keys:
            raise ValueError(f"task.distinct is {self.distinct}: give at most task.num_keys = {self.num_keys}")
        needed = 2 * self.pairs + 1 + self.distinct
        if self.length < needed:
            parts = f"{self.pairs} pairs, a separator and {self.distinct} queries"
            raise ValueError(f"task.length is {self.length}: give at least {needed} for {parts}")

    @property
    def pairs(self) -> int:
        return self.distinct * self.writes

    @property
    def vocab_size(self) -> int:
        return self.num_keys + self.num_values + 2  # keys, values, separator, blank

    def row(self, key: jax.Array) -> Batch:
        """Slot s is the s-th of the `distinct` keys: `name[s]` is its token, `order` lists the slot of each write."""
        separator, blank, start = self.vocab_size - 2, self.vocab_size - 1, 2 * self.pairs + 1
        # One draw for everything: each draw costs compilation time, and ranks of uniform numbers are a random order.
        sizes = np.cumsum([self.num_keys, self.pairs, self.pairs, self.distinct, self.length - start])
        for_name, for_order, for_value, for_query, for_place = jnp.split(
            jax.random.uniform(key, (int(sizes[-1]),)), sizes[:-1]
        )
        name = jnp.argsort(for_name)[: self.distinct]
        order = jnp.argsort(for_order) % self.distinct
        value = self.num_keys + (self.num_values * for_value).astype(jnp.int32)
        query = jnp.argsort(for_query)
        place = start + jnp.argsort(for_place)[: self.distinct]

        is_write = order[None, :] == query[:, None]
        answer = value[jnp.max(jnp.where(is_write, jnp.arange(self.pairs)[None, :], -1), axis=1)]  # the last write's
        written = jnp.append(jnp.stack([name[order], value], axis=1).reshape(-1), separator)
        inputs = jnp.full(self.length, blank).at[:start].set(written).at[place].set(name[query])
        targets = jnp.zeros(self.length, jnp.int32).at[place].set(answer)
        return Batch(inputs, targets, jnp.zeros(self.length, bool).at[place].set(True))
