"""The kernels as one function of JAX: differentiable, mappable, partitioned over batch and heads. The only file that
knows about these.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning

from kda_jax.ops.chunk import kda_chunk
from kda_jax.ops.types import Beta, Keys, LogDecay, Queries, State, Values
from pallas_kernels.config import Config, default_config
from pallas_kernels.forward import forward


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

    The backward pass, for now, is that of the chunk form in XLA, computed again from the inputs.

    Args:
      config: tuning; by default that of the shape on each device.
      interpret: `plgpu.InterpretGPUParams` to emulate the kernels on a CPU.

    Returns:
      o [B, T, HV, V] in v's dtype; final state [B, HV, K, V] float32.
    """
    state = () if initial_state is None else (initial_state,)
    o, final_state = _kda(_Static(float(scale), g_min, config, interpret), q, k, v, g, beta, *state)
    return o, final_state


class _Static(NamedTuple):
    scale: float
    g_min: float | None
    config: Config | None
    interpret: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(static: _Static, *inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in inputs))
    outputs = _mapped(static)(*inputs)
    # what leaves a kernel is typed as equal on all devices of a shard_map; it varies as its inputs do
    return tuple(_vary(x, varying) for x in outputs)  # type: ignore[return-value]


def _kda_forward(static: _Static, *inputs: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    return _kda(static, *inputs), inputs


def _kda_backward(
    static: _Static, inputs: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, ...]:
    def chunk_form(
        q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, *state: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        zero = jnp.zeros((v.shape[0], *v.shape[2:3], q.shape[3], v.shape[3]), jnp.float32)
        initial = state[0] if state else zero
        o, final_state, _ = kda_chunk(q, k, v, g, beta, scale=static.scale, initial_state=initial, g_min=static.g_min)
        return o, final_state

    return jax.vjp(chunk_form, *inputs)[1](cotangents)


_kda.defvjp(_kda_forward, _kda_backward)


def _vary(x: jax.Array, axes: frozenset) -> jax.Array:
    missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


@functools.lru_cache
def _mapped(static: _Static) -> Any:
    """The forward pass with a vmap rule: a mapped axis joins the batch."""

    @custom_vmap
    def mapped(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        if static.interpret is not None:  # its callbacks have effects, which a partitioning rule does not take
            return _local(static, *inputs)
        value_heads_a_head = inputs[2].shape[2] // inputs[0].shape[2]
        return _partitioned(static, value_heads_a_head, has_state=len(inputs) == 6)(*inputs)

    @mapped.def_vmap
    def rule(axis_size: int, is_mapped: Any, *inputs: jax.Array) -> tuple[Any, Any]:
        whole = [
            x if m else jnp.broadcast_to(x[None], (axis_size, *x.shape)) for x, m in zip(inputs, is_mapped, strict=True)
        ]
        outputs = mapped(*(x.reshape(-1, *x.shape[2:]) for x in whole))
        return tuple(x.reshape(axis_size, -1, *x.shape[1:]) for x in outputs), (True, True)

    return mapped


def _local(
    static: _Static, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, *state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The forward pass of one device."""
    config = static.config or default_config(v.shape[0] * v.shape[2], v.shape[3])
    initial = state[0] if state else None
    options: dict[str, Any] = {"scale": static.scale, "g_min": static.g_min, "interpret": static.interpret}
    return forward(q, k, v, g, beta, initial, config=config, **options)


@functools.lru_cache
def _partitioned(static: _Static, value_heads_a_head: int, has_state: bool) -> Any:
    """The forward pass with a partitioning rule: every device runs the kernels on its own batch rows and heads."""
    local = functools.partial(_local, static)

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        def shardings(tree):
            return jax.tree.map(lambda x: x.sharding, tree)

        return mesh, local, shardings(results), shardings(arguments)

    @custom_partitioning
    def partitioned(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        return local(*inputs)

    m = value_heads_a_head
    heads = "(h m)" if m > 1 else "h"  # a factor of one may not stand beside another
    inputs = f"b t h k, b t h k, b t {heads} v, b t {heads} k, b t {heads}" + f", b {heads} k v" * has_state
    partitioned.def_partition(
        partition,
        sharding_rule=f"{inputs} -> b t {heads} v, b {heads} k v",
        need_replication_factors=("t", "k", "m", "v") if m > 1 else ("t", "k", "v"),
        **({"m": m} if m > 1 else {}),
    )
    return partitioned
