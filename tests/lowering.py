"""Lowering for an H200 without one."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


def lower(function, arguments, **options):
    """The text of `jax.jit(function, **options)` for CUDA."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function, **options).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
