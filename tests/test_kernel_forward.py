"""The forward kernels: in the interpreter, with its race detector, against the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from reference import kda as oracle
from tolerances import FORWARD, assert_close

from pallas_kernels.config import Config, default_config
from pallas_kernels.forward import forward
from pallas_kernels.support import unsupported_reason
from pallas_kernels.vjp import kda_mosaic

DECAYS = {
    "slow": lambda rng, shape: -5 / (1 + np.exp(4.6 + rng.normal(size=shape))),
    "saturated": lambda rng, shape: np.full(shape, -5.0),
    "mixed": lambda rng, shape: np.where(rng.random((*shape[:3], 1)) < 0.8, -0.05, -6e4) * rng.random(shape),
}


@functools.cache
def kernels(config, g_min=None, every=0):
    # of the hand-over between blocks, which overlapping stages need, the interpreter knows nothing
    interpret = plgpu.InterpretGPUParams(detect_races=config.route != "overlapped")
    options = {"g_min": g_min, "every": every, "config": config, "interpret": interpret}
    return jax.jit(lambda *x: forward(x[:5], *x[5:], scale=x[0].shape[-1] ** -0.5, **options))


def inputs(rng, decay, T, H, HV, K, V, dtype=jnp.bfloat16):
    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k, v = unit(rng.normal(size=(1, T, H, K))), unit(rng.normal(size=(1, T, H, K))), rng.normal(size=(1, T, HV, V))
    g, beta, state = DECAYS[decay](rng, (1, T, HV, K)), rng.random((1, T, HV)), rng.normal(size=(1, HV, K, V)) / 3
    return [jnp.asarray(x, dtype) for x in (q, k, v)] + [jnp.asarray(x, jnp.float32) for x in (g, beta, state)]


def check(arrays, config, g_min=None):
    check_outputs(arrays, *kernels(config, g_min)(*arrays))


def check_outputs(arrays, *got):
    want = oracle(*(np.asarray(x.astype(jnp.float32)) for x in arrays))
    for name, x, y in zip(("o", "final_state"), got, want, strict=True):
        assert_close(x, y, FORWARD["bfloat16"], name)


@pytest.mark.parametrize("decay", DECAYS)
def test_grouped_heads_and_a_ragged_end(rng, decay):
    check(inputs(rng, decay, T=70, H=1, HV=2, K=64, V=64), Config(warpgroups=1, stages=3))


@pytest.mark.parametrize("decay", ["slow", "saturated"])
def test_bounded_decay(rng, decay):
    check(inputs(rng, decay, T=70, H=1, HV=2, K=64, V=64), Config(), g_min=-5.0)


def test_two_warpgroups_and_more_chunks_than_stages(rng):
    check(inputs(rng, "slow", T=200, H=1, HV=1, K=64, V=128), Config(warpgroups=2, stages=2))


@pytest.mark.parametrize(("decay", "K", "V", "g_min"), [("mixed", 64, 64, None), ("saturated", 64, 128, -5.0)])
def test_overlapping_stages(rng, monkeypatch, decay, K, V, g_min):
    """More chunks than places for their operands, and a ragged end."""
    monkeypatch.delattr("pallas_kernels.forward.make_prepare")  # both stages are one kernel
    check(inputs(rng, decay, T=230, H=1, HV=2, K=K, V=V), Config(route="overlapped"), g_min)


def test_too_many_heads_cannot_overlap():
    arrays = [jax.ShapeDtypeStruct((1, 64, 33, 128), jnp.bfloat16)] * 4
    run = functools.partial(forward, scale=1.0, g_min=None, config=Config(route="overlapped"))
    with pytest.raises(ValueError, match="at most 64 for the stages to overlap, got 66"):
        jax.eval_shape(lambda *x: run(x, None), *arrays, jax.ShapeDtypeStruct((1, 64, 33), jnp.float32))


@pytest.mark.parametrize(("K", "stages", "pieces"), [(192, 2, 1), (256, 1, 2)])
def test_wide_keys(rng, K, stages, pieces):
    check(inputs(rng, "slow", T=140, H=1, HV=1, K=K, V=64), Config(stages=stages, pieces=pieces))


@pytest.mark.parametrize(("pieces", "every", "ends"), [(1, 2, (128, 200)), (3, 1, (64, 128, 192, 200))])
def test_states_after_chunks(rng, pieces, every, ends):
    """Every second one, and the last; and every one, across the pieces of a split sequence."""
    arrays = inputs(rng, "slow", T=200, H=1, HV=2, K=64, V=64)
    o, final_state, states = kernels(Config(pieces=pieces), every=every)(*arrays)
    check_outputs(arrays, o, final_state)
    assert states.shape[1] == len(ends)
    for chunk, end in enumerate(ends):
        _, want = oracle(*(np.asarray(x.astype(jnp.float32))[:, :end] for x in arrays[:5]), arrays[5])
        assert_close(states[:, chunk], want, FORWARD["bfloat16"], f"state after {end} tokens")


@pytest.mark.parametrize("decay", ["slow", "mixed"])
def test_a_sequence_in_pieces(rng, decay):
    """Of two, two and no chunks; a state that hardly fades must pass through all of them."""
    check(inputs(rng, decay, T=200, H=1, HV=2, K=64, V=64), Config(pieces=3))


@pytest.mark.parametrize(("decay", "g_min"), [("slow", None), ("mixed", None), ("slow", -5.0), ("saturated", -5.0)])
def test_one_kernel(rng, decay, g_min):
    """More chunks than stages, a ragged end, two warpgroups that scan."""
    check(inputs(rng, decay, T=200, H=1, HV=2, K=64, V=128), Config(route="fused"), g_min)


def test_one_kernel_with_one_warpgroup_that_scans(rng):
    check(inputs(rng, "slow", T=40, H=1, HV=2, K=128, V=64), Config(route="fused"))


def test_float16_through_the_public_function(rng):
    *arrays, state = inputs(rng, "slow", T=64, H=1, HV=1, K=64, V=64, dtype=jnp.float16)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    got = jax.jit(functools.partial(kda_mosaic, scale=0.125, interpret=interpret))(*arrays, initial_state=state)
    want = oracle(*(np.asarray(x.astype(jnp.float32)) for x in (*arrays, state)))
    for name, x, y in zip(("o", "final_state"), got, want, strict=True):
        assert_close(x, y, FORWARD["float16"], name)


def test_later_tokens_change_nothing(rng):
    """The prefix is the same bit for bit whatever the last token's decay, key and value are."""
    arrays = inputs(rng, "slow", T=70, H=1, HV=2, K=64, V=64)
    before = kernels(Config())(*arrays)[0]
    changed = [x if x.ndim == 4 and x.shape[1] == 2 else x.at[:, 66].set(-x[:, 66]) for x in arrays[:3]]
    after = kernels(Config())(*changed, arrays[3].at[:, 66].set(-50.0), *arrays[4:])[0]
    assert jnp.array_equal(before[:, :66], after[:, :66])
    assert not jnp.array_equal(before[:, 66:], after[:, 66:])


