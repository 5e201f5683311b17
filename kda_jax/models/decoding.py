"""A batch of rows that decode side by side in one compiled loop, each for a request of its own."""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.tree_util import PyTreeDef
from jaxtyping import Int

from kda_jax.models.hybrid import Cache, HybridLM
from kda_jax.models.sampling import FIELDS, GREEDY, Sampling, sample

CAPACITY_UNIT = 256  # XLA splits the products with a long cache, and would copy one of another length to even parts
NOTHING = -1  # where a row has no token: it had ended, or it has fewer stop tokens than others

Piece = tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"] | None]
"""Tokens of some prompts with their segment ids, None if there is no padding among them."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and how it shall go on.

    Attributes:
      prompt: token ids, at least one.
      max_new_tokens: the most tokens to generate.
      sampling: with a number in each field.
      stop_tokens: generation ends after any of these.
      seed: of the row's random numbers, at most 32 bits: JAX's keys hold no more.

    Raises:
      ValueError: for an empty prompt, no token to generate, or what no row of a batch could hold.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    stop_tokens: Sequence[int] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        _check_integers("prompt", self.prompt, 1, np.int32)
        _check_integers("max_new_tokens", self.max_new_tokens, 0, np.int32)
        _check_integers("stop_tokens", self.stop_tokens, 1, np.int32)
        _check_integers("seed", self.seed, 0, np.uint32)
        if not isinstance(self.sampling, Sampling):
            raise ValueError(f"sampling must be a Sampling, got {self.sampling!r}")
        for name in FIELDS:
            value = getattr(self.sampling, name)
            if not isinstance(value, numbers.Real):
                raise ValueError(f"sampling.{name} must be a number, got {value!r}")
        _check_integers("sampling.top_k", self.sampling.top_k, 0, np.int32)
        if len(self.prompt) == 0:
            raise ValueError("a prompt must have at least one token; begin an empty one with the model's first token")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")

    @property
    def length(self) -> int:
        """Tokens that its cache will hold: all but the last one generated."""
        return len(self.prompt) + self.max_new_tokens - 1


def _check_integers(name: str, value: Any, ndim: int, dtype: type[np.integer]) -> None:
    """Raises unless value is of `ndim` axes and `dtype` holds its integers."""
    array, limits = np.asarray(value), np.iinfo(dtype)
    whole = np.issubdtype(array.dtype, np.integer) or not array.size
    if array.ndim != ndim or not whole or np.any((array < limits.min) | (array > limits.max)):
        expected = "a list of integers" if ndim else "an integer"
        raise ValueError(f"{name} must be {expected} that {dtype.__name__} holds, got {value!r}")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "token", "count", "limit", "key", "sampling", "stop"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Decoding:
    """Rows that are decoding; every leaf has the rows as its first axis.

    Attributes:
      cache: of everything before `token`.
      token: [B] int32, each row's last token.
      count: [B] int32, tokens generated.
      limit: [B] int32, tokens to generate; a row with count = limit is at rest, and nothing changes it.
      key: [B] PRNG keys; token n is drawn with the key folded with n.
      sampling: arrays [B].
      stop: [B, S] int32, the tokens that end a row, filled up with NOTHING.
    """

    cache: Cache
    token: Int[Array, " B"]
    count: Int[Array, " B"]
    limit: Int[Array, " B"]
    key: Array
    sampling: Sampling
    stop: Int[Array, "B S"]

    @property
    def active(self) -> Array:
        """[B], whether a row still generates."""
        return self.count < self.limit


def begin(requests: Sequence[Request], cache: Cache, num_stop_tokens: int | None = None) -> Decoding:
    """The rows of `requests` before their first token; `cache` [B] holds their prompts but for the last token.

    Args:
      num_stop_tokens: the axis S; by default as many as a request has.
    """
    room = max(len(r.stop_tokens) for r in requests) if num_stop_tokens is None else num_stop_tokens
    stop = np.full((len(requests), room), NOTHING, np.int32)
    for row, request in enumerate(requests):
        stop[row, : len(request.stop_tokens)] = request.stop_tokens
    keys = [jax.random.fold_in(jax.random.key(request.seed), row) for row, request in enumerate(requests)]
    settings = {name: jnp.asarray([getattr(r.sampling, name) for r in requests]) for name in FIELDS}
    numbers = lambda values: jnp.asarray(np.asarray(list(values), np.int32))  # noqa: E731
    return Decoding(
        cache=cache,
        token=numbers(r.prompt[-1] for r in requests),
        count=numbers(0 for _ in requests),
        limit=numbers(r.max_new_tokens for r in requests),
        key=jnp.stack(keys),
        sampling=Sampling(**settings).rows(len(requests)),
        stop=jnp.asarray(stop),
    )


def pieces(prompts: Sequence[Sequence[int]], chunk_size: int) -> list[Piece]:
    """The prompts but for their last tokens, cut into pieces of `chunk_size`, shorter ones padded on the right.

    The last piece is as long as the next power of two, so that prompts of all lengths need few programs.
    """
    length = max(map(len, prompts)) - 1
    whole, rest = divmod(length, chunk_size)
    sizes = [chunk_size] * whole + ([min(chunk_size, 1 << (rest - 1).bit_length())] if rest else [])
    tokens, ids = np.zeros((2, len(prompts), sum(sizes)), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt) - 1], ids[row, : len(prompt) - 1] = prompt[:-1], 1
    cuts = np.cumsum(sizes)[:-1]
    split = zip(np.split(tokens, cuts, axis=1), np.split(ids, cuts, axis=1), strict=True)
    return [(piece, None if valid.all() else valid) for piece, valid in split] if sizes else []


class Decoder:
    """The two programs of generation for one model: a piece of a prefill, and a burst of decoding.

    Both overwrite the cache they are given. What is compiled depends on shapes alone, never on who is in which row.

    Args:
      model: a `HybridLM`.
    """

    def __init__(self, model: HybridLM):
        self.vocab_size = model.config.vocab_size
        graphdef, params = nnx.split(model)
        self._params, structure = jax.tree.flatten(params)
        self._init_cache, self._prefill, self._decode = _programs(graphdef, structure)

    def init_cache(self, batch_size: int, capacity: int) -> Cache:
        """Empty rows with room for `capacity` tokens each, or somewhat more: lengths near each other share programs."""
        return self._init_cache(self._params, batch_size, -(-capacity // CAPACITY_UNIT) * CAPACITY_UNIT)

    def check(self, request: Request) -> None:
        """Raises ValueError if a token of the prompt is none of the model's."""
        for token in (min(request.prompt), max(request.prompt)):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"prompt has the token {token}; the model's are 0 to {self.vocab_size - 1}")

    def prefill(self, cache: Cache, piece: Piece) -> Cache:
        """The cache with the tokens of `piece` after those that it holds; its padding leaves no trace."""
        return self._prefill(self._params, cache, *piece)

    def decode(self, state: Decoding, steps: int) -> tuple[Decoding, Int[Array, "B steps"]]:
        """At most `steps` tokens more for every row that generates.

        Returns:
          The rows, and the new tokens [B, steps], NOTHING where a row had ended. A stop token is the row's last one.
        """
        return self._decode(self._params, state, steps)


