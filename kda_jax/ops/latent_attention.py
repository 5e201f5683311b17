"""Attention of one token to a cache of latents: choose an implementation and run it on checked inputs."""

from collections.abc import Callable

import jax.numpy as jnp

from kda_jax.ops import validate
from kda_jax.ops.api import Implementation, check_names, first_supported
from kda_jax.ops.latents import LatentOutputs, LatentQueries, Latents, Window, attend_latents


def _mosaic_gpu(*inputs, **options):
    from pallas_kernels.latent_step import attend_latents_mosaic

    return attend_latents_mosaic(*inputs, **options)


# Best first: the order of `implementation=None`.
_IMPLEMENTATIONS: dict[str, Callable] = {"mosaic_gpu": _mosaic_gpu, "xla": attend_latents}


def _unsupported_reason(name, q, latents, value_channels):
    """Why the named implementation cannot run on these arrays here, or None."""
    if name != "mosaic_gpu":
        return None
    from pallas_kernels.support import unsupported_latents_reason

    return unsupported_latents_reason(q, latents, value_channels)


def latent_attention(
    q: LatentQueries,
    latents: Latents,
    window: Window,
    *,
    value_channels: int,
    scale: float,
    implementation: Implementation = None,
) -> LatentOutputs:
    """Multi-head latent attention of one token, with the heads' projections moved to the side of the queries
    ("absorbed": DeepSeek-V2, arXiv 2405.04434, section 2.1), so that all heads read one latent a place:

        o_h = sum_s p_hs c_s[:R]        p_h = softmax_s(scale q_h^T c_s)        start <= s < stop

    Args:
      q: [B, H, C] queries in the channels of the latents.
      latents: [B, S, C]; the first R channels are the value.
      window: [B, 2] integers, the start and the stop of the places that a row sees, clipped to those there are; where
        there are none, o is 0.
      value_channels: R, at most C.
      scale: of the scores.
      implementation: None for the best that is supported, a name ("mosaic_gpu", "xla") for that or an error, or a
        sequence of names. On a Hopper GPU "mosaic_gpu" reads the latents between start and stop once, and none else.
        Its derivatives are those of "xla".

    Returns:
      [B, H, R] in q's dtype; sums and the softmax are float32 (float64 for float64).

    Raises:
      ValueError, TypeError: at trace time, naming the argument, what it is and what was expected.
      NotImplementedError: with the reason, where no implementation asked for supports the inputs.
    """
    sizes: dict[str, int] = {"2": 2}
    validate.check_array("q", q, "B H C", sizes)
    validate.check_array("latents", latents, "B S C", sizes)
    validate.check_array("window", window, "B 2", sizes, jnp.integer)
    if 0 in latents.shape[1:]:
        raise ValueError(f"latents must have at least one place and channel, got shape {latents.shape}")
    if type(value_channels) is not int:
        raise TypeError(f"value_channels must be an integer, got {value_channels!r}")
    if not 1 <= value_channels <= sizes["C"]:
        raise ValueError(f"value_channels must be 1 to C={sizes['C']}, got {value_channels}")
    names = check_names(implementation, _IMPLEMENTATIONS)
    name = first_supported(names, lambda name: _unsupported_reason(name, q, latents, value_channels))
    scale = validate.check_scale(scale)
    return _IMPLEMENTATIONS[name](q, latents, window, value_channels=value_channels, scale=scale)
