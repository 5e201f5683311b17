"""The decode kernel: in the interpreter against the float64 oracle, as a function of JAX, and lowered for CUDA."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make, make_raw
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec
from lowering import lower
from reference import kda, kda_raw
from tolerances import FORWARD, assert_close

import kda_jax
from kda_jax.layers.kda import NO_DECAY
from kda_jax.ops.scan import kda_token
from pallas_kernels import decode, mapping, step, support
from pallas_kernels.step import kda_step_mosaic

NAMES = ("q", "k", "v", "g", "beta")
RAW_NAMES = ("q", "k", "v", "g_raw", "beta_raw")


def token(case, state_dtype="float32"):
    """The arrays of a case of one token, and its state rounded to a dtype."""
    names = RAW_NAMES if "g_raw" in case else NAMES
    return [*(jnp.asarray(case[n][:, 0]) for n in names), jnp.asarray(case["initial_state"], state_dtype)]


def decay(case, lower_bound=None):
    return kda_jax.Decay(jnp.asarray(case["A_log"]), jnp.asarray(case["dt_bias"]), lower_bound)


def want(arrays, decay=None, **options):
    """The oracle's o, new state and, with cotangents, gradients."""
    options["scale"] = 0.3
    *inputs, state = (np.asarray(x, np.float64) for x in arrays)
    inputs = [x[:, None] for x in inputs]
    if decay is None:
        return kda(*inputs, state, **options)
    parameters = (np.asarray(x, np.float64) for x in (decay.A_log, decay.dt_bias))
    return kda_raw(*inputs, *parameters, state, lower_bound=decay.lower_bound, **options)


@functools.cache
def emulated(**options):
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    return jax.jit(functools.partial(kda_step_mosaic, scale=0.3, interpret=interpret, **options))


def check(got, want, dtype, state_dtype="float32"):
    assert_close(got[0][:, None], want[0], FORWARD[dtype], "o")
    assert_close(got[1], want[1], FORWARD[state_dtype], "state")
    assert (str(got[0].dtype), str(got[1].dtype)) == (dtype, state_dtype)


# decay "mixed": e^-6e4 is 0, in one channel and not in the next
@pytest.mark.parametrize(
    ("K", "V", "dtype", "state_dtype"),
    [
        (32, 64, "float32", "float32"),
        (96, 32, "float16", "float32"),
        (64, 192, "bfloat16", "bfloat16"),
        (256, 128, "float32", "bfloat16"),
    ],
)
def test_activated(rng, K, V, dtype, state_dtype):
    case = make(rng, B=2, T=1, H=1, HV=2, K=K, V=V, decay="mixed", beta="reflecting", dtype=dtype)
    arrays = token(case, state_dtype)
    check(emulated()(*arrays), want(arrays), dtype, state_dtype)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_raw(rng, lower_bound, dtype):
    case = make_raw(rng, B=1, T=1, H=2, HV=4, K=64, V=64, dtype=dtype)
    arrays, parameters = token(case), decay(case, lower_bound)
    got = emulated(negative_eigenvalues=True)(*arrays, parameters)
    check(got, want(arrays, parameters, beta_scale=2.0), dtype)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_padding_keeps_the_state(rng, lower_bound):
    """As the layer makes it: no query, no key, no decay; bit by bit, and no output."""
    case = make_raw(rng, B=1, T=1, H=2, HV=4, K=64, V=64, dtype="bfloat16")
    q, k, v, g_raw, beta_raw, state = token(case)
    inputs = jnp.zeros_like(q), jnp.zeros_like(k), v, jnp.full(g_raw.shape, NO_DECAY), beta_raw, state
    o, new_state = emulated(negative_eigenvalues=True)(*inputs, decay(case, lower_bound))
    np.testing.assert_array_equal(new_state, state)
    np.testing.assert_array_equal(o, 0)


def test_softplus_keeps_small_values():
    """To a few units in the last place, where log(1 + exp x) would have lost them, and where exp x is 0."""
    x = np.array([-200.0, -80.0, -20.0, -16.0, -3.0, 0.0, 0.1, 30.0, 1e4], np.float32)
    got = jax.jit(lambda x: decode._log_decay(x, jnp.float32(2.0), decode.Activation(None, False)))(x)
    np.testing.assert_allclose(got, -2 * np.logaddexp(0, x.astype(np.float64)), rtol=1e-6, atol=1e-80)


