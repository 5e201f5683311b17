"""What the kernels read of a chunk in shared memory: q, k and exp(g), of activated or of raw inputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import registers as rg
from pallas_kernels.activation import EPSILON, LOG2E, Activation
from pallas_kernels.within import iota, zeros

CHUNK = rg.ROWS
GROUP = 32  # channels a pass over the scores: what the registers hold
f32 = jnp.float32


class Raw(NamedTuple):
    """What the kernels know of raw inputs. tokens: behind them the state stays as it is, whatever zeros decay to."""

    activation: Activation
    gate: Any  # the dtype of g_raw
    tokens: int


class Parameters(NamedTuple):
    """Of a head's decay: exp(A_log), and dt_bias [K] in shared memory."""

    speed: jax.Array
    bias: Any


def load(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=rg.LAYOUT)


def reader(
    q: Any, k: Any, g: Any, first: jax.Array, raw: Raw | None, parameters: Parameters | None
) -> Callable[[Any], tuple[jax.Array, ...]]:
    """The function of a slice of GROUP channels to q, k and exp(g) there, [64, GROUP] float32; first: the chunk's first
    token. Raw inputs are normalised and activated on the way.
    """
    if raw is None or parameters is None:
        return lambda cs: (*(load(x.at[:, cs]).astype(f32) for x in (q, k)), jnp.exp2(load(g.at[:, cs]) * LOG2E))
    norms = _inverse_norms(q), _inverse_norms(k)

    def read(cs: Any) -> tuple[jax.Array, ...]:
        bias = plgpu.load(parameters.bias.at[cs], layout=rg.LAYOUT.reduce(0), optimized=False)
        x = load(g.at[:, cs]).astype(f32) + lax.broadcast_in_dim(bias, (CHUNK, GROUP), (1,))
        decay = raw.activation.decay(x, parameters.speed)
        if raw.tokens % CHUNK:
            decay = jnp.where(iota(0, GROUP) + first < raw.tokens, decay, jnp.ones_like(decay))
        return *(load(x.at[:, cs]).astype(f32) * norm for x, norm in zip((q, k), norms, strict=True)), decay

    return read


def _inverse_norms(ref: Any) -> jax.Array:
    """Of every row of ref [64, K], as an array [64, GROUP]."""
    total = zeros(GROUP)
    for start in range(0, ref.shape[1], GROUP):
        x = load(ref.at[:, pl.ds(start, GROUP)]).astype(f32)
        total = total + x * x
    return lax.broadcast_in_dim(lax.rsqrt(jnp.sum(total, axis=1) + EPSILON), total.shape, (0,))
