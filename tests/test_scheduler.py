"""Many requests of unequal length over few slots: each gets what it would get alone, and nothing is compiled anew."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from generation_cases import VOCAB, build, prompts

from kda_jax.models.decoding import NOTHING, Decoder, Request, begin, pieces
from kda_jax.models.sampling import Sampling
from kda_jax.models.scheduler import Scheduler, SchedulerConfig

CONFIG = SchedulerConfig(num_slots=3, capacity=32, chunk_size=8, chunks_per_step=2, burst=3, max_stop_tokens=2)


def requests(rng, count=12):
    """Of all lengths, greedy and sampled, with and without stop tokens."""
    lengths = rng.integers(1, 24, size=count)
    return [
        Request(
            prompt,
            max_new_tokens=int(rng.integers(1, 9)),
            sampling=Sampling(0.0 if number % 3 else 1.0, top_k=5 * (number % 2)),
            stop_tokens=rng.integers(VOCAB, size=number % 3).tolist(),
            seed=number,
        )
        for number, prompt in enumerate(prompts(rng, lengths))
    ]


def alone(request):
    """What the request gets without a pool."""
    decoder = Decoder(build())
    cache = decoder.init_cache(1, CONFIG.capacity)
    for piece in pieces([request.prompt], CONFIG.chunk_size):
        cache = decoder.prefill(cache, piece)
    _, tokens = decoder.decode(begin([request], cache, CONFIG.max_stop_tokens), 8)
    return [int(token) for token in tokens[0] if token != NOTHING]


def test_requests_get_what_they_would_get_alone(rng):
    batch = requests(rng)
    scheduler = Scheduler(build(), CONFIG)
    results = scheduler.run(batch)
    assert results == [alone(request) for request in batch]
    assert scheduler.pending == 0
    assert len({len(result) for result in results}) > 3


def test_requests_that_come_while_others_decode(rng):
    batch = requests(rng, 7)
    scheduler = Scheduler(build(), CONFIG)
    results, most = {}, 0
    for request in batch:
        results[scheduler.submit(request)] = []
        for update in scheduler.step():
            results[update.number].extend(update.tokens)
        most = max(most, scheduler.pending)
    while scheduler.pending:
        for update in scheduler.step():
            results[update.number].extend(update.tokens)
    assert most > 1
    assert list(results.values()) == [alone(request) for request in batch]


def test_joining_and_leaving_compile_nothing(rng, caplog):
    """Once every size of piece and one leave have been seen: neither the model's programs nor those of the slots."""
    scheduler = Scheduler(build(), CONFIG)
    scheduler.run([Request([1] * length, 2) for length in range(1, 18)])
    number = scheduler.submit(Request([1], 9))
    scheduler.step()
    scheduler.cancel(number)
    with jax.log_compiles():
        numbers = [scheduler.submit(request) for request in requests(rng)]
        scheduler.step()
        for number in numbers[:2]:
            scheduler.cancel(number)
        while scheduler.pending:
            scheduler.step()
    compiled = [record.message for record in caplog.records if record.message.startswith("Compiling ")]
    assert compiled == []


def test_shared_beginnings_are_prefilled_once(rng, monkeypatch):
    """Also where the checkpoints do not all fit; the tokens are the same in any case."""
    (start,) = prompts(rng, (17,))
    batch = [Request(start + tail, 4) for tail in prompts(rng, (1, 5, 2, 3))]
    batch.append(Request([*start[:8], (start[8] + 1) % VOCAB, *start[9:]], 4))
    want = [alone(request) for request in batch]
    prefill, shapes = Decoder.prefill, []

    def counted(self, cache, piece):
        shapes.append(piece[0].shape)
        return prefill(self, cache, piece)

    monkeypatch.setattr(Decoder, "prefill", counted)
    whole = {}
    for checkpoints in (0, 1, 8):
        shapes.clear()
        config = dataclasses.replace(CONFIG, max_checkpoints=checkpoints)
        assert Scheduler(build(), config).run(batch) == want
        whole[checkpoints] = shapes.count((1, 8))
    assert whole[0] - whole[8] == 3 * 2 + 1, "three find both chunks, the last one the first chunk"


def test_a_request_of_nan_spoils_no_other(rng):
    """One token's embedding is NaN: who has it in the prompt gets nonsense, the others exactly what they got before."""
    model = nnx.clone(build())
    batch = [dataclasses.replace(request, prompt=[t % 12 for t in request.prompt]) for request in requests(rng, 6)]
    poison = VOCAB - 1
    want = Scheduler(model, CONFIG).run(batch)
    model.embed.embedding[...] = model.embed.embedding[...].at[poison].set(jnp.nan)
    spoilt = [Request([3, poison, 4], 5), *batch[:3], Request([poison] * 9, 8), *batch[3:]]
    got = Scheduler(model, dataclasses.replace(CONFIG, max_checkpoints=4)).run(spoilt)
    unharmed = [row for row in range(6) if poison not in want[row][:-1]]
    assert len(unharmed) > 3
    got = got[1:4] + got[5:]
    assert [got[row] for row in unharmed] == [want[row] for row in unharmed]


def test_cancel(rng):
    """In the queue, on the way and in a slot; the others do not notice."""
    first, second, third, fourth = (Request(prompt, 8) for prompt in prompts(rng, (3, 5, 23, 4)))
    scheduler = Scheduler(build(), dataclasses.replace(CONFIG, num_slots=2))
    numbers = [scheduler.submit(request) for request in (first, second, third, fourth)]
    updates = scheduler.step()
    assert [update.number for update in updates] == numbers[:2]
    scheduler.cancel(numbers[0])
    assert scheduler._pool.active.sum() == 1
    updates = scheduler.step()
    assert [update.number for update in updates] == [numbers[1]], "the third is on its way: two chunks of three"
    scheduler.cancel(numbers[2])
    assert scheduler.pending == 2
    found = {number: [] for number in numbers}
    while scheduler.pending:
        for update in scheduler.step():
            found[update.number].extend(update.tokens)
    assert found[numbers[3]] == alone(fourth)
    assert found[numbers[0]] == found[numbers[2]] == []
    scheduler.cancel(numbers[3])
    assert scheduler.run([first]) == [alone(first)]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([1] * 30, 4), "needs room for 33 tokens, a slot has 32"),
        (Request([1], 4, stop_tokens=[1, 2, 3]), "has 3 stop tokens, at most 2 can be"),
        (Request([VOCAB], 4), f"prompt has the token {VOCAB}"),
    ],
    ids=["long", "stops", "token"],
)
def test_submit_errors(request_, message):
    with pytest.raises(ValueError, match=message):
        Scheduler(build(), CONFIG).submit(request_)


def test_config_errors():
    for name, value, least in (
        ("burst", 0, 1),
        ("max_checkpoints", -1, 0),
        ("capacity", 32.0, 1),
        ("num_slots", "3", 1),
        ("burst", True, 1),
    ):
        with pytest.raises(
            ValueError, match=f"SchedulerConfig.{name} must be an integer of at least {least}, got {value!r}"
        ):
            dataclasses.replace(CONFIG, **{name: value})
