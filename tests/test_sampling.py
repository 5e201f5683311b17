"""Draws have the distribution that their settings say, and rows never look at each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.models import sampling
from kda_jax.models.sampling import GREEDY, Sampling, sample

LOGITS = np.array([1.2, -0.3, 2.5, 0.0, 1.1, -2.0, 2.4, 0.4, -0.9], np.float32)
SETTINGS = [
    Sampling(1.0),
    Sampling(0.5),
    Sampling(1.3, top_k=3),
    Sampling(1.0, top_p=0.7),
    Sampling(1.0, min_p=0.2),
    Sampling(1.5, top_k=6, top_p=0.8, min_p=0.15),
    Sampling(2.0, top_k=100),
    Sampling(1.0, top_p=1e-9),
    GREEDY,
    Sampling(0.0, top_k=2),
]


def distribution(logits, s: Sampling):
    """In float64, token by token in order of likelihood."""
    if s.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    p = np.exp(logits.astype(np.float64) / s.temperature)
    likely = sorted(range(len(logits)), key=lambda token: -p[token])[: s.top_k or None]
    mass, kept = 0.0, []
    for token in likely:
        if mass < s.top_p * p[likely].sum() and p[token] >= s.min_p * p[likely[0]]:
            kept.append(token)
        mass += p[token]
    p[[token for token in range(len(logits)) if token not in kept]] = 0
    return p / p.sum()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_distribution(settings):
    rows = 20_000
    keys = jax.random.split(jax.random.key(0), rows)
    drawn = jax.jit(sample)(keys, jnp.broadcast_to(LOGITS, (rows, 9)), settings)
    found, want = np.bincount(drawn, minlength=9) / rows, distribution(LOGITS, settings)
    assert not found[want == 0].any()
    assert np.all(np.abs(found - want) <= 4.5 * np.sqrt(want * (1 - want) / rows))


def test_rows_of_different_settings():
    """Each row of a batch draws what it draws alone; a row of NaN changes no other."""
    keys = jax.random.split(jax.random.key(1), len(SETTINGS))
    logits = jax.random.normal(jax.random.key(2), (len(SETTINGS), 40))
    stacked = jax.tree.map(lambda *x: jnp.concatenate(x), *(s.rows(1) for s in SETTINGS))
    together = sample(keys, logits, stacked)
    alone = [sample(keys[i : i + 1], logits[i : i + 1], s)[0] for i, s in enumerate(SETTINGS)]
    assert together.tolist() == [int(token) for token in alone]
    for row in (2, 8):
        spoilt = sample(keys, logits.at[row].set(jnp.nan), stacked)
        assert np.delete(spoilt, row).tolist() == np.delete(together, row).tolist()


def test_a_row_without_cuts_keeps_all_beside_one_with():
    """Even what is too rare to add to a sum."""
    logits = jnp.array([[30.0, 0.0, -1.0], [30.0, 0.0, -1.0], [30.0, 0.0, -1.0]])
    settings = Sampling(jnp.ones(3), jnp.array([0, 2, 0]), jnp.array([1.0, 1.0, 0.5]), jnp.zeros(3))
    assert sampling._cutoff(logits, settings).tolist() == [-1.0, 0.0, 30.0]


@pytest.mark.parametrize("temperature", [1e-5, 1e-37])
def test_a_temperature_near_zero_takes_the_most_likely(temperature):
    """Though logits over it are more than float32 holds."""
    logits = jnp.array([[-3.0, 40.0, 55.0, 54.0]])
    for cut in ({}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert sample(jax.random.split(jax.random.key(0), 1), logits, Sampling(temperature, **cut)).tolist() == [2], cut


def test_ties_with_the_last_kept_are_kept():
    logits = jnp.broadcast_to(jnp.array([0.0, 1.0, 1.0, 0.5]), (200, 4))
    drawn = sample(jax.random.split(jax.random.key(0), 200), logits, Sampling(1.0, top_k=1))
    assert set(drawn.tolist()) == {1, 2}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, r"temperature must be finite and at least 0, got -0.1"),
        ("temperature", float("nan"), r"temperature must be finite"),
        ("temperature", float("inf"), r"temperature must be finite"),
        ("top_k", -1, r"top_k must be an integer of at least 0, got -1"),
        ("top_k", 2.5, r"top_k must be an integer of at least 0, got 2.5"),
        ("top_p", 0.0, r"top_p must be in \(0, 1\], got 0.0"),
        ("top_p", 1.1, r"top_p must be in \(0, 1\], got 1.1"),
        ("min_p", -0.5, r"min_p must be in \[0, 1\], got -0.5"),
        ("top_k", np.int64(-1), r"top_k must be an integer of at least 0, got"),
        ("top_p", np.float32(1.5), r"top_p must be in \(0, 1\], got"),
        ("min_p", 2, r"min_p must be in \[0, 1\], got 2"),
    ],
)
def test_errors(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GREEDY, **{field: value})
