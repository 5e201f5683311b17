"""The tasks' batches against their definitions, followed token by token in plain Python."""

import jax
import numpy as np
import pytest

from experiments.errors import ConfigError
from experiments.tasks import registry
from experiments.tasks.mqar import Recall
from experiments.tasks.palindrome import Palindrome
from experiments.tasks.stack import Stack
from experiments.tasks.text import Text, read

RECALLS = {
    "every position asks": Recall(length=16, rows=64, eval_rows=8, distinct=5, num_keys=9, num_values=7),
    "blanks": Recall(length=40, rows=64, eval_rows=8, distinct=5, num_keys=5, num_values=7),
    "written thrice": Recall(length=40, rows=64, eval_rows=8, distinct=4, num_keys=6, num_values=50, writes=3),
}


def rows_of(batch):
    return zip(*(np.asarray(x).tolist() for x in batch[:3]), strict=True)


@pytest.mark.parametrize("task", RECALLS.values(), ids=RECALLS.keys())
def test_recall_answers_with_the_last_value_written(task):
    separator, blank = task.vocab_size - 2, task.vocab_size - 1
    places = set()
    for inputs, targets, mask in rows_of(jax.jit(task.batch)(jax.random.key(0))):
        memory, written, middle = {}, [], inputs.index(separator)
        for key, value in zip(inputs[:middle:2], inputs[1:middle:2], strict=True):
            assert key < task.num_keys <= value < task.num_keys + task.num_values
            memory[key] = value
            written.append(key)
        assert sorted(written) == sorted(list(memory) * task.writes)
        assert len(memory) == task.distinct
        asked = [t for t in range(middle + 1, task.length) if inputs[t] != blank]
        assert [t for t in range(task.length) if mask[t]] == asked
        assert sorted(inputs[t] for t in asked) == sorted(memory)
        assert all(targets[t] == memory[inputs[t]] for t in asked)
        places.update(asked)
    assert places == set(range(2 * task.pairs + 1, task.length)), "queries must spread over the whole rest"


def test_palindrome_says_the_sequence_backwards():
    task = Palindrome(length=14, rows=16, eval_rows=8, symbols=5)
    for inputs, targets, mask in rows_of(jax.jit(task.batch)(jax.random.key(0))):
        forth = inputs[:7]
        assert inputs[7:] == [5, *forth[:0:-1]]
        assert [y for y, counts in zip(targets, mask, strict=True) if counts] == forth[-2::-1]
        assert mask == [False] * 8 + [True] * 6


def test_stack_pops_what_was_pushed_last():
    task = Stack(length=62, rows=32, eval_rows=8, stacks=3, symbols=6)
    push, pop = task.vocab_size - 2, task.vocab_size - 1
    pops = pushes = 0
    for inputs, targets, mask in rows_of(jax.jit(task.batch)(jax.random.key(0))):
        stacks = {s: [] for s in range(task.stacks)}
        tokens = [*inputs, targets[-1]]
        for t in range(0, task.length - 1, 3):
            operation, stack, element = tokens[t : t + 3]
            assert operation in (push, pop)
            assert task.stacks <= element < task.stacks + task.symbols
            if operation == push:
                stacks[stack].append(element)
            else:
                assert stacks[stack].pop() == element == targets[t + 1]
            assert mask[t : t + 2] == [False, operation == pop]
            pops, pushes = pops + (operation == pop), pushes + (operation == push)
    assert 0.3 < pops / pushes < 1


@pytest.fixture(scope="module")
def text():
    return Text.load(length=2000, rows=64, eval_length=7000)