@functools.cache
def _programs(graphdef: nnx.GraphDef, structure: PyTreeDef) -> tuple[Callable, Callable, Callable]:
    """The same for all models of one structure. They take a list of parameters, whose tree no call need walk."""

    def model(params: list[Array]) -> HybridLM:
        return nnx.merge(graphdef, jax.tree.unflatten(structure, params))

    init_cache = jax.jit(lambda params, *sizes: model(params).init_cache(*sizes), static_argnums=(1, 2))
    prefill = jax.jit(functools.partial(_prefill, model), donate_argnames="cache")
    decode = jax.jit(functools.partial(_decode, model), static_argnames="steps", donate_argnames="state")
    return init_cache, prefill, decode


def _prefill(model, params, cache, tokens, segment_ids):
    """Nothing reads the logits, so they are not computed: the prompt's last token comes with the first step."""
    return model(params)(tokens, segment_ids=segment_ids, cache=cache)[1]


def _decode(model, params, state, steps):
    def proceed(carry):
        step, state, _ = carry
        return (step < steps) & jnp.any(state.active)

    def advance(carry):
        step, state, tokens = carry
        state, new = _step(model(params), state)
        return step + 1, state, tokens.at[:, step].set(new)

    tokens = jnp.full((state.token.shape[0], steps), NOTHING, jnp.int32)
    _, state, tokens = jax.lax.while_loop(proceed, advance, (0, state, tokens))
    return state, tokens


def _step(model: HybridLM, state: Decoding) -> tuple[Decoding, Int[Array, " B"]]:
    """One token for every active row; the others are padding."""
    active = state.active
    ids = active[:, None].astype(jnp.int32)
    logits, cache = model(state.token[:, None], segment_ids=ids, cache=state.cache)
    assert cache is not None  # a call with one returns one
    drawn = sample(jax.vmap(jax.random.fold_in)(state.key, state.count), logits[:, 0], state.sampling)
    count = state.count + active
    ended = active & jnp.any(drawn[:, None] == state.stop, axis=1)
    state = dataclasses.replace(
        state,
        cache=cache,
        token=jnp.where(active, drawn, state.token),
        count=count,
        limit=jnp.where(ended, count, state.limit),
    )
    return state, jnp.where(active, drawn, NOTHING)
