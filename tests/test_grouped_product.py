"""Grouped products: the kernels in the interpreter against a float64 loop, their rules, what runs, reasons."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import ref_transposed_ragged_dot
from jax.sharding import NamedSharding, PartitionSpec
from lowering import lower
from tolerances import FORWARD, GRADIENT, assert_close

from kda_jax.layers import MixtureOfExperts, MoEConfig
from kda_jax.ops.grouped_product import grouped_product
from pallas_kernels import grouped_product as kernel
from pallas_kernels import mapping, support


def draw(rng, sizes, D, F, dtype="bfloat16"):
    M, E = sum(sizes), len(sizes)
    x, weights, dy = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((M, D), (E, D, F), (M, F)))
    return (x, weights, jnp.asarray(sizes, jnp.int32)), dy


def oracle(inputs, dy):
    """y, dx and dweights."""
    x, weights, sizes = (np.asarray(a, np.float64) for a in inputs)
    ends, dy = np.cumsum(sizes).astype(int), np.asarray(dy, np.float64)
    y, dx, dweights = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(weights)
    for e, end in enumerate(ends):
        rows = slice(end - int(sizes[e]), end)
        y[rows], dx[rows], dweights[e] = x[rows] @ weights[e], dy[rows] @ weights[e].T, x[rows].T @ dy[rows]
    return y, dx, dweights


def value_and_gradients(inputs, dy):
    x, weights, sizes = inputs
    y, pull = jax.vjp(lambda x, weights: kernel.grouped_product_mosaic(x, weights, sizes), x, weights)
    return y, *pull(dy)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(support, "_unsupported_device", lambda: None)
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(core_count=132)])


@pytest.fixture
def interpreted(monkeypatch, hopper):
    """The kernels on two emulated multiprocessors, without a partitioning rule, which takes no callbacks."""
    run, interpret = plgpu.kernel, plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(
        plgpu, "kernel", lambda body, grid, **options: run(body, grid=(2,), interpret=interpret, **options)
    )
    here = functools.partial(mapping.over_batch_and_heads, partition=False)
    monkeypatch.setattr(kernel, "over_batch_and_heads", here)


# groups: empty ones first, between and last, ends inside blocks; fewer rows than a block; blocks of 128 rows
@pytest.mark.parametrize(
    ("sizes", "D", "F", "dtype"),
    [([0, 40, 3, 0, 61, 0], 128, 256, "bfloat16"), ([5, 0, 3], 256, 128, "float16"), ([152, 0], 128, 128, "bfloat16")],
)
def test_kernels(rng, interpreted, sizes, D, F, dtype):
    inputs, dy = draw(rng, sizes, D, F, dtype)
    y, *gradients = jax.jit(value_and_gradients)(inputs, dy)
    want, *want_gradients = oracle(inputs, dy)
    assert_close(y, want, FORWARD[dtype], "y")
    for got, gradient, name in zip(gradients, want_gradients, ("dx", "dweights"), strict=True):
        assert_close(got, gradient, GRADIENT[dtype], name)
        assert got.dtype == dtype


@pytest.fixture
def stand_in(monkeypatch):
    """Kernels that a CPU can run under a partitioning rule."""

    def rows(x, weights, *, group_sizes, transpose_rhs, **_):
        return jax.lax.ragged_dot(x, weights.swapaxes(1, 2) if transpose_rhs else weights, group_sizes)

    def matrices(x, dy, *, group_sizes, **_):
        return ref_transposed_ragged_dot(x, dy, group_sizes)

    monkeypatch.setattr(kernel, "ragged_dot", rows)
    monkeypatch.setattr(kernel, "transposed_ragged_dot", matrices)
    mapping.over_batch_and_heads.cache_clear()
    yield
    mapping.over_batch_and_heads.cache_clear()


def test_vmap(rng, stand_in):
    """Of rows, groups and cotangents; all members have the same matrices."""
    cases = [draw(rng, sizes, 3, 5, "float32") for sizes in ([4, 0, 3], [2, 2, 3])]
    (x, _, sizes), dy = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases)
    weights = cases[0][0][1]
    got = jax.jit(jax.vmap(value_and_gradients, ((0, None, 0), 0)))((x, weights, sizes), dy)
    for i in range(2):
        want = oracle((x[i], weights, sizes[i]), dy[i])
        jax.tree.map(lambda a, b: assert_close(a[i], b, GRADIENT["float32"]), got, want)  # noqa: B023


def test_sharded(rng, stand_in):
    """Rows over one axis of devices, matrices over the other."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    inputs, dy = draw(rng, [3, 0, 1, 4], 4, 6, "float32")
    specs = (("data",), ("model",), (), ("data",))
    put = [jax.device_put(a, NamedSharding(mesh, PartitionSpec(*s))) for a, s in zip((*inputs, dy), specs, strict=True)]
    got = jax.jit(value_and_gradients)(tuple(put[:3]), put[3])
    jax.tree.map(lambda a, b: assert_close(a, b, GRADIENT["float32"]), got, oracle(inputs, dy))


