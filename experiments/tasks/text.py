"""A language model on bytes of real text: the State of the Union, 1790 to 2026 (experiments/data/README.md)."""

import dataclasses
import lzma
from importlib import resources
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.tasks import Batch, mean, require_positive

START = b"\f"  # opens every document, so that its first byte is predicted too


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """Next-byte prediction. Documents are packed one after another; a row is `length` bytes from a random place on.

    Where a document ends inside a row, the segment id changes, the state resets, and nothing is predicted across. "^"
    opens a document:

        inputs       n   y   e   a   r   .   ^   F   e   l
        targets      y   e   a   r   .   -   F   e   l   l
        segment_ids  7   7   7   7   7   7   8   8   8   8

    Every tenth document is held out. Evaluation reads the first `eval_length` bytes of each from its start, so that
    a byte's position is also the length of the context it is predicted from.
    """

    length: int = dataclasses.field(metadata={"static": True})
    rows: int = dataclasses.field(metadata={"static": True})
    decades: tuple[int, ...] = dataclasses.field(metadata={"static": True})  # of each held-out document
    stream: Int[Array, " N"]  # uint8: the training documents
    document: Int[Array, " N"]  # uint16: which of them each byte belongs to, from 1
    openings: Int[Array, "D L"]  # uint8: the first L = eval_length + 1 bytes of every held-out document
    sizes: Int[Array, " D"]  # how many of them are text, the rest is padding

    @classmethod
    def load(cls, *, length: int, rows: int, eval_length: int) -> Self:
        """Read experiments/data."""
        require_positive(length=length, rows=rows, eval_length=eval_length)
        documents = read()
        training = [text for i, (_, text) in enumerate(documents) if i % 10 != 9]
        held_out = documents[9::10]
        lengths = [len(text) for text in training]
        if length >= sum(lengths):
            raise ValueError(f"task.length is {length}: the text has {sum(lengths)} bytes, give fewer")
        openings = np.zeros((len(held_out), eval_length + 1), np.uint8)
        sizes = np.array([min(len(text), eval_length + 1) for _, text in held_out], np.int32)
        for row, size, (_, text) in zip(openings, sizes, held_out, strict=True):
            row[:size] = np.frombuffer(text[:size], np.uint8)
        return cls(
            length=length,
            rows=rows,
            decades=tuple(year // 10 * 10 for year, _ in held_out),
            stream=jnp.asarray(np.frombuffer(b"".join(training), np.uint8)),
            document=jnp.asarray(np.repeat(np.arange(1, len(training) + 1, dtype=np.uint16), lengths)),
            openings=jnp.asarray(openings),
            sizes=jnp.asarray(sizes),
        )

    @property
    def vocab_size(self) -> int:
        return 256

    def batch(self, key: jax.Array) -> Batch:
        start = jax.random.randint(key, (self.rows,), 0, self.stream.size - self.length)

        def window(x: Array) -> Array:
            cut = jax.vmap(lambda s: jax.lax.dynamic_slice(x, (s,), (self.length + 1,)))
            return cut(start).astype(jnp.int32)

        tokens, document = window(self.stream), window(self.document)
        return Batch(tokens[:, :-1], tokens[:, 1:], document[:, :-1] == document[:, 1:], document[:, :-1])

    def held_out(self, key: jax.Array) -> Batch:
        """The same rows whatever the key."""
        tokens = jnp.asarray(self.openings, jnp.int32)
        used = jnp.arange(tokens.shape[1])[None, :] < self.sizes[:, None]
        return Batch(tokens[:, :-1], tokens[:, 1:], used[:, 1:], used[:, :-1].astype(jnp.int32))

    def scores(self, nats: Float[Array, "D L"], correct: Bool[Array, "D L"], batch: Batch) -> dict[str, jax.Array]:
        """`bits_per_byte` of all bytes, of those from position 0, 64, 256, 1024, ... to the next, and by decade."""
        bits = jnp.where(batch.mask, nats / np.log(2), 0)
        starts = [0, *(4**n for n in range(3, 16) if 4**n < bits.shape[1])]
        decades = sorted(set(self.decades))
        bucket = np.searchsorted(starts, np.arange(bits.shape[1]), side="right") - 1
        by_position = _means(bits.sum(0), batch.mask.sum(0), bucket, len(starts))
        by_decade = _means(bits.sum(1), batch.mask.sum(1), np.searchsorted(decades, self.decades), len(decades))
        return {
            "loss": mean(nats, batch.mask),
            "accuracy": mean(correct, batch.mask),
            "bits_per_byte": mean(bits, batch.mask),
            **{f"bits_per_byte_from_{start}": by_position[i] for i, start in enumerate(starts)},
            **{f"bits_per_byte_{decade}s": by_decade[i] for i, decade in enumerate(decades)},
        }


def _means(total: Array, count: Array, group: np.ndarray, groups: int) -> Array:
    """Sum of `total` over sum of `count` in each group; entry i belongs to `group[i]`."""
    member = np.arange(groups)[:, None] == group[None, :]
    return (member @ total) / (member @ count)


def read() -> list[tuple[int, bytes]]:
    """Year and text of every document, in order of time."""
    packed = resources.files("experiments.data").joinpath("state_of_the_union.txt.xz").read_bytes()
    names_and_texts = (document.split(b"\n", 1) for document in lzma.decompress(packed).split(START))
    return [(int(name[:4]), START + text) for name, text in names_and_texts]
