"""One call prefills, continues and decodes: in any pieces, padded anyhow, a layer gives what its oracle gives."""

import jax
import jax.numpy as jnp
import layer_cases
import numpy as np
import pytest
import tolerances
from flax import nnx
from jax.sharding import PartitionSpec

from kda_jax.layers import Attention, LatentAttention

NAMES = sorted(layer_cases.CASES)
CAPACITY = 24


@nnx.jit
def call(layer, x, segment_ids, cache):
    return layer(x, segment_ids=segment_ids, cache=cache)


def run(layer, x, lengths, segment_ids=None):
    """The outputs of successive calls on pieces of x, and the last cache."""
    outputs, cache, start = [], layer.init_cache(x.shape[0], CAPACITY), 0
    for length in lengths:
        piece = slice(start, start + length)
        ids = None if segment_ids is None else segment_ids[:, piece]
        y, cache = call(layer, x[:, piece], ids, cache)
        outputs.append(y)
        start += length
    return np.concatenate(outputs, axis=1), cache


def inputs(rng, length):
    return rng.normal(size=(2, length, layer_cases.WIDTH)).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_pieces_equal_the_whole(name, rng):
    """Prefill of 7 tokens, three decoded, a prefill continued by 7, two decoded."""
    layer = layer_cases.build(name, rng)
    x = inputs(rng, 19)
    y, _ = run(layer, x, (7, 1, 1, 1, 7, 1, 1))
    want = layer_cases.run_oracle(name, layer_cases.parameters(layer), x, np.ones((2, 19)))
    tolerances.assert_close(y, want, tolerances.FORWARD["float32"])


@pytest.mark.parametrize("name", NAMES)
def test_padding_and_packing_in_pieces(name, rng):
    """Padding on the left, on the right, in between, of a whole piece, and of one row of a decoding batch.

    Then packed pieces: the second starts with the sequence that the first ends with, under another id.
    """
    layer = layer_cases.build(name, rng)
    params = layer_cases.parameters(layer)
    ids = np.array(
        [
            [*(0, 0, 1, 1, 1, 1, 1), *(1, 0, 1, 1, 0, 1, 1), 1, 1],
            [*(1, 1, 1, 1, 1, 0, 0), *(0, 0, 0, 0, 0, 0, 0), 0, 1],
        ],
        np.int32,
    )
    x = inputs(rng, 16)
    x[ids == 0] = 1e4
    y, _ = run(layer, x, (7, 7, 1, 1), ids)
    tolerances.assert_close(y, layer_cases.run_oracle(name, params, x, ids), tolerances.FORWARD["float32"], "padded")
    assert not np.any(y[ids == 0])

    first, second, later = [1, 1, 1, 2, 2, 2, 2], [5, 5, 5, 3, 3, 0, 3], [3]
    packed = np.array([first + second + later] * 2, np.int32)
    x = inputs(rng, 15)
    y, _ = run(layer, x, (7, 7, 1), packed)
    joined = np.where(packed == 5, 2, packed)
    tolerances.assert_close(y, layer_cases.run_oracle(name, params, x, joined), tolerances.FORWARD["float32"], "packed")


@pytest.mark.parametrize("name", ["kda", "gdn", "attention", "mla"])
def test_rows_are_independent(name, rng):
    """A row of NaN leaves the other bitwise unchanged, in outputs and cache."""
    layer = layer_cases.build(name, rng)
    x = inputs(rng, 8)
    spoilt = x.copy()
    spoilt[1] = np.nan
    (y, cache), (y2, cache2) = run(layer, x, (7, 1)), run(layer, spoilt, (7, 1))
    np.testing.assert_array_equal(y[0], y2[0])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[0]), cache, cache2)
    assert np.isnan(y2[1]).all()


