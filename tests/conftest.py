"""Strictness for every test: no implicit broadcasting between ranks, four fake devices, fixed seeds."""

import os
import zlib

# Before JAX starts: these programs are small and run a few times, so LLVM's optimisations would be most of the time.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import jax
import numpy as np
import pytest

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    """Compile a program once for all workers and later runs; what cannot be read from the cache is compiled again."""
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    config.addinivalue_line("filterwarnings", "ignore:Error (reading|writing) persistent compilation cache")


@pytest.fixture(autouse=True, scope="module")
def free_programs():
    """A compiled program holds a few memory maps; a process that keeps thousands of programs runs out and crashes."""
    yield
    jax.clear_caches()


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator seeded by the test's own name: independent of order and of other tests."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def x64():
    """64-bit types, for the tests that ask for them."""
    with jax.enable_x64(True):
        yield
