"""Strictness for every test: no implicit broadcasting between ranks, four fake devices, fixed seeds."""

import zlib

import jax
import numpy as np
import pytest

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator seeded by the test's own name: independent of order and of other tests."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def x64():
    """64-bit types, for the tests that ask for them."""
    with jax.enable_x64(True):
        yield
