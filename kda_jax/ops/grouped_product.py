"""A matrix for each group of rows: choose an implementation and run it on checked inputs."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kda_jax.ops import validate
from kda_jax.ops.api import Implementation, check_names, first_supported


def _mosaic_gpu(*inputs):
    from pallas_kernels.grouped_product import grouped_product_mosaic

    return grouped_product_mosaic(*inputs)


# Best first: the order of `implementation=None`.
_IMPLEMENTATIONS: dict[str, Callable] = {"mosaic_gpu": _mosaic_gpu, "xla": jax.lax.ragged_dot}


def _unsupported_reason(name, x, weights):
    """Why the named implementation cannot run on these arrays here, or None."""
    if name != "mosaic_gpu":
        return None
    from pallas_kernels.support import unsupported_groups_reason

    return unsupported_groups_reason(x, weights)


def grouped_product(
    x: Float[Array, "M D"],
    weights: Float[Array, "E D F"],
    sizes: Int[Array, " E"],
    *,
    implementation: Implementation = None,
) -> Float[Array, "M F"]:
    """The first sizes[0] rows of x times weights[0], the next sizes[1] times weights[1], and so on.

    Args:
      x: [M, D].
      weights: [E, D, F].
      sizes: [E] integers of sum M.
      implementation: None for the best that is supported, a name ("mosaic_gpu", "xla") for that or an error, or a
        sequence of names. "xla" is `jax.lax.ragged_dot`, which on GPUs multiplies all rows by every matrix;
        "mosaic_gpu", on a Hopper GPU, each by its own. The latter has no derivatives in forward mode, and where arrays
        are sharded every device computes all of it. The former has no rule for vmap over x or sizes alone.

    Returns:
      [M, F]; sums are float32 at least.

    Raises:
      ValueError, TypeError: at trace time, naming the argument, what it is and what was expected.
      NotImplementedError: with the reason, where no implementation asked for supports the inputs.
    """
    dims: dict[str, int] = {}
    validate.check_array("x", x, "M D", dims)
    validate.check_array("weights", weights, "E D F", dims)
    validate.check_array("sizes", sizes, "E", dims, jnp.integer)
    names = check_names(implementation, _IMPLEMENTATIONS)
    return _IMPLEMENTATIONS[first_supported(names, lambda name: _unsupported_reason(name, x, weights))](
        x, weights, sizes
    )
