"""What the benchmark compares: its inputs, its gradients, its own versions, and that a wrong head is seen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import versions
from experiments.versions import Version
from kda_jax.ops import api


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(versions, "CHANNELS", 8)


@pytest.mark.parametrize(("gate", "mean"), [("fast", -2.5), ("slow", -0.0772)])
def test_inputs(gate, mean):
    """The mean of -5 sigmoid(-4.63 + N(0, 1)) is -0.0772 by numerical integration."""
    inputs = versions.draw((2, 2000, 2), gate, "bfloat16")
    assert float(inputs["g"].mean()) == pytest.approx(mean, rel=0.02)
    assert {name for name, x in inputs.items() if x.dtype == jnp.float32} == {"g", "beta"}
    inputs = versions.draw((2, 2000, 2), gate, "float32")
    for kind in versions.KINDS:
        _, unit_k, _, g, beta = (versions._ACTIVATIONS.get(name, lambda x: x)(inputs[name]) for name in kind)
        np.testing.assert_allclose(np.linalg.norm(unit_k, axis=-1), 1, rtol=1e-5)
        np.testing.assert_allclose(g, inputs["g"], rtol=1e-4)
        np.testing.assert_allclose(beta, inputs["beta"], rtol=1e-6)
    for version in (Version("", None), Version("", None, versions.BOUNDED, heads_first=True)):
        q, k, v, given, beta, do = versions.arguments(version, inputs)
        assert q.shape == k.shape == v.shape == do.shape == given.shape == (*beta.shape, versions.CHANNELS)
        assert beta.shape == ((2, 2, 2000) if version.heads_first else (2, 2000, 2))
        want = jnp.moveaxis(inputs["g_sigmoid"], 2, 0) if version.heads_first else inputs["g"]
        np.testing.assert_array_equal(given, want)


def test_gradients_are_those_of_the_cotangent():
    arrays = versions.arguments(versions.recurrence(versions.ACTIVATED), versions.draw((1, 5, 2), "slow", "float32"))

    def loss(*inputs):
        return (api.kda(*inputs, implementation="scan")[0] * arrays[-1]).sum()

    want = jax.grad(loss, argnums=range(5))(*arrays[:-1])
    got = versions.forward_backward(versions.recurrence(versions.ACTIVATED))(*arrays)[2:]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


def test_a_promise_is_timed_too():
    def errors(version):
        program = versions.build(version, (1, 70, 3), "forward+backward", "float32")
        return versions.errors(version, program, (1, 70, 3), "fast", "float32")

    plain, promised, *raw = versions.ours("chunk")
    assert (plain.name, promised.name) == ("chunk", "chunk g_min=-5")
    found = errors(promised)
    assert found != errors(plain)
    assert versions.beyond_bounds(promised, found, "float32") == []
    assert [version.kind for version in raw] == ["raw, bounded", "raw, unbounded"]
    for version in raw:
        assert versions.beyond_bounds(version, errors(version), "float32") == []


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_wrong_last_head_is_seen(heads_first):
    shape = (1, 70, 3)

    def wrong(*inputs):
        inputs = (jnp.moveaxis(x, 0, 2) if heads_first else x for x in inputs)
        o, final_state = api.kda(*inputs, implementation="scan")
        factor = jnp.array([1, 1, 1.01])
        o = o * factor[None, None, :, None]
        return jnp.moveaxis(o, 2, 0) if heads_first else o, final_state * factor[None, :, None, None]

    version = Version("wrong", wrong, heads_first=heads_first)
    found = versions.errors(version, versions.build(version, shape, "forward", "float32"), shape, "slow", "float32")
    assert found == {name: pytest.approx(0.01 / 2**0.5, rel=0.5) for name in ("o", "final_state")}
