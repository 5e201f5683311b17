"""Where the parameters of a model belong on a mesh of devices."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Path = tuple[Any, ...]
"""Of a parameter: the names and indices that lead to it, such as ("blocks", 0, "mixer", "q_proj", "kernel")."""

Shard = Callable[[Path, tuple[int, ...]], jax.sharding.Sharding]
"""From a parameter's path and shape to the devices of its parts."""


def largest_axis(mesh: Mesh, name: str, *, least: int = 2**16) -> Shard:
    """Splits each parameter over the mesh axis `name` along its longest axis that divides evenly ("fully sharded").

    Stacks of experts are split between experts where their number divides, so that each device has whole ones. A
    parameter of fewer than `least` elements, or with no such axis, is on every device.
    """
    count = mesh.shape[name]

    def shard(path: Path, shape: tuple[int, ...]) -> NamedSharding:
        axes = [axis for axis, size in enumerate(shape) if size % count == 0]
        if not axes or math.prod(shape) < least:
            return NamedSharding(mesh, PartitionSpec())
        axis = 0 if "experts" in path and 0 in axes else max(axes, key=lambda axis: shape[axis])
        return NamedSharding(mesh, PartitionSpec(*[name if i == axis else None for i in range(len(shape))]))

    return shard
