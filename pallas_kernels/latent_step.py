"""The kernel of attention to latents as one function of JAX."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kda_jax.ops.latents import LatentOutputs, LatentQueries, Latents, Window, attend_latents
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.mapping import as_varying, over_batch_and_heads


def attend_latents_mosaic(
    q: LatentQueries, latents: Latents, window: Window, *, value_channels: int, scale: float, interpret: Any = None
) -> LatentOutputs:
    """`kda_jax.ops.latent_attention.latent_attention` on Hopper; differentiated, in either mode, it is plain XLA.

    Args:
      interpret: `plgpu.InterpretGPUParams` to emulate the kernel on a CPU.
    """
    places = latents.shape[1]
    window = jnp.clip(window, 0, min(places, jnp.iinfo(window.dtype).max)).astype(jnp.int32)
    window = jnp.where(window[:, :1] < window[:, 1:], window, 0)  # steps without a place have no largest score
    return _attend(_Static(value_channels, float(scale), interpret), q, latents, window)


class _Static(NamedTuple):
    value_channels: int
    scale: float
    interpret: Any


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(static: _Static, *inputs: jax.Array) -> jax.Array:
    run = over_batch_and_heads(
        _local,
        static,
        "b h c, b s c, b w",
        "b h r",
        value_heads_a_head=1,
        partition=static.interpret is None,  # its callbacks have effects, which a partitioning rule does not take
    )
    (o,) = run(*inputs)
    return as_varying(o, inputs)


def _local(static: _Static, *inputs: jax.Array) -> tuple[jax.Array]:
    return (latent_attention(*inputs, **static._asdict()),)


@_attend.defjvp
def _plain(static: _Static, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    plain = functools.partial(attend_latents, value_channels=static.value_channels, scale=static.scale)
    return jax.jvp(plain, primals, tangents)