def test_derivatives_of_every_input(rng):
    """Backward against the oracle; forward against backward."""
    case = make_raw(rng, T=1, K=32, V=32)
    arrays, parameters = token(case), decay(case)
    cotangents = (jnp.asarray(case["do"][:, 0]), jnp.asarray(case["dfinal_state"]))
    function = emulated()
    out, pull = jax.vjp(function, *arrays, parameters)
    want_out, grads = want(arrays, parameters, do=case["do"], dfinal_state=case["dfinal_state"])
    check(out, want_out, "float32")
    *got, dstate, ddecay = pull(cotangents)
    got = [*(x[:, None] for x in got), ddecay.A_log, ddecay.dt_bias, dstate]
    for name, x, y in zip((*RAW_NAMES, "A_log", "dt_bias", "state"), got, grads, strict=True):
        assert_close(x, y, 1e-4, name)
    tangents = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), (*arrays, parameters))
    _, moved = jax.jvp(function, (*arrays, parameters), tangents)
    forward = sum(float((a * b).sum()) for a, b in zip(moved, cotangents, strict=True))
    backward = jax.tree.map(lambda a, b: float((a * b).sum()), pull(cotangents), tangents)
    assert forward == pytest.approx(sum(jax.tree.leaves(backward)), rel=1e-4)


@pytest.mark.parametrize("own_decay", [False, True])
def test_vmap(rng, own_decay):
    """Queries are shared; the decay's parameters are shared, or every member has its own."""
    members = [make_raw(rng, B=2, T=1, H=1, HV=2, K=32, V=32) for _ in range(3)]
    arrays = [jnp.stack(x) for x in zip(*map(token, members), strict=True)]
    parameters = decay(members[0])
    if own_decay:
        parameters = jax.tree.map(lambda *x: jnp.stack(x), *map(decay, members))
    axes = (None, 0, 0, 0, 0, 0, 0 if own_decay else None)
    got = jax.jit(jax.vmap(emulated(), in_axes=axes))(arrays[0][0], *arrays[1:], parameters)
    for i, member in enumerate(members):
        own = decay(member if own_decay else members[0])
        check([x[i] for x in got], want([arrays[0][0], *(x[i] for x in arrays[1:])], own), "float32")


@pytest.fixture
def stand_in(monkeypatch):
    """The plain step in the kernel's place, which no CPU can run under a partitioning rule."""

    def plain(*inputs, scale, activation, interpret):
        *inputs, A_log, dt_bias = inputs
        return kda_token(*inputs, kda_jax.Decay(A_log, dt_bias, activation.lower_bound), scale=scale)

    monkeypatch.setattr(step, "decode", plain)
    mapping.over_batch_and_heads.cache_clear()


HEADS = PartitionSpec("data", "model")
SPECS = (*(HEADS,) * 6, kda_jax.Decay(PartitionSpec("model"), PartitionSpec("model")))


def mesh():
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize("heads", [2, 4])
def test_partitioned_over_batch_and_heads(rng, stand_in, heads):
    case = make_raw(rng, B=4, T=1, H=heads, HV=4, K=8, V=16)
    arrays, parameters = token(case), decay(case)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh(), spec), SPECS)
    sharded = jax.device_put((*arrays, parameters), shardings)
    compiled = jax.jit(functools.partial(kda_step_mosaic, scale=0.3)).lower(*sharded).compile()
    for collective in ("all-gather", "all-to-all", "all-reduce", "collective-permute"):
        assert collective not in compiled.as_text()
    got = compiled(*sharded)
    check(got, want(arrays, parameters), "float32")
    for x in got:
        assert x.sharding.is_equivalent_to(NamedSharding(mesh(), HEADS), x.ndim)


