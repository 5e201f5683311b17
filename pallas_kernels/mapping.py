"""What every kernel needs to be a function of JAX: a rule for vmap, one for sharded inputs, and `shard_map`'s types."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

Run = Callable[..., tuple[jax.Array, ...]]


def as_varying(outputs: Any, inputs: Sequence[jax.Array]) -> Any:
    """The outputs (a pytree), typed as varying over the axes of a `shard_map` that the inputs vary over: what leaves a
    kernel is typed as equal on all devices.
    """
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in inputs))

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, outputs)


@functools.lru_cache
def over_batch_and_heads(
    run: Run, static: Any, arrays: str, results: str, *, value_heads_a_head: int, partition: bool = True
) -> Run:
    """`run(static, ...)` of arrays, on whichever part of the batch and of the heads it is called with.

    Under vmap the mapped axis joins the batch; where an array without a batch is mapped or made, calls follow one
    another.
    With `partition`, under jit, every device runs it on its own batch rows and heads.

    Args:
      run: hashable, as is `static`: one function of JAX is made of equal arguments.
      arrays, results: the axes of its inputs and outputs, as in "b h k, b j v, j": b is the batch and comes first, h
        the key heads, j the value heads; of any other axis a device needs all.
      value_heads_a_head: j / h.
    """
    has_batch = [axes.startswith("b") for axes in arrays.split(", ")]
    joins = all(axes.startswith("b") for axes in results.split(", "))

    def local(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        with jax.enable_x64(False):  # a kernel's indices have 32 bits
            return run(static, *inputs)

    here = _partitioned(local, arrays, results, value_heads_a_head) if partition else local

    @custom_vmap
    def mapped(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        return here(*inputs)

    @mapped.def_vmap
    def rule(axis_size: int, is_mapped: Any, *inputs: jax.Array) -> tuple[Any, Any]:
        def join(x: jax.Array, is_mapped: bool, has_batch: bool) -> jax.Array:
            if not has_batch:
                return x
            whole = x if is_mapped else jnp.broadcast_to(x[None], (axis_size, *x.shape))
            return whole.reshape(-1, *x.shape[2:] if is_mapped else x.shape[1:])

        def one(members: list[jax.Array]) -> tuple[jax.Array, ...]:
            left = iter(members)
            return mapped(*(next(left) if m else x for x, m in zip(inputs, is_mapped, strict=True)))

        if not joins or any(m and not b for m, b in zip(is_mapped, has_batch, strict=True)):
            outputs = jax.lax.map(one, [x for x, m in zip(inputs, is_mapped, strict=True) if m])
        else:
            joined = mapped(*map(join, inputs, is_mapped, has_batch))
            outputs = tuple(x.reshape(axis_size, -1, *x.shape[1:]) for x in joined)
        return outputs, (True,) * len(outputs)

    return mapped


def _partitioned(local: Run, arrays: str, results: str, value_heads_a_head: int) -> Run:
    def partition(mesh: Any, arguments: Any, _: Any) -> Any:
        # One for all arrays: where they were given an axis of devices for different axes, each keeps its own.
        first = zip(arrays.split(", ")[0].split(), arguments[0].sharding.spec, strict=False)
        given = {axis: spec for axis, spec in first if axis in "bh"}
        given["j"] = given.get("h")

        def shardings(axes: str) -> tuple[NamedSharding, ...]:
            """The first array's for batch and heads; of any other axis, whatever was given, a device gets all."""
            specs = (PartitionSpec(*map(given.get, a.split())) for a in axes.split(", "))
            return tuple(NamedSharding(mesh, spec) for spec in specs)

        return mesh, local, shardings(results), shardings(arrays)

    @custom_partitioning
    def partitioned(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        return local(*inputs)

    m = value_heads_a_head
    value_heads, sizes = ("(h m)", {"m": m}) if m > 1 else ("h", {})  # a factor of one may not stand beside another
    rule = f"{arrays} -> {results}".replace("j", value_heads)
    whole = tuple(axis for axis in dict.fromkeys(rule) if axis.isalpha() and axis not in "bh")  # in order of appearance
    partitioned.def_partition(partition, sharding_rule=rule, need_replication_factors=whole, **sizes)
    return partitioned
