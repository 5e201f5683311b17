"""The operators under JAX's transformations: each equals the plain call, values and gradients."""

import functools

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


def gradient(implementation):
    """(arrays, cotangents) -> gradients of sum(outputs * cotangents), and the outputs; not jitted."""
    return jax.grad(loss_of(implementation), has_aux=True)


def loss_of(implementation, **options):
    def loss(arrays, cotangents):
        *inputs, state = arrays
        out = kda_jax.kda(*inputs, initial_state=state, implementation=implementation, **options)
        return inner(out, cotangents), out

    return loss


@functools.cache
def plain(implementation):
    """What every transformation is compared with, compiled once."""
    return jax.jit(gradient(implementation))


def split(case):
    """(arrays, cotangents)."""
    return tuple(case[n] for n in ARRAYS), (case["do"], case["dfinal_state"])


def stack(trees, axis=0):
    return jax.tree.map(lambda *x: jnp.stack(x, axis), *trees)


def assert_trees_close(got, want, tolerance=1e-5):
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        tolerances.assert_close(x, y, tolerance, jax.tree_util.keystr(path))


@every
def test_eager_equals_jit(rng, implementation):
    arrays, _ = split(make(rng, **SHAPE))
    call = functools.partial(kda_jax.kda, implementation=implementation)
    assert_trees_close(call(*arrays[:5]), jax.jit(call)(*arrays[:5]))


@every
def test_vmap_and_vmap_of_grad(rng, implementation):
    arguments = [split(make(rng, **SHAPE)) for _ in range(3)]
    got = jax.jit(jax.vmap(gradient(implementation)))(*stack(arguments))
    assert_trees_close(got, stack([plain(implementation)(*a) for a in arguments]))


@every
@pytest.mark.parametrize("mapped", ["g", "v", "initial_state"])
def test_vmap_over_one_input(rng, implementation, mapped):
    arrays, cotangents = split(make(rng, **SHAPE))
    several = [
        tuple(np.float32(factor) * x if n == mapped else x for n, x in zip(ARRAYS, arrays, strict=True))
        for factor in (1, 0.5, 0.1)
    ]
    axes = tuple(1 if n == mapped else None for n in ARRAYS)
    mixed = tuple(x if axis else x[:, 0] for x, axis in zip(stack(several, 1), axes, strict=True))
    got = jax.jit(jax.vmap(gradient(implementation), in_axes=(axes, None)))(mixed, cotangents)
    assert_trees_close(got, stack([plain(implementation)(x, cotangents) for x in several]))


@every
def test_vmap_over_packings(rng, implementation):
    arrays, ids = split(make(rng, **SHAPE))[0], rng.integers(0, 3, (3, 2, 19)).astype(np.int32)

    def call(ids):
        return kda_jax.kda(*arrays[:5], segment_ids=ids, implementation=implementation)

    assert_trees_close(jax.jit(jax.vmap(call))(ids), stack([jax.jit(call)(x) for x in ids]))


@every
def test_checkpoint(rng, implementation):
    arguments = split(make(rng, **SHAPE))
    got = jax.jit(jax.grad(jax.checkpoint(loss_of(implementation)), has_aux=True))(*arguments)
    assert_trees_close(got, plain(implementation)(*arguments))


@every
def test_scan_over_layers(rng, implementation):
    """A stack of layers by `lax.scan` equals the loop, with gradients of every layer's gates."""
    case, others = make(rng, **SHAPE | {"V": 8, "H": 4}), [make(rng, **SHAPE) for _ in range(3)]
    gates = stack([{n: other[n] for n in ("g", "beta")} for other in others])

    def layer(x, gate):
        o, _ = kda_jax.kda(case["q"], x, case["v"], gate["g"], gate["beta"], implementation=implementation)
        return 0.5 * (x + o), None

    def scanned(x, gates):
        return (jax.lax.scan(layer, x, gates)[0] * case["do"]).sum()

    @jax.jit
    def step_back(x, gate, dy):
        return jax.vjp(lambda x, gate: layer(x, gate)[0], x, gate)[1](dy)

    inputs = [case["k"]]
    for i in range(3):
        inputs.append(jax.jit(layer)(inputs[-1], jax.tree.map(lambda x, i=i: x[i], gates))[0])
    dx, dgates = case["do"], []
    for i in reversed(range(3)):
        dx, dgate = step_back(inputs[i], jax.tree.map(lambda x, i=i: x[i], gates), dx)
        dgates.append(dgate)
    assert_trees_close(jax.jit(jax.grad(scanned, (0, 1)))(case["k"], gates), (dx, stack(dgates[::-1])))


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
    out_specs = (SPECS[0], (TOKEN, STATE))
    mapped = jax.shard_map(gradient(implementation), mesh=mesh, in_specs=SPECS, out_specs=out_specs, check_vma=True)
    assert_trees_close(jax.jit(mapped)(*arguments), plain(implementation)(*arguments))


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
    sharded = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), arguments, SPECS)
    got = plain(implementation)(*sharded)
    assert_trees_close(got, plain(implementation)(*arguments))
    assert got[1][0].sharding.is_equivalent_to(NamedSharding(mesh, TOKEN), 4)
