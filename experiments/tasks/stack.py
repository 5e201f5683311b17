"""Stack: follow many last-in-first-out stacks at once (Kimi Linear, arXiv 2510.26692, section 5.1)."""

import dataclasses

import jax
import jax.numpy as jnp

from experiments.tasks import Batch, Synthetic


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack(Synthetic):
    """A stream of operations on `stacks` independent stacks; a pop must say the element last pushed and not yet popped.

    Three tokens an operation: push (+) or pop (-), the stack, the element. A pop is scored at its stack. About
    every second operation is a pop, never of an empty stack. With stacks 0 and 1, letters as elements, "." no target:

        inputs   + 1 G + 0 E + 1 A - 1 A - 0 E - 1 G
        targets  . . . . . . . . . . A . . E . . G .

    Chance is 1 / `symbols`.
    """

    stacks: int
    symbols: int

    @property
    def vocab_size(self) -> int:
        return self.stacks + self.symbols + 2  # stacks, elements, push, pop

    def row(self, key: jax.Array) -> Batch:
        push, pop = self.vocab_size - 2, self.vocab_size - 1
        operations = self.length // 3 + 1  # one token past the end is the last position's target

        def operate(state: tuple[jax.Array, jax.Array], key: jax.Array):
            content, height = state  # [stacks, operations] elements, [stacks] how many of them are on the stack
            for_kind, for_stack, for_element = jax.random.split(key, 3)
            is_pop = jax.random.bernoulli(for_kind) & jnp.any(height > 0)
            stack = jax.random.categorical(for_stack, jnp.where(is_pop & (height == 0), -jnp.inf, 0.0))
            fresh = self.stacks + jax.random.randint(for_element, (), 0, self.symbols)
            element = jnp.where(is_pop, content[stack, height[stack] - 1], fresh)
            content = content.at[stack, jnp.where(is_pop, operations, height[stack])].set(element, mode="drop")
            height = height.at[stack].add(jnp.where(is_pop, -1, 1))
            return (content, height), (jnp.stack([jnp.where(is_pop, pop, push), stack, element]), is_pop)

        empty = jnp.zeros((self.stacks, operations), jnp.int32), jnp.zeros(self.stacks, jnp.int32)
        _, (tokens, is_pop) = jax.lax.scan(operate, empty, jax.random.split(key, operations))
        stream, counted = tokens.reshape(-1), jnp.repeat(is_pop, 3)[: self.length]
        return Batch(stream[: self.length], stream[1 : self.length + 1], counted & (jnp.arange(self.length) % 3 == 1))