def test_shard_map(rng, stand_in):
    """Every device has rows of its own, all the same matrices: their gradients are summed."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    own, whole = PartitionSpec("data"), PartitionSpec()
    specs = {"in_specs": ((own, whole, own), own), "out_specs": (own, own, whole)}
    cases = [draw(rng, sizes, 3, 5, "float32") for sizes in ([4, 0, 3], [2, 2, 3])]
    (x, _, sizes), dy = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *cases)
    weights = cases[0][0][1]
    run = jax.shard_map(value_and_gradients, mesh=mesh, **specs)
    y, dx, dweights = jax.jit(run)((x, weights, sizes), dy)
    want = [oracle((i[0], weights, i[2]), dy) for i, dy in cases]
    assert_close(y, np.concatenate([w[0] for w in want]), FORWARD["float32"])
    assert_close(dx, np.concatenate([w[1] for w in want]), GRADIENT["float32"])
    assert_close(dweights, sum(w[2] for w in want), GRADIENT["float32"])


def specs(M=104, E=5, D=128, F=256, dtype="bfloat16", weights=None):
    shapes = (((M, D), dtype), ((E, D, F), weights or dtype), ((E,), "int32"))
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]


@pytest.mark.parametrize(("implementation", "kernels"), [(None, 1), ("mosaic_gpu", 1), ("xla", 0)])
def test_which_implementation_runs(hopper, implementation, kernels):
    text = lower(functools.partial(grouped_product, implementation=implementation), specs())
    assert text.count("custom_call @mosaic_gpu") == kernels


@pytest.mark.parametrize("x64", [False, True])
def test_experts_run_the_kernels(hopper, x64):
    """Three products, and six for their gradients."""
    config = MoEConfig(num_experts=4, top_k=2, expert_width=128)
    layer = nnx.eval_shape(lambda: MixtureOfExperts(128, config, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(layer)
    loss = lambda params, x: jnp.sum(nnx.merge(graphdef, params)(x)[0].astype(jnp.float32))  # noqa: E731
    x = jax.ShapeDtypeStruct((2, 12, 128), jnp.bfloat16)
    with jax.enable_x64(x64):
        assert lower(loss, (params, x)).count("custom_call @mosaic_gpu") == 3
        assert lower(jax.grad(loss, (0, 1)), (params, x)).count("custom_call @mosaic_gpu") == 9


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"weights": "float32"}, r"share a dtype of \('bfloat16', 'float16'\), got bfloat16, float32"),
        ({"D": 192}, r"channels must be multiples of 128, got \[192, 256\]"),
        ({"F": 64}, r"channels must be multiples of 128, got \[128, 64\]"),
        ({"E": 1025}, "groups must be 1 to 1024, got 1025"),
        ({"M": 0}, "rows must be a positive multiple of 8, got 0"),
        ({"M": 100}, "rows must be a positive multiple of 8, got 100"),
    ],
)
def test_unsupported_inputs_have_a_reason(hopper, change, part):
    with pytest.raises(NotImplementedError, match=f"implementation 'mosaic_gpu': .*{part}"):
        jax.eval_shape(functools.partial(grouped_product, implementation="mosaic_gpu"), *specs(**change))
    if "weights" not in change:
        assert jax.eval_shape(grouped_product, *specs(**change)).shape == (change.get("M", 104), change.get("F", 256))


def test_bad_arguments():
    x, weights, sizes = (jnp.zeros(a.shape, a.dtype) for a in specs(D=3, F=4))
    with pytest.raises(ValueError, match=r"weights must have shape \[E, D=3, F\], got \(5, 2, 4\)"):
        grouped_product(x, weights[:, :2], sizes)
    with pytest.raises(ValueError, match=r"sizes must have shape \[E=5\], got \(4,\)"):
        grouped_product(x, weights, sizes[:4])
    with pytest.raises(TypeError, match="sizes must have a dtype of kind integer, got float32"):
        grouped_product(x, weights, sizes.astype(jnp.float32))
    with pytest.raises(NotImplementedError, match="an NVIDIA Hopper GPU is needed, the default backend is cpu"):
        grouped_product(x, weights, sizes, implementation="mosaic_gpu")