def specs(K=128, V=128, T=64, dtype=jnp.bfloat16, g=jnp.float32):
    qk = jax.ShapeDtypeStruct((1, T, 2, K), dtype)
    return qk, qk, jax.ShapeDtypeStruct((1, T, 4, V), dtype), jax.ShapeDtypeStruct((1, T, 4, K), g)


@pytest.mark.parametrize(
    ("arrays", "part"),
    [
        (specs(K=320), "key channels must be at most 256, for the registers, got 320"),
        (specs(V=320), "value channels must be at most 256, got 320"),
        (specs(dtype=np.float64), "share a dtype"),
        (specs(g=np.float64), "at most 32 bits"),
        (specs(T=0), "must not be empty"),
    ],
)
def test_unsupported_inputs_have_a_reason(arrays, part):
    assert part in unsupported_reason(*arrays, platform="hopper")


def test_supported_inputs_have_none_but_the_device():
    assert unsupported_reason(*specs(), platform="hopper") is None
    assert "Hopper GPU is needed" in unsupported_reason(*specs())


@pytest.mark.parametrize(
    ("config", "K", "V", "part"),
    [
        ({"route": "fused"}, 128, 256, "route 'fused' takes at most 128 key and 128 value channels, got 128 and 256"),
        ({"route": "overlapped", "stages": 2}, 192, 128, "route 'overlapped' takes at most 128 key"),
        ({"warpgroups": 2, "stages": 2}, 128, 192, "multiple of 128 value channels, got 128 and 192"),
        ({"stages": 3}, 192, 128, "stages must be at most 2 with 192 key channels, got 3"),
    ],
)
def test_config_is_refused_for_channels_it_cannot_tune(config, K, V, part):
    shapes = [(1, 64, 2, K), (1, 64, 2, K), (1, 64, 2, V), (1, 64, 2, K), (1, 64, 2)]
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    with pytest.raises(ValueError, match=part):
        jax.eval_shape(functools.partial(kda_mosaic, scale=1.0, config=Config(**config)), *arrays)


def test_config_checks_itself():
    invalid = {"warpgroups": 3}, {"stages": 0}, {"warpgroups": 2, "stages": 3}, {"pieces": 0}
    for bad in (*invalid, {"pieces": 2, "route": "fused"}, {"route": "both"}, {"stages": 2.0}, {"pieces": True}):
        with pytest.raises(ValueError, match="must be"):
            Config(**bad)
    assert default_config(32, 128, 128, 1024) == default_config(4, 128, 128, 128) == Config(route="overlapped")
    assert default_config(33, 128, 128, 1024) == default_config(16, 128, 256, 128) == Config(warpgroups=1, stages=3)
    assert default_config(4, 128, 128, 7) == Config()
    assert default_config(256, 128, 128, 64) == Config(warpgroups=2, stages=2, route="fused")
    assert default_config(256, 128, 64, 64) == Config(route="fused")
    assert default_config(96, 128, 256, 64) == default_config(140, 128, 128, 64) == Config(warpgroups=2, stages=2)
    assert default_config(256, 192, 128, 64) == Config(stages=2)
    assert default_config(4, 256, 128, 1024) == Config(stages=1, pieces=16)
    assert default_config(4, 128, 128, 1024).pieces == 16
    assert default_config(4, 128, 128, 128).pieces == default_config(16, 128, 128, 1024).pieces == 1
