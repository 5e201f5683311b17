"""Which inputs the kernels take: None, or the reason why not."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kda_jax.ops.gates import Decay

KEY_CHANNELS = (64, 128, 192, 256)  # of the kernels; others are filled up with zeros
VALUE_CHANNELS = (64, 128, 192, 256)
DTYPES = ("bfloat16", "float16")  # of every product; those of float32 would each be three (the README says what for)
ROUNDED = "float32"  # to bfloat16, of sequences whose caller agrees
COMPUTE_CAPABILITY = "9.0"

# Of the decode step.
STEP_CHANNELS = (32, 64, 96, 128, 192, 256)
STEP_DTYPES = ("bfloat16", "float16", "float32")
STATE_DTYPES = ("bfloat16", "float32")
STEP_ROWS = 2**16 - 1  # blocks along an axis of CUDA's grid

# Of attention to latents.
LATENT_PLACES = 64  # of a cache, or a multiple
LATENT_CHANNELS = 640  # for two steps of 64 places in shared memory
LATENT_VALUES = 512  # for the registers

# Of grouped products.
GROUP_ROWS = 8  # of all groups together, or a multiple
GROUP_CHANNELS = 128  # or a multiple
GROUPS = 1024  # the search for a block's group is unrolled


def unsupported_reason(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    *,
    rounded: bool = True,
    states_every: int = 0,
    platform: str | None = None,
) -> str | None:
    """Why `kda_mosaic` cannot run on these inputs (arrays, tracers or `jax.ShapeDtypeStruct`), or None.

    rounded: whether q, k and v of float32 may be rounded to bfloat16.
    states_every: tokens from one returned state to the next, 0 for none.
    platform: "hopper" skips the look at the default device, for a program that is lowered for a machine that is not
    this one.
    """
    if platform != "hopper" and (reason := _unsupported_device()):
        return reason
    from pallas_kernels.inputs import CHUNK  # here, since it loads Mosaic

    dtypes = (*DTYPES, ROUNDED) if rounded else DTYPES
    if not all(x.dtype == v.dtype for x in (q, k)) or jnp.dtype(v.dtype).name not in dtypes:
        return f"q, k, v must share a dtype of {dtypes}, got {q.dtype}, {k.dtype}, {v.dtype}"
    if jnp.dtype(g.dtype).itemsize > 4:
        return f"g must have at most 32 bits, got {g.dtype}"
    if q.shape[-1] > KEY_CHANNELS[-1]:
        return f"the number of key channels must be at most {KEY_CHANNELS[-1]}, for the registers, got {q.shape[-1]}"
    if v.shape[-1] > VALUE_CHANNELS[-1]:
        return f"the number of value channels must be at most {VALUE_CHANNELS[-1]}, got {v.shape[-1]}"
    if states_every % CHUNK:
        return f"the tokens from one returned state to the next must be a multiple of {CHUNK}, got {states_every}"
    if 0 in v.shape:
        return f"v must not be empty, got shape {v.shape}"
    return None


def unsupported_step_reason(
    inputs: Mapping[str, jax.Array], state: jax.Array, decay: Decay | None = None, *, platform: str | None = None
) -> str | None:
    """Why `kda_step_mosaic` cannot run on these arrays (q, k, v, then gate and beta by their names), or None; platform
    as above.
    """
    if platform != "hopper" and (reason := _unsupported_device()):
        return reason
    parameters = {} if decay is None else {"decay.A_log": decay.A_log, "decay.dt_bias": decay.dt_bias}
    for name, x in {**inputs, **parameters}.items():
        if jnp.dtype(x.dtype).name not in STEP_DTYPES:
            return f"{name} must have a dtype of {STEP_DTYPES}, got {x.dtype}"
    if jnp.dtype(state.dtype).name not in STATE_DTYPES:
        return f"the state must have a dtype of {STATE_DTYPES}, got {state.dtype}"
    for kind, channels in zip(("key", "value"), state.shape[2:], strict=True):
        if channels not in STEP_CHANNELS:
            return f"the number of {kind} channels must be one of {STEP_CHANNELS}, got {channels}"
    if not 0 < state.shape[0] <= STEP_ROWS:
        return f"the number of sequences must be 1 to {STEP_ROWS}, got {state.shape[0]}"
    return None


def unsupported_latents_reason(
    q: jax.Array, latents: jax.Array, value_channels: int, *, platform: str | None = None
) -> str | None:
    """Why `attend_latents_mosaic` cannot run on these arrays, or None; platform as above."""
    if platform != "hopper" and (reason := _unsupported_device()):
        return reason
    (rows, heads, channels), places = q.shape, latents.shape[1]
    if q.dtype != latents.dtype or jnp.dtype(q.dtype).name not in DTYPES:
        return f"q and latents must share a dtype of {DTYPES}, got {q.dtype}, {latents.dtype}"
    if channels % 16 or channels > LATENT_CHANNELS:
        return f"the number of channels must be a multiple of 16, at most {LATENT_CHANNELS}, got {channels}"
    if value_channels % 64 or value_channels > LATENT_VALUES:
        return f"value_channels must be a multiple of 64, at most {LATENT_VALUES}, got {value_channels}"
    if places % LATENT_PLACES:
        return f"the number of places must be a multiple of {LATENT_PLACES}, got {places}"
    if not 0 < rows <= STEP_ROWS or 0 in (heads, places):
        return f"rows must be 1 to {STEP_ROWS}, with heads and places, got {rows} rows, {heads=}, {places=}"
    return None


def unsupported_groups_reason(x: jax.Array, weights: jax.Array, *, platform: str | None = None) -> str | None:
    """Why `grouped_product_mosaic` cannot run on these arrays, or None; platform as above."""
    if platform != "hopper" and (reason := _unsupported_device()):
        return reason
    if x.dtype != weights.dtype or jnp.dtype(x.dtype).name not in DTYPES:
        return f"x and weights must share a dtype of {DTYPES}, got {x.dtype}, {weights.dtype}"
    groups, *channels = weights.shape
    if any(n % GROUP_CHANNELS for n in channels) or 0 in channels:
        return f"the numbers of channels must be multiples of {GROUP_CHANNELS}, got {channels}"
    if not 0 < groups <= GROUPS:
        return f"the number of groups must be 1 to {GROUPS}, got {groups}"
    if len(x) % GROUP_ROWS or not len(x):
        return f"the number of rows must be a positive multiple of {GROUP_ROWS}, got {len(x)}"
    return None


def filled_up(channels: int, sizes: tuple[int, ...]) -> int:
    """The least of the sizes that holds the channels."""
    return min(size for size in sizes if size >= channels)


def _unsupported_device() -> str | None:
    if jax.default_backend() != "gpu":
        return f"an NVIDIA Hopper GPU is needed, the default backend is {jax.default_backend()}"
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    if capability != COMPUTE_CAPABILITY:
        return f"compute capability {COMPUTE_CAPABILITY} (Hopper) is needed, {device.device_kind} has {capability}"
    return None