@pytest.mark.parametrize("name", ["kda", "attention_rope", "mla"])
def test_shard_map(name, rng):
    """Over the batch, with check_vma on: packed prefill, a decoded token, and the sum of the shards' gradients."""
    layer = layer_cases.build(name, rng)
    graphdef, params = nnx.split(layer)
    x = inputs(rng, 7)
    ids = np.array([[0, 1, 1, 1, 0, 2, 2], [1, 1, 0, 1, 1, 1, 1]], np.int32)

    def outputs(params, x, ids):
        layer = nnx.merge(graphdef, params)
        y, cache = layer(x, segment_ids=ids, cache=layer.init_cache(x.shape[0], CAPACITY))
        return jnp.concatenate([y, layer(x[:, :1], cache=cache)[0]], axis=1)

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (PartitionSpec(), PartitionSpec("data"), PartitionSpec("data"))
    sharded = jax.shard_map(outputs, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("data"), check_vma=True)

    def value_and_gradient(function):
        def loss(params):
            y = function(params, x, ids)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    jax.tree.map(
        lambda a, b: tolerances.assert_close(a, b, tolerances.GRADIENT["float32"]),
        value_and_gradient(sharded),
        value_and_gradient(outputs),
    )


@pytest.mark.parametrize("name", ["attention", "mla"])
def test_overflow(name, rng):
    layer = layer_cases.build(name, rng)
    x = inputs(rng, 5)
    with pytest.raises(ValueError, match=r"5 tokens .* capacity 4"):
        nnx.jit(lambda layer, x: layer(x, cache=layer.init_cache(2, 4)))(layer, x)
    ids = np.array([[1] * 5, [0, 1, 1, 1, 1]], np.int32)
    with pytest.raises(ValueError, match="capacity 4 and would hold 5"):
        layer(x, segment_ids=jnp.asarray(ids), cache=layer.init_cache(2, 4))
    y, cache = call(layer, x, ids, layer.init_cache(2, 4))
    assert np.isnan(y[0]).all()
    want = layer_cases.run_oracle(name, layer_cases.parameters(layer), x, ids)
    tolerances.assert_close(y[1], want[1], tolerances.FORWARD["float32"], "the row that fits")
    y, _ = call(layer, x, ids, cache)
    assert np.isnan(y[0]).all(), "a row stays NaN once it has overflowed"
    assert np.isnan(y[1, 1:]).all(), "the other row overflows in its turn"


@pytest.mark.parametrize("capacity", [0, -3])
def test_capacity_is_positive(capacity, rng):
    with pytest.raises(ValueError, match=f"capacity must be at least 1, got {capacity}"):
        layer_cases.build("attention", rng).init_cache(1, capacity)


@pytest.mark.parametrize("layer_class", [Attention, LatentAttention])
def test_bfloat16_attention(layer_class):
    """A cache in the dtype of the computation, and values near float32's."""
    arguments = (8, 2, 4) if layer_class is Attention else (8, 2, layer_cases.SMALL)

    @jax.jit
    def both(x):
        layer = layer_class(*arguments, dtype="bfloat16", param_dtype="bfloat16", rngs=nnx.Rngs(0))
        wide = layer_class(*arguments, rngs=nnx.Rngs(0))
        nnx.update(wide, jax.tree.map(lambda p: p.astype(jnp.float32), nnx.state(layer)))
        return layer(x, cache=layer.init_cache(2, 9)), wide(x)[0]

    (y, cache), want = both(jax.random.normal(jax.random.key(0), (2, 7, 8)))
    assert {y.dtype, *(entry.dtype for entry in cache.entries)} == {jnp.dtype(jnp.bfloat16)}
    tolerances.assert_close(y, want, 2e-2)


def test_kda_cache_has_one_size(rng):
    layer = layer_cases.build("kda", rng)
    shapes = jax.tree.map(jnp.shape, layer.init_cache(2, 5))
    assert shapes == jax.tree.map(jnp.shape, layer.init_cache(2, 500_000))
    assert layer.init_cache(2).state.shape == (2, 4, 4, 3)