def test_shard_map_checks_and_differentiates(rng, stand_in):
    case = make_raw(rng, B=2, T=1, H=2, HV=2, K=8, V=8)
    arrays = (*token(case), decay(case))

    def loss(*x):
        return sum((y**2).sum() for y in kda_step_mosaic(*x, scale=0.3))

    @functools.partial(jax.shard_map, mesh=mesh(), in_specs=SPECS, out_specs=PartitionSpec(), check_vma=True)
    def sharded(*x):
        return jax.lax.psum(loss(*x), ("data", "model"))

    value, got = jax.jit(jax.value_and_grad(lambda *x: sharded(*x), argnums=range(7)))(*arrays)
    want_value, want_grads = jax.jit(jax.value_and_grad(loss, argnums=range(7)))(*arrays)
    for x in (value, jax.jit(sharded)(*arrays)):
        assert float(x) == pytest.approx(float(want_value), rel=1e-5)
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-4), got, want_grads)


def specs(B=2, H=2, HV=4, K=128, V=128, dtype="bfloat16", state="float32"):
    shapes = ((B, H, K), (B, H, K), (B, HV, V), (B, HV, K), (B, HV))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]
    parameters = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((HV,), (HV, K)))
    return arrays, jax.ShapeDtypeStruct((B, HV, K, V), jnp.dtype(state)), kda_jax.Decay(*parameters)


@pytest.mark.parametrize("shift", [0, 3])
def test_lowers_for_hopper(shift):
    for K, V in zip(support.STEP_CHANNELS, np.roll(support.STEP_CHANNELS, shift).tolist(), strict=True):
        arrays, state, _ = specs(K=K, V=V)
        assert "custom_call @mosaic_gpu" in lower(functools.partial(kda_step_mosaic, scale=1.0), (*arrays, state))


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(support, "_unsupported_device", lambda: None)


def test_a_raw_step_is_one_kernel_in_place(hopper):
    """The whole program is one call, whose new state takes the memory of the old; a state that is kept is copied."""
    arrays, state, parameters = specs()
    text = lower(kda_jax.kda_raw_step, (*arrays, parameters, state), donate_argnums=6)
    operations = re.findall(r"stablehlo\.\w+ @?\w+", text)
    assert operations == ["stablehlo.custom_call @AllocateBuffer", "stablehlo.custom_call @mosaic_gpu_v2"]
    assert re.search(r"output_tuple_indices = \[1\], operand_index = 7,", text)
    assert re.search(r"%arg7: tensor<2x4x128x128xf32> {tf.aliasing_output = 1 ", text)
    assert "tf.aliasing_output" not in lower(kda_jax.kda_raw_step, (*arrays, parameters, state))


@pytest.mark.parametrize(("implementation", "kernels"), [(None, 1), ("mosaic_gpu", 1), ("scan", 0), (["scan"], 0)])
def test_which_implementation_runs(hopper, implementation, kernels):
    arrays, state, _ = specs()
    text = lower(functools.partial(kda_jax.kda_step, implementation=implementation), (*arrays, state))
    assert text.count("custom_call @mosaic_gpu") == kernels


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"K": 80}, r"key channels must be one of \(32, 64, 96, 128, 192, 256\), got 80"),
        ({"V": 512}, "value channels must be .* got 512"),
        ({"dtype": "float64"}, "q must have a dtype of .* got float64"),
        ({"state": "float16"}, r"state must have a dtype of \('bfloat16', 'float32'\), got float16"),
        ({"B": 2**16}, "number of sequences must be 1 to 65535, got 65536"),
        ({"B": 0}, "number of sequences must be 1 to 65535, got 0"),
    ],
)
def test_unsupported_inputs_have_a_reason(hopper, x64, change, part):
    arrays, state, parameters = specs(**change)
    for function, arguments in (
        (kda_jax.kda_step, (*arrays, state)),
        (kda_jax.kda_raw_step, (*arrays, parameters, state)),
    ):
        with pytest.raises(NotImplementedError, match=f"implementation 'mosaic_gpu': .*{part}"):
            jax.eval_shape(functools.partial(function, implementation="mosaic_gpu"), *arguments)
        assert [x.shape for x in jax.eval_shape(function, *arguments)] == [arrays[2].shape, state.shape]


def test_without_a_hopper_gpu_the_reason_says_so():
    arrays, state, _ = specs()
    with pytest.raises(NotImplementedError, match="an NVIDIA Hopper GPU is needed, the default backend is cpu"):
        jax.eval_shape(functools.partial(kda_jax.kda_step, implementation="mosaic_gpu"), *arrays, state)
