"""The operators under JAX's transformations: each equals the plain call, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from cases import ARRAYS, IMPLEMENTATIONS, RAW_ARRAYS, make, make_raw
from jax.sharding import NamedSharding, PartitionSpec

import kda_jax
from kda_jax.ops.gates import Decay

every = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
SHAPE = {"B": 2, "T": 19, "H": 2, "HV": 4, "K": 8, "V": 4}


def inner(xs, ys):
    return sum((x * y).sum() for x, y in zip(xs, ys, strict=True))


def loss_of(implementation, **options):
    """(arrays, cotangents) -> sum of outputs times cotangents, with the outputs."""

    def loss(arrays, cotangents):
        *inputs, state = arrays
        out = kda_jax.kda(*inputs, initial_state=state, implementation=implementation, **options)
        return inner(out, cotangents), out

    return loss


def split(case):
    """(arrays, cotangents)."""
    return tuple(case[n] for n in ARRAYS), (case["do"], case["dfinal_state"])


def assert_trees_close(got, want, tolerance=1e-5):
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        tolerances.assert_close(x, y, tolerance, jax.tree_util.keystr(path))


@every
def test_jit_equals_eager(rng, implementation):
    arguments = split(make(rng, **SHAPE | {"T": 3}))
    grad = jax.grad(loss_of(implementation), has_aux=True)
    assert_trees_close(jax.jit(grad)(*arguments), grad(*arguments))


@every
def test_vmap_and_vmap_of_grad(rng, implementation):
    arguments = [split(make(rng, **SHAPE)) for _ in range(3)]
    grad = jax.jit(jax.grad(loss_of(implementation), has_aux=True))
    want = jax.tree.map(lambda *x: jnp.stack(x), *[grad(*a) for a in arguments])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *arguments)
    assert_trees_close(jax.jit(jax.vmap(grad))(*stacked), want)


@every
@pytest.mark.parametrize("mapped", ["g", "v", "initial_state"])
def test_vmap_over_one_input(rng, implementation, mapped):
    arrays, cotangents = split(make(rng, **SHAPE))
    axes = tuple(1 if n == mapped else None for n in ARRAYS)
    several = tuple(
        jnp.stack([x, 0.5 * x, 0.1 * x], 1) if n == mapped else x for n, x in zip(ARRAYS, arrays, strict=True)
    )
    grad = jax.jit(jax.grad(loss_of(implementation), has_aux=True))
    got = jax.jit(jax.vmap(grad, in_axes=(axes, None)))(several, cotangents)
    for i, factor in enumerate((1, 0.5, 0.1)):
        one = tuple(np.float32(factor) * x if n == mapped else x for n, x in zip(ARRAYS, arrays, strict=True))
        assert_trees_close(jax.tree.map(lambda x, i=i: x[i], got), grad(one, cotangents))


@every
def test_vmap_over_packings(rng, implementation):
    case, ids = make(rng, **SHAPE), rng.integers(0, 3, (3, 2, 19)).astype(np.int32)
    arguments = split(case)

    def call(ids):
        return jax.grad(loss_of(implementation, segment_ids=ids), has_aux=True)(*arguments)

    want = jax.tree.map(lambda *x: jnp.stack(x), *map(jax.jit(call), ids))
    assert_trees_close(jax.jit(jax.vmap(call))(ids), want)


@every
def test_checkpoint(rng, implementation):
    arguments, loss = split(make(rng, **SHAPE)), loss_of(implementation)
    want = jax.jit(jax.grad(loss, has_aux=True))(*arguments)
    assert_trees_close(jax.jit(jax.grad(jax.checkpoint(loss), has_aux=True))(*arguments), want)


@every
def test_scan_over_layers(rng, implementation):
    """A stack of layers by `lax.scan` equals the loop, with gradients of every layer's gates."""
    case = make(rng, **SHAPE | {"K": 4, "V": 4, "H": 4})
    gates = jax.tree.map(
        lambda *x: jnp.stack(x), *[{n: make(rng, **SHAPE | {"K": 4})[n] for n in ("g", "beta")} for _ in range(3)]
    )

    def layer(x, gate):
        o, _ = kda_jax.kda(case["q"], case["k"], x, gate["g"], gate["beta"], implementation=implementation)
        return x + o, None

    def scanned(x, gates):
        return (jax.lax.scan(layer, x, gates)[0] * case["do"]).sum()

    def looped(x, gates):
        for i in range(3):
            x, _ = layer(x, jax.tree.map(lambda leaf, i=i: leaf[i], gates))
        return (x * case["do"]).sum()

    got, want = (jax.jit(jax.grad(f, (0, 1)))(case["v"], gates) for f in (scanned, looped))
    assert_trees_close(got, want)


