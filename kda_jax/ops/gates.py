"""From a layer's raw projections to the operator's inputs: log decay, write strength, unit queries and keys."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kda_jax.ops.types import state_dtype

# Sixteen tokens at -5 span e^-80, which float32 still holds (about e^-87): the reach of one dense tile.
G_MIN_LOWEST = -5.0


def check_lower_bound(name: str, value: float | None) -> None:
    """Raises TypeError or ValueError unless `value` is None or a plain number in [-5, 0)."""
    if value is not None and not isinstance(value, (int, float, np.number)):
        raise TypeError(f"{name} must be None or a Python number, got {type(value).__name__}: {value!r}")
    if value is not None and not G_MIN_LOWEST <= value < 0.0:
        raise ValueError(f"{name} must be None or a number in [{G_MIN_LOWEST}, 0), got {value!r}")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["A_log", "dt_bias"], meta_fields=["lower_bound"])
@dataclasses.dataclass(frozen=True, eq=False)
class Decay:
    """Parameters of a layer's decay, a pytree whose `lower_bound` is static.

        lower_bound is None:   g = -exp(A_log) * softplus(g_raw + dt_bias)                  unbounded (Kimi Linear)
        lower_bound in [-5,0): g = lower_bound * sigmoid(exp(A_log) * (g_raw + dt_bias))    bounded (Kimi K3)

    Args:
      A_log: [HV] float32, log of the decay's speed, one a value head.
      dt_bias: [HV, K] float32, one a key channel.
      lower_bound: None, or the least log decay of a token, in nats.

    Raises:
      ValueError: if `lower_bound` is outside [-5, 0).
    """

    A_log: Float[Array, " HV"]
    dt_bias: Float[Array, "HV K"]
    lower_bound: float | None = None

    def __post_init__(self) -> None:
        check_lower_bound("Decay.lower_bound", self.lower_bound)

    def __call__(self, g_raw: Float[Array, "*batch HV K"]) -> Float[Array, "*batch HV K"]:
        """The log decay g, float32, of the raw projection."""
        if self.lower_bound is None:
            return softplus_decay(g_raw, self.A_log, self.dt_bias)
        return bounded_decay(g_raw, self.A_log, self.dt_bias, self.lower_bound)


def _shifted(g_raw: Array, dt_bias: Array) -> Array:
    shifted = g_raw.astype(state_dtype(g_raw.dtype))
    return shifted + dt_bias.astype(shifted.dtype).reshape((1,) * (g_raw.ndim - 2) + dt_bias.shape)


def _speed(A_log: Array, like: Array) -> Array:
    return jnp.exp(A_log.astype(like.dtype)).reshape((1,) * (like.ndim - 2) + (-1, 1))


def softplus_decay(
    g_raw: Float[Array, "*batch HV K"], A_log: Float[Array, " HV"], dt_bias: Float[Array, "HV K"]
) -> Float[Array, "*batch HV K"]:
    """g = -exp(A_log) * softplus(g_raw + dt_bias), in nats, float32, unbounded below (Kimi Linear, section 4)."""
    x = _shifted(g_raw, dt_bias)
    return -_speed(A_log, x) * jax.nn.softplus(x)


def bounded_decay(
    g_raw: Float[Array, "*batch HV K"], A_log: Float[Array, " HV"], dt_bias: Float[Array, "HV K"], lower_bound: float
) -> Float[Array, "*batch HV K"]:
    """g = lower_bound * sigmoid(exp(A_log) * (g_raw + dt_bias)), in nats, float32, in (lower_bound, 0) (Kimi K3)."""
    check_lower_bound("lower_bound", lower_bound)
    x = _shifted(g_raw, dt_bias)
    return lower_bound * jax.nn.sigmoid(_speed(A_log, x) * x)


def write_strength(
    beta_raw: Float[Array, "*batch HV"], negative_eigenvalues: bool = False
) -> Float[Array, "*batch HV"]:
    """beta = sigmoid(beta_raw), float32; twice that with `negative_eigenvalues`, so that I - beta k k^T may reflect."""
    beta = jax.nn.sigmoid(beta_raw.astype(state_dtype(beta_raw.dtype)))
    return 2.0 * beta if negative_eigenvalues else beta


def l2_normalize(x: Float[Array, "*batch K"], epsilon: float = 1e-6) -> Float[Array, "*batch K"]:
    """x * rsqrt(sum x^2 + epsilon) over the last axis, computed in float32, returned in x's dtype."""
    wide = x.astype(state_dtype(x.dtype))
    return (wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + epsilon)).astype(x.dtype)