def test_text_rows_are_windows_of_documents_that_are_not_held_out(text):
    documents = read()
    assert len(documents) == 249
    assert (documents[0][0], documents[-1][0]) == (1790, 2026)
    training = [body for i, (_, body) in enumerate(documents) if i % 10 != 9]
    batch = text.batch(jax.random.key(1))
    assert (np.asarray(batch.segment_ids) > 0).all()
    boundaries = 0
    for x, y, mask, ids in zip(*map(np.asarray, batch), strict=True):
        assert (x[1:] == y[:-1]).all()
        for document in np.unique(ids):
            inside = ids == document
            assert bytes(x[inside].astype(np.uint8)) in training[document - 1]
        ends = np.flatnonzero(~mask)
        boundaries += len(ends)
        assert all(y[t] == ord("\f") for t in ends), "only the step across a boundary is left out"
        assert all(ids[t] != ids[t + 1] for t in ends if t + 1 < len(ids))
        assert mask.sum() == len(mask) - (np.append(x[1:], y[-1]) == ord("\f")).sum()
    assert boundaries > 0


def test_text_holds_out_every_tenth_document_from_its_start(text):
    documents = [body for i, (_, body) in enumerate(read()) if i % 10 == 9]
    batch = text.held_out(jax.random.key(0))
    assert len(documents) == len(batch.inputs) == len(text.decades) == 24
    for document, x, y, mask, ids in zip(documents, *map(np.asarray, batch), strict=True):
        n = min(len(document) - 1, 7000)
        assert bytes(x[:n].astype(np.uint8)) == document[:n]
        assert bytes(y[:n].astype(np.uint8)) == document[1 : n + 1]
        assert mask.sum() == n
        assert mask[:n].all()
        assert set(ids[: n + 1]) == {1}
        assert not ids[n + 1 :].any()


def test_text_scores_are_sums_over_bytes_in_each_slice(text, rng):
    batch = text.held_out(jax.random.key(0))
    nats = rng.uniform(1, 2, batch.mask.shape).astype(np.float32)
    nats[~np.asarray(batch.mask)] = 1e6
    scores = text.scores(nats, nats < 1.25, batch)
    mask = np.asarray(batch.mask)
    wanted = {"bits_per_byte": mask, "bits_per_byte_1970s": mask & (np.array(text.decades) == 1970)[:, None]}
    for low, high in [(0, 64), (64, 256), (256, 1024), (1024, 4096), (4096, 7000)]:
        wanted[f"bits_per_byte_from_{low}"] = mask & (np.arange(7000) >= low) & (np.arange(7000) < high)
    for name, where in wanted.items():
        np.testing.assert_allclose(
            scores[name], nats[where].mean(dtype=np.float64) / np.log(2), rtol=1e-5, err_msg=name
        )
    np.testing.assert_allclose(scores["accuracy"], (nats[mask] < 1.25).mean(), rtol=1e-5)


def test_whole_sequence_accuracy_counts_rows_with_every_target_right():
    task = RECALLS["blanks"]
    batch = jax.jit(task.held_out)(jax.random.key(0))
    right = np.ones(batch.mask.shape, bool)
    right[2, np.flatnonzero(batch.mask[2])[:3]] = False
    right[5, np.flatnonzero(~np.asarray(batch.mask[5]))] = False  # positions that do not count
    scores = task.scores(np.zeros(right.shape, np.float32), right, batch)
    np.testing.assert_allclose(scores["sequence_accuracy"], 7 / 8)
    np.testing.assert_allclose(scores["accuracy"], 37 / 40)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "recal"}, "task.name is 'recal'"),
        ({"name": "palindrome", "length": 9, "rows": 1, "eval_rows": 1, "symbols": 3}, "task.length is 9"),
        ({"name": "stack", "length": 9, "rows": 0, "eval_rows": 1, "stacks": 3, "symbols": 3}, "task.rows is 0"),
        (
            {"name": "recall", "length": 15, "rows": 1, "eval_rows": 1, "distinct": 5, "num_keys": 9, "num_values": 9},
            "task.length is 15: give at least 16",
        ),
        (
            {"name": "recall", "length": 90, "rows": 1, "eval_rows": 1, "distinct": 9, "num_keys": 8, "num_values": 9},
            "task.distinct is 9: give at most task.num_keys = 8",
        ),
    ],
)
def test_a_task_that_cannot_be_says_why(fields, message):
    with pytest.raises(ConfigError, match=message):
        registry.make(fields)