@every
@pytest.mark.parametrize("g_min", [None, -5.0])
def test_jvp_is_the_transpose_of_vjp(rng, x64, implementation, g_min):
    case = make(rng, dtype="float64", **SHAPE)
    arrays, cotangents = split(case)
    tangents = tuple(rng.normal(size=x.shape) for x in arrays)

    @jax.jit
    def products(arrays):
        def call(q, k, v, g, beta, state):
            return kda_jax.kda(q, k, v, g, beta, initial_state=state, implementation=implementation, g_min=g_min)

        _, moved = jax.jvp(call, arrays, tangents)
        _, vjp = jax.vjp(call, *arrays)
        return inner(moved, cotangents), inner(tangents, vjp(cotangents))

    forward, backward = products(arrays)
    np.testing.assert_allclose(forward, backward, rtol=1e-10)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2), ("batch", "head"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


TOKEN = PartitionSpec("batch", None, "head")
STATE = PartitionSpec("batch", "head")
SPECS = ((TOKEN,) * 5 + (STATE,), (TOKEN, STATE))


@every
def test_shard_map_over_batch_and_heads(rng, mesh, implementation):
    """`check_vma` on: gradients inside the mapped function, which need no communication."""
    arguments = split(make(rng, **SHAPE))
    grad = jax.grad(loss_of(implementation), has_aux=True)
    mapped = jax.shard_map(grad, mesh=mesh, in_specs=SPECS, out_specs=(SPECS[0], (TOKEN, STATE)), check_vma=True)
    assert_trees_close(jax.jit(mapped)(*arguments), jax.jit(grad)(*arguments))


@every
@pytest.mark.parametrize("kind", [None, "segment_ids", "cu_seqlens"])
def test_shard_map_without_initial_state(rng, mesh, implementation, kind):
    """The operator's own zero state varies over the mesh as its inputs do, packed or not."""
    case = make(rng, **SHAPE | ({"B": 1} if kind == "cu_seqlens" else {}))
    token, batch = (PartitionSpec(None, None, "head"), None) if kind == "cu_seqlens" else (TOKEN, "batch")
    packing = {
        None: ((), ()),
        "segment_ids": ((rng.integers(0, 3, (2, 19)).astype(np.int32),), (PartitionSpec("batch"),)),
        "cu_seqlens": ((np.array([0, 4, 4, 17], np.int32),), (PartitionSpec(),)),
    }[kind]

    def grad(arrays, do, *ids):
        def loss(arrays):
            o, state = kda_jax.kda(*arrays, implementation=implementation, **dict.fromkeys([kind] if ids else (), *ids))
            return (o * do).sum(), (o, state)

        return jax.grad(loss, has_aux=True)(arrays)

    arguments = (tuple(case[n] for n in ARRAYS[:5]), case["do"], *packing[0])
    state = PartitionSpec(batch, "head")
    specs, out_specs = ((token,) * 5, token, *packing[1]), ((token,) * 5, (token, state))
    mapped = jax.shard_map(grad, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=True)
    assert_trees_close(jax.jit(mapped)(*arguments), jax.jit(grad)(*arguments))


@every
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_shard_map_of_raw_inputs_under_grad(rng, mesh, implementation, lower_bound):
    """Parameters replicated over the batch: their gradients are summed over it."""
    case = make_raw(rng, **SHAPE)

    def call(q, k, v, g_raw, beta_raw, A_log, dt_bias, state):
        decay = Decay(A_log, dt_bias, lower_bound)
        return kda_jax.kda_raw(q, k, v, g_raw, beta_raw, decay, initial_state=state, implementation=implementation)

    specs = (TOKEN,) * 5 + (PartitionSpec("head"), PartitionSpec("head"), STATE)
    mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=(TOKEN, STATE), check_vma=True)

    def grads(function):
        def loss(arrays):
            return inner(function(*arrays), (case["do"], case["dfinal_state"]))

        return jax.jit(jax.grad(loss))(tuple(case[n] for n in RAW_ARRAYS))

    assert_trees_close(grads(mapped), grads(call))


@every
def test_jit_of_sharded_inputs(rng, mesh, implementation):
    """Partitioned over batch and heads without gathering: the outputs stay sharded as the inputs."""
    arguments = split(make(rng, **SHAPE))
    grad = jax.jit(jax.grad(loss_of(implementation), has_aux=True))
    sharded = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), arguments, SPECS)
    got = grad(*sharded)
    assert_trees_close(got, grad(*arguments))
    assert got[1][0].sharding.is_equivalent_to(NamedSharding(mesh, TOKEN), 4)
