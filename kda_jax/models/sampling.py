"""How the next token is drawn from logits; every row of a batch may have settings of its own."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

FIELDS = ("temperature", "top_k", "top_p", "min_p")


@functools.partial(jax.tree_util.register_dataclass, data_fields=FIELDS, meta_fields=())
@dataclasses.dataclass(frozen=True)
class Sampling:
    """A draw from softmax(logits / temperature), cut to its likely tokens and renormalised.

    Tokens exactly as likely as the last one kept are kept too. Each field is a number, or an array [B] with one for
    every row.

    Attributes:
      temperature: 0 takes the most likely token (greedy), and the rest is then of no account.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: of those, keep the fewest that hold this part of their probability, in (0, 1].
      min_p: keep those at least this part as likely as the most likely one, in [0, 1].

    Raises:
      ValueError: for a number out of range, naming the field.
    """

    temperature: float | Float[Array, " B"] = 0.0
    top_k: int | Int[Array, " B"] = 0
    top_p: float | Float[Array, " B"] = 1.0
    min_p: float | Float[Array, " B"] = 0.0

    def __post_init__(self) -> None:
        allowed = {
            "temperature": ("finite and at least 0", lambda x: 0 <= x < math.inf),
            "top_k": ("an integer of at least 0", lambda x: isinstance(x, (int, np.integer)) and x >= 0),
            "top_p": ("in (0, 1]", lambda x: 0 < x <= 1),
            "min_p": ("in [0, 1]", lambda x: 0 <= x <= 1),
        }
        for name, (expected, test) in allowed.items():
            value = getattr(self, name)
            if isinstance(value, (int, float, np.number)) and not test(value):
                raise ValueError(f"Sampling.{name} must be {expected}, got {value!r}")

    def rows(self, batch_size: int) -> "Sampling":
        """The same with arrays [batch_size] in every field."""
        dtypes = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
        values = (jnp.asarray(getattr(self, name), dtype) for name, dtype in zip(FIELDS, dtypes, strict=True))
        return Sampling(*(jnp.broadcast_to(value, (batch_size,)) for value in values))


GREEDY = Sampling()


def sample(keys: Array, logits: Float[Array, "B vocab"], sampling: Sampling) -> Int[Array, " B"]:
    """One token a row, int32.

    A row's draw depends on its own key, logits and settings alone. Noise and a sort of the vocabulary are computed only
    if some row needs them.

    Args:
      keys: [B] PRNG keys, one a row.
      logits: [B, vocab].
      sampling: see `Sampling`.
    """
    sampling = sampling.rows(logits.shape[0])
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    draws = sampling.temperature > 0
    return jax.lax.cond(jnp.any(draws), lambda: jnp.where(draws, _draw(keys, logits, sampling), greedy), lambda: greedy)


def _draw(keys: Array, logits: Float[Array, "B vocab"], sampling: Sampling) -> Int[Array, " B"]:
    """The Gumbel-max trick on the tokens kept."""
    below = logits - jnp.max(logits, axis=-1, keepdims=True)  # so that no temperature overflows what is most likely
    scaled = below / jnp.where(sampling.temperature > 0, sampling.temperature, 1)[:, None]
    cuts = jnp.any((sampling.top_k > 0) | (sampling.top_p < 1))
    least = jax.lax.cond(cuts, lambda: _cutoff(scaled, sampling), lambda: jnp.full_like(scaled[:, 0], -jnp.inf))
    least = jnp.maximum(least, jnp.log(sampling.min_p))
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scaled.shape[1:], scaled.dtype))(keys)
    kept = scaled >= least[:, None]
    return jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf), axis=-1).astype(jnp.int32)


def _cutoff(scaled: Float[Array, "B vocab"], sampling: Sampling) -> Float[Array, " B"]:
    """The least logit that top_k and top_p keep; a row without them keeps its smallest."""
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    among = jnp.where(sampling.top_k > 0, sampling.top_k, scaled.shape[1])[:, None] > jnp.arange(scaled.shape[1])[None]
    p = jax.nn.softmax(jnp.where(among, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(p, axis=-1) - p  # what the more likely tokens hold
    top_p = jnp.asarray(sampling.top_p)[:, None]
    count = jnp.sum(among & ((before < top_p) | (top_p >= 1)), axis=-1)
    return jnp.take_along_axis(ordered, count[:, None] - 1, axis=-1)[:, 0]
