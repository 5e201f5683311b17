"""A small scheduler: many requests of unequal length share the slots of one decoding batch.

scheduler = Scheduler(model, SchedulerConfig(num_slots=64, capacity=4096))
number = scheduler.submit(Request(prompt, max_new_tokens=100))
while scheduler.pending:
    for update in scheduler.step():
        ...                                     # update.number, update.tokens, update.finished
"""

import dataclasses
from collections import deque
from collections.abc import Sequence

import jax

from kda_jax.layers.sizes import check_sizes
from kda_jax.models.decoding import NOTHING, Decoder, Piece, Request, begin, pieces
from kda_jax.models.hybrid import Cache, HybridLM
from kda_jax.models.pool import PrefixCache, checkpoint, empty_pool, join, leave, resume


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Sizes of a `Scheduler`.

    Attributes:
      num_slots: requests that decode at once.
      capacity: tokens of one request, the prompt and all but the last generated one.
      chunk_size: tokens of a prompt in one call, and between checkpoints of its beginnings.
      chunks_per_step: calls for prompts between two bursts, so that a long prompt does not halt those that decode.
      burst: tokens that every slot decodes in a step.
      max_checkpoints: of shared beginnings of prompts; 0 keeps none.
      max_stop_tokens: of one request.

    Raises:
      ValueError: for a number out of range, naming the field.
    """

    num_slots: int
    capacity: int
    chunk_size: int = 256
    chunks_per_step: int = 4
    burst: int = 8
    max_checkpoints: int = 0
    max_stop_tokens: int = 4

    def __post_init__(self) -> None:
        least = {field.name: 1 for field in dataclasses.fields(self)}
        check_sizes(self, least | {"max_checkpoints": 0, "max_stop_tokens": 0})


@dataclasses.dataclass(frozen=True)
class Update:
    """What a step made of the request `number`: its new tokens, and whether they are the last."""

    number: int
    tokens: list[int]
    finished: bool


@dataclasses.dataclass
class _Prefill:
    """A request on its way into a slot: its private row, and the pieces of the prompt that the row lacks."""

    number: int
    request: Request
    cache: Cache
    pieces: deque[Piece]
    keys: list[bytes]
    chunks: int  # whole ones in the cache


class Scheduler:
    """Prefills requests one after another into private rows, and decodes all that have joined the pool together.

    What a request gets depends on itself alone: not on its slot, its neighbours, when it came, or whether its beginning
    was in a checkpoint.

    Args:
      model: a `HybridLM`.
      config: see `SchedulerConfig`.
    """

    def __init__(self, model: HybridLM, config: SchedulerConfig):
        self.config = config
        self._decoder = Decoder(model)
        self._pool = empty_pool(self._decoder, config.num_slots, config.capacity, config.max_stop_tokens)
        self._prefixes = PrefixCache(config.chunk_size, config.max_checkpoints)
        self._waiting: deque[tuple[int, Request]] = deque()
        self._prefill: _Prefill | None = None
        self._running: dict[int, int] = {}  # slot: number
        self._free = list(range(config.num_slots))
        self._submitted = 0

    @property
    def pending(self) -> int:
        """Requests that are not finished."""
        return len(self._waiting) + (self._prefill is not None) + len(self._running)

    def submit(self, request: Request) -> int:
        """Put a request last in the queue; the number that its updates will have.

        Raises:
          ValueError: for a request that no slot can hold, or a token that is none of the model's.
        """
        self._decoder.check(request)
        if request.length > self.config.capacity:
            raise ValueError(f"the request needs room for {request.length} tokens, a slot has {self.config.capacity}")
        if len(request.stop_tokens) > self.config.max_stop_tokens:
            raise ValueError(
                f"the request has {len(request.stop_tokens)} stop tokens, at most {self.config.max_stop_tokens} can be"
            )
        self._submitted += 1
        self._waiting.append((self._submitted - 1, request))
        return self._submitted - 1

    def cancel(self, number: int) -> None:
        """Forget a request, wherever it is; a finished one is no error."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] != number)
        if self._prefill is not None and self._prefill.number == number:
            self._prefill = None
        for slot in [slot for slot, running in self._running.items() if running == number]:
            self._pool = leave(self._pool, slot)
            self._release(slot)

    def step(self) -> list[Update]:
        """Some chunks of prompts, then a burst of tokens for every request in a slot."""
        for _ in range(self.config.chunks_per_step):
            self._advance_prefill()
        if not self._running:
            return []
        self._pool, tokens = self._decoder.decode(self._pool, self.config.burst)
        new, active = jax.device_get((tokens, self._pool.active))
        updates = []
        for slot, number in list(self._running.items()):
            updates.append(Update(number, [int(t) for t in new[slot] if t != NOTHING], not active[slot]))
            if not active[slot]:
                self._release(slot)
        return updates

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """The tokens of every request, in order; those that were pending before are served too."""
        results: dict[int, list[int]] = {self.submit(request): [] for request in requests}
        while self.pending:
            for update in self.step():
                if update.number in results:
                    results[update.number].extend(update.tokens)
        return list(results.values())

    def _release(self, slot: int) -> None:
        del self._running[slot]
        self._free.append(slot)

    def _advance_prefill(self) -> None:
        """One piece of a prompt; after its last piece the request joins the pool."""
        if self._prefill is None:
            if not self._waiting or not self._free:
                return
            self._prefill = self._start(*self._waiting.popleft())
        prefill = self._prefill
        if prefill.pieces:
            prefill.cache = self._decoder.prefill(prefill.cache, prefill.pieces.popleft())
            self._save(prefill)
        if not prefill.pieces:
            row = begin([prefill.request], prefill.cache, self.config.max_stop_tokens)
            slot = self._free.pop()
            self._pool = join(self._pool, slot, row)
            self._running[slot] = prefill.number
            self._prefill = None

    def _start(self, number: int, request: Request) -> _Prefill:
        """A private row that resumes from the longest beginning with checkpoints."""
        keys = self._prefixes.keys(request.prompt[:-1]) if self.config.max_checkpoints else []
        found = self._prefixes.find(keys)
        cache = self._decoder.init_cache(1, self.config.capacity)
        for chunk, saved in enumerate(found):
            cache = resume(cache, saved, chunk * self.config.chunk_size)
        rest = pieces([request.prompt], self.config.chunk_size)[len(found) :]
        return _Prefill(number, request, cache, deque(rest), keys, len(found))

    def _save(self, prefill: _Prefill) -> None:
        """A checkpoint of the whole chunk that has just been prefilled."""
        if prefill.chunks < len(prefill.keys):
            size = self.config.chunk_size
            saved = checkpoint(prefill.cache, prefill.chunks * size, size)
            prefill.chunks += 1
            self._prefixes.add(prefill.keys[: prefill.chunks], saved)
