"""The short convolution with its tail against loops over tokens: padding is as if it were not there."""

import jax
import jax.numpy as jnp
import layer_cases
import numpy as np
import pytest
import reference_layers as oracle
import tolerances
from flax import nnx

from kda_jax.layers import ShortConvolution

FEATURES = 5
IDS = layer_cases.SEGMENT_IDS


def naive(weight, x, tail, segment_ids):
    """(y, new tail): each sequence apart, the tail before the row's first one."""
    width = len(weight)
    y, new_tail = np.zeros_like(x), tail.copy()
    seen = set()
    for row, tokens in layer_cases.sequences(segment_ids):
        before = np.zeros_like(tail[row]) if row in seen else tail[row]
        seen.add(row)
        whole = np.concatenate([before, x[row, tokens]])
        y[row, tokens] = oracle.short_convolution(weight, whole)[width - 1 :]
        new_tail[row] = whole[len(whole) - width + 1 :]
    return y, new_tail


def build(width, rng):
    return layer_cases.randomize(nnx.eval_shape(lambda: ShortConvolution(FEATURES, width, rngs=nnx.Rngs(0))), rng)


@nnx.jit
def value_and_gradients(conv, x, tail, segment_ids, cotangents):
    def loss(conv, x, tail):
        y, new_tail = conv(x, tuple(jnp.moveaxis(tail, 1, 0)), segment_ids)
        out = y, jnp.stack(new_tail, axis=1) if new_tail else tail
        return sum(jnp.sum(a * b) for a, b in zip(out, cotangents, strict=True)), out

    gradients, out = nnx.grad(loss, argnums=(0, 1, 2), has_aux=True)(conv, x, tail)
    return out, (gradients[0].weight[...], *gradients[1:])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("width", "length"), [(4, 19), (4, 2), (2, 19), (1, 19)])
def test_values_and_gradients(width, length, packed, rng):
    conv = build(width, rng)
    x, tail = rng.normal(size=(3, length, FEATURES)), rng.normal(size=(3, width - 1, FEATURES))
    ids = IDS[:, -length:]
    cotangents = rng.normal(size=x.shape), rng.normal(size=tail.shape)
    arguments = [np.asarray(a, np.float32) for a in (x, tail)]
    got, grads = value_and_gradients(
        conv, *arguments, ids if packed else None, [np.asarray(c, np.float32) for c in cotangents]
    )
    inputs = [np.asarray(conv.weight[...], np.float64), *(a.astype(np.float64) for a in arguments)]
    ids = ids if packed else np.ones_like(ids)
    for a, b, name in zip(got, naive(*inputs, ids), ("y", "tail"), strict=True):
        tolerances.assert_close(a, b, tolerances.FORWARD["float32"], name)

    for i, name in enumerate(("weight", "x", "tail")):
        direction = rng.normal(size=inputs[i].shape)
        ends = []
        for step in (1e-5, -1e-5):
            moved = [a + step * direction if j == i else a for j, a in enumerate(inputs)]
            ends.append(sum(np.sum(a * b) for a, b in zip(naive(*moved, ids), cotangents, strict=True)))
        np.testing.assert_allclose(
            np.sum(grads[i] * direction), (ends[0] - ends[1]) / 2e-5, rtol=1e-4, atol=1e-4, err_msg=name
        )


def test_steps_equal_the_sequence(rng):
    conv = build(4, rng)
    x = rng.normal(size=(2, 9, FEATURES)).astype(np.float32)
    whole, end = conv(x, conv.init_tail(2, jnp.float32))
    tail, parts = conv.init_tail(2, jnp.float32), []
    for t in range(9):
        y, tail = conv(x[:, t : t + 1], tail)
        parts.append(y)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(tail, end)


def test_vmap_of_grad(rng):
    """The packed path differentiates under vmap as it does row by row."""
    conv = build(4, rng)
    x = rng.normal(size=(2, 3, 19, FEATURES)).astype(np.float32)
    ids = np.stack([IDS, IDS[:, ::-1]])
    grad = jax.grad(lambda x, ids: jnp.sum(jnp.sin(conv(x, conv.init_tail(3, x.dtype), ids)[0])))
    together = jax.jit(jax.vmap(grad))(x, ids)
    apart = [jax.jit(grad)(a, b) for a, b in zip(x, ids, strict=True)]
    np.testing.assert_allclose(together, np.stack(apart), rtol=1e-6, atol=1e-6)


def test_negative_width():
    with pytest.raises(ValueError, match="width must be at least 0, got -1"):
        ShortConvolution(FEATURES, -1, rngs=nnx.Rngs(0))
