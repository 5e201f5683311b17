"""Attention to latents: the kernel in the interpreter and the plain form against float64, and as functions of JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec
from lowering import lower
from tolerances import FORWARD, assert_close

from kda_jax.layers import MLAConfig
from kda_jax.models import HybridConfig, HybridLM
from kda_jax.ops import latent_attention as public
from kda_jax.ops.latents import attend_latents
from pallas_kernels import latent_attention as kernel
from pallas_kernels import latent_step, mapping, support
from pallas_kernels.latent_step import attend_latents_mosaic

SCALE = 0.2


def draw(rng, B, H, C, S, dtype):
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in ((B, H, C), (B, S, C))]


def oracle(q, latents, windows, R):
    q, latents = (np.asarray(x, np.float64) for x in (q, latents))
    o = np.zeros((*q.shape[:2], R))
    for row, (start, stop) in enumerate(windows):
        if start < stop:
            seen = latents[row, max(start, 0) : stop]
            p = np.exp(SCALE * q[row] @ seen.T)
            o[row] = p / p.sum(1, keepdims=True) @ seen[:, :R]
    return o


@functools.cache
def emulated(R):
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    return jax.jit(functools.partial(attend_latents_mosaic, value_channels=R, scale=SCALE, interpret=interpret))


# steps of 64 places: a whole cache of more than fit shared memory at once, ends inside a step, a part without any
@pytest.mark.parametrize(
    ("H", "R", "E", "S", "windows", "parts", "dtype"),
    [
        (5, 64, 16, 384, [(0, 384), (70, 131), (0, 0)], 1, "bfloat16"),
        (8, 64, 32, 256, [(0, 256), (70, 131), (255, 256)], 3, "bfloat16"),
        (40, 128, 64, 128, [(3, 100)], 2, "float16"),
        (2, 64, 16, 128, [(3, 3), (10, 3), (100, 2**30), (-5, 20)], 1, "bfloat16"),  # empty or beyond the cache
    ],
)
def test_kernel(rng, monkeypatch, H, R, E, S, windows, parts, dtype):
    monkeypatch.setattr(kernel, "number_of_parts", lambda *_: parts)
    q, latents = draw(rng, len(windows), H, R + E, S, dtype)
    got = emulated(R)(q, latents, jnp.asarray(windows))
    assert_close(got, oracle(q, latents, windows, R), FORWARD[dtype])
    assert got.dtype == dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_form(rng, dtype):
    windows = [(0, 20), (3, 17), (0, 0)]
    q, latents = draw(rng, 3, 4, 12, 20, dtype)
    got = public.latent_attention(q, latents, jnp.asarray(windows), value_channels=8, scale=SCALE)
    assert_close(got, oracle(q, latents, windows, 8), FORWARD[dtype])


@pytest.mark.parametrize(
    ("large", "small", "want"), [(3.0, 3.0, 1.5), (3e4, -3e4, 1.0), (-np.inf, 2.0, 2.0), (-np.inf, -np.inf, 0.0)]
)
def test_merge(large, small, want):
    """Two parts of one place each, of values 1 and 2, by their scores (base 2): equal, far apart, of no place."""
    top = jnp.asarray([large, small])[None, :, None, None]
    weight = jnp.isfinite(top).astype(jnp.float32)
    o = weight[:, :, :, None] * jnp.asarray([1.0, 2.0])[None, :, None, None, None]
    np.testing.assert_allclose(kernel.merge(o, top, weight), [[[want]]], rtol=1e-6)


@pytest.mark.parametrize(("blocks", "parts"), [(64, 2), (8, 33), (1, 132), (128, 1), (132, 1), (100, 4), (1000, 1)])
def test_parts_fill_the_multiprocessors(blocks, parts):
    found = kernel.number_of_parts(blocks, 2048)
    waves = [-(-n * blocks // 132) / n for n in (found, parts)]
    assert waves[0] <= waves[1]
    assert kernel.number_of_parts(blocks, 3) == 1


def test_vmap_and_derivatives(rng):
    """Of queries alone: every member has the same latents."""
    q, latents = draw(rng, 2, 8, 80, 64, "bfloat16")
    windows = jnp.asarray([(0, 50), (7, 9)])
    members = jnp.stack([q, -q])
    got = jax.vmap(emulated(64), (0, None, None))(members, latents, windows)
    for x, member in zip(got, members, strict=True):
        assert_close(x, oracle(member, latents, np.asarray(windows), 64), FORWARD["bfloat16"])
    plain = functools.partial(attend_latents, value_channels=64, scale=SCALE)
    grads = [jax.grad(lambda *x: (f(*x, windows) ** 2).sum(), (0, 1))(q, latents) for f in (emulated(64), plain)]  # noqa: B023
    jax.tree.map(lambda x, y: assert_close(x, y, FORWARD["bfloat16"]), *grads)


def test_partitioned_over_batch_and_heads(rng, monkeypatch):
    def stand_in(*inputs, interpret, **options):  # a kernel no CPU can run under a partitioning rule
        return attend_latents(*inputs, **options)

    monkeypatch.setattr(latent_step, "latent_attention", stand_in)
    mapping.over_batch_and_heads.cache_clear()
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    q, latents = draw(rng, 4, 4, 12, 20, "float32")
    windows = jnp.asarray([(0, 20), (3, 17), (0, 0), (1, 2)])
    specs = (PartitionSpec("data", "model"), PartitionSpec("data"), PartitionSpec("data"))
    sharded = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((q, latents, windows), specs, strict=True)]
    function = jax.jit(functools.partial(attend_latents_mosaic, value_channels=8, scale=SCALE))
    compiled = function.lower(*sharded).compile()
    for collective in ("all-gather", "all-to-all", "all-reduce", "collective-permute"):
        assert collective not in compiled.as_text()
    got = compiled(*sharded)
    assert_close(got, oracle(q, latents, np.asarray(windows), 8), FORWARD["float32"])
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, specs[0]), got.ndim)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(support, "_unsupported_device", lambda: None)


def model(implementation):
    sizes = MLAConfig(latent_dim=64, key_dim=8, shared_dim=16, value_dim=8)
    config = HybridConfig(
        vocab_size=32,
        width=16,
        num_heads=2,
        head_dim=8,
        pattern=("kda", "mla"),
        mla=sizes,
        dtype=jnp.bfloat16,
        implementation="scan",
        attention_implementation=implementation,
    )
    return HybridLM(config, rngs=nnx.Rngs(0))


def test_a_model_decodes_by_the_kernel_as_it_prefills(rng, hopper, monkeypatch):
    """Logits of three tokens, one by one, against one call; padding before and between, and a second sequence."""
    calls = []

    def interpreted(*inputs, **options):
        calls.append(inputs)
        return attend_latents_mosaic(*inputs, **options, interpret=plgpu.InterpretGPUParams())

    monkeypatch.setitem(public._IMPLEMENTATIONS, "mosaic_gpu", interpreted)
    tokens, ids = rng.integers(32, size=(2, 7)), np.array([[0, 0, 1, 1, 1, 0, 1], [1, 1, 1, 2, 2, 2, 2]])
    prefill, decode = model("xla"), model(None)
    plain, decoder = (
        jax.jit(lambda tokens, ids, cache: prefill(tokens, segment_ids=ids, cache=cache)),
        jax.jit(lambda tokens, ids, cache: decode(tokens, segment_ids=ids, cache=cache)),
    )
    want, _ = plain(tokens, ids, None)
    _, cache = plain(tokens[:, :4], ids[:, :4], prefill.init_cache(2, 64))
    assert not calls
    for i in range(4, 7):
        logits, cache = decoder(tokens[:, i : i + 1], ids[:, i : i + 1], cache)
        valid = ids[:, i] != 0
        assert_close(logits[valid, 0], want[valid, i], 2 * FORWARD["bfloat16"])
    assert calls  # at a trace of the layer of latent attention


def specs(B=2, H=16, C=576, S=256, dtype="bfloat16", latents=None):
    shapes = (((B, H, C), dtype), ((B, S, C), latents or dtype), ((B, 2), "int32"))
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]


@pytest.mark.parametrize(("implementation", "kernels"), [(None, 1), ("mosaic_gpu", 1), ("xla", 0)])
def test_which_implementation_runs(hopper, implementation, kernels):
    function = functools.partial(public.latent_attention, value_channels=512, scale=1.0, implementation=implementation)
    assert lower(function, specs()).count("custom_call @mosaic_gpu") == kernels


@pytest.mark.parametrize(
    ("change", "value_channels", "part"),
    [
        ({"latents": "float32"}, 512, r"share a dtype of \('bfloat16', 'float16'\), got bfloat16, float32"),
        ({"C": 568}, 512, "channels must be a multiple of 16, at most 640, got 568"),
        ({"C": 656}, 512, "channels must be a multiple of 16, at most 640, got 656"),
        ({}, 96, "value_channels must be a multiple of 64, at most 512, got 96"),
        ({}, 576, "value_channels must be a multiple of 64, at most 512, got 576"),
        ({"S": 100}, 512, "places must be a multiple of 64, got 100"),
        ({"B": 2**16}, 512, "rows must be 1 to 65535, with heads and places, got 65536 rows"),
    ],
)
def test_unsupported_inputs_have_a_reason(hopper, change, value_channels, part):
    function = functools.partial(public.latent_attention, value_channels=value_channels, scale=1.0)
    with pytest.raises(NotImplementedError, match=f"implementation 'mosaic_gpu': .*{part}"):
        jax.eval_shape(functools.partial(function, implementation="mosaic_gpu"), *specs(**change))
    assert jax.eval_shape(function, *specs(**change)).shape[-1] == value_channels


def test_largest_supported_latents_fit():
    assert kernel.stages(support.LATENT_CHANNELS, kernel.HEADS) >= 2
    assert kernel.PLACES == support.LATENT_PLACES


def test_bad_arguments():
    q, latents, windows = (jnp.zeros(x.shape, x.dtype) for x in specs(C=80, S=64))
    run = functools.partial(public.latent_attention, value_channels=64, scale=1.0)
    for change, message in (
        ((q[:1], latents, windows), r"latents must have shape \[B=1, S, C=80\], got \(2, 64, 80\)"),
        ((q, latents, windows[:, :1]), r"window must have shape \[B=2, 2=2\], got \(2, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            run(*change)
    with pytest.raises(TypeError, match="scale must be a Python number, got NoneType: None"):
        run(q, latents, windows, scale=None)
    with pytest.raises(TypeError, match="value_channels must be an integer, got 4"):
        run(q, latents, windows, value_channels=4.0)
    with pytest.raises(ValueError, match="latents must have at least one place and channel, got shape"):
        run(q, latents[:, :0], windows)
    with pytest.raises(TypeError, match="window must have a dtype of kind integer, got float32"):
        run(q, latents, windows.astype(jnp.float32))
    with pytest.raises(ValueError, match="value_channels must be 1 to C=80, got 96"):
        run(q, latents, windows, value_channels=96)
    with pytest.raises(NotImplementedError, match="an NVIDIA Hopper GPU is needed, the default backend is cpu"):
        run(q, latents, windows, implementation="mosaic_gpu")
