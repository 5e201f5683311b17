"""The kernels of sequences as one function of JAX, differentiable, mappable, partitioned over batch and heads."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kda_jax.ops.chunk import kda_chunk
from kda_jax.ops.types import Beta, Keys, LogDecay, Queries, State, Values
from pallas_kernels.backward import backward, unsupported_reason
from pallas_kernels.config import Config, default_config
from pallas_kernels.forward import forward
from pallas_kernels.mapping import as_varying, over_batch_and_heads


def kda_mosaic(
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecay,
    beta: Beta,
    *,
    scale: float,
    initial_state: State | None = None,
    g_min: float | None = None,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Values, State]:
    """Kimi Delta Attention of activated inputs on Hopper (Kimi Linear, arXiv 2510.26692, section 3); the arguments
    are `kda_jax.kda`'s.

    The backward pass keeps the inputs alone; where `backward.unsupported_reason` gives a reason, it is that of the
    chunk form in XLA.

    Args:
      config: tuning; by default that of the shape on each device.
      interpret: `plgpu.InterpretGPUParams` to emulate the kernels on a CPU.

    Returns:
      o [B, T, HV, V] in v's dtype; final state [B, HV, K, V] float32.
    """
    inputs = (q, k, v, g, beta) + (() if initial_state is None else (initial_state,))
    # All inputs vary over the same axes of a `shard_map`, so that their gradients do.
    o, final_state = _kda(_Static(float(scale), g_min, config, interpret), *as_varying(inputs, inputs))
    return o, final_state


class _Static(NamedTuple):
    scale: float
    g_min: float | None
    config: Config | None
    interpret: Any


_OUTPUTS = "b t j v, b j k v"


def _axes(inputs: tuple[jax.Array, ...]) -> str:
    return "b t h k, b t h k, b t j v, b t j k, b t j" + ", b j k v" * (len(inputs) == 6)


def _mapped(run: Any, static: _Static, arrays: str, results: str, inputs: tuple[jax.Array, ...]) -> Any:
    mapped = over_batch_and_heads(
        run,
        static,
        arrays,
        results,
        value_heads_a_head=inputs[2].shape[2] // inputs[0].shape[2],
        partition=static.interpret is None,  # its callbacks have effects, which a partitioning rule does not take
    )
    return as_varying(mapped(*inputs), inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(static: _Static, *inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _mapped(_local, static, _axes(inputs), _OUTPUTS, inputs)


def _kda_forward(static: _Static, *inputs: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    return _kda(static, *inputs), inputs


def _kda_backward(
    static: _Static, inputs: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, ...]:
    if unsupported_reason(inputs[2].dtype, static.scale) is None:
        axes = _axes(inputs)
        return _mapped(_local_backward, static, f"{axes}, {_OUTPUTS}", axes, (*inputs, *cotangents))

    def chunk_form(
        q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, *state: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        zero = jnp.zeros((v.shape[0], *v.shape[2:3], q.shape[3], v.shape[3]), jnp.float32)
        initial = state[0] if state else zero
        o, final_state, _ = kda_chunk(q, k, v, g, beta, scale=static.scale, initial_state=initial, g_min=static.g_min)
        return o, final_state

    return jax.vjp(chunk_form, *inputs)[1](cotangents)


_kda.defvjp(_kda_forward, _kda_backward)


def _local(static: _Static, *inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The forward pass of one device."""
    q, k, v, g, beta, *state = inputs
    return forward(q, k, v, g, beta, state[0] if state else None, **_options(static, inputs))


def _local_backward(static: _Static, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The backward pass of one device."""
    *inputs, do, dstate = arrays
    state = inputs[5] if len(inputs) == 6 else None
    return backward(tuple(inputs[:5]), state, (do, dstate), **_options(static, arrays))


def _options(static: _Static, arrays: tuple[jax.Array, ...]) -> dict[str, Any]:
    v = arrays[2]
    config = static.config or default_config(v.shape[0] * v.shape[2], v.shape[3])
    return {"scale": static.scale, "g_min": static.g_min, "config": config, "interpret": static.interpret}
