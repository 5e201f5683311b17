"""A matrix for each group of rows, by JAX's own Mosaic GPU kernels, as one function of JAX.

    y_i = x_i W_e        dx_i = dy_i W_e^T        dW_e = sum_i x_i^T dy_i        for the rows i of group e

A block takes some rows of one group, so the work is that of the rows and of the groups' last, partly empty blocks.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

from pallas_kernels.mapping import as_varying, over_batch_and_heads

ROWS = (64, 128)  # of a block
STAGES = 4  # steps of 64 channels that shared memory holds at once
TILE: dict[str, Any] = {"block_n": 128, "block_k": 64, "max_concurrent_steps": STAGES, "grid_block_n": 1}


def grouped_product_mosaic(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """`kda_jax.ops.grouped_product.grouped_product` on Hopper, differentiable in reverse mode.

    Devices do not share the work: each has all rows and all matrices.
    """
    inputs = x, weights, sizes.astype(jnp.int32)
    return _product(*as_varying(inputs, inputs))


@jax.custom_vjp
def _product(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return _run(_rows, False, "m d, e d f, e", "m f", (x, weights, sizes))


def _forward(*inputs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _product(*inputs), inputs


def _backward(inputs: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, weights, sizes = inputs
    dx = _run(_rows, True, "m f, e d f, e", "m d", (dy, weights, sizes))
    return dx, _run(_matrices, None, "m d, m f, e", "e d f", (x, dy, sizes)), None


_product.defvjp(_forward, _backward)


def _run(function: Callable, static: Any, arrays: str, result: str, inputs: tuple[jax.Array, ...]) -> jax.Array:
    (y,) = over_batch_and_heads(function, static, arrays, result, value_heads_a_head=1)(*inputs)
    return as_varying(y, inputs)


def _rows(transposed: bool, x: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple[jax.Array]:
    rows = ROWS[len(x) > ROWS[0] * len(weights)]
    return (ragged_dot(x, weights, group_sizes=sizes, transpose_rhs=transposed, block_m=rows, **TILE),)


def _matrices(_: None, x: jax.Array, dy: jax.Array, sizes: jax.Array) -> tuple[jax.Array]:
    return (transposed_ragged_dot(x, dy, group_sizes=sizes, block_m=128, **TILE),)
