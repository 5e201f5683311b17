"""From raw projections to the equation's inputs inside kernels: `kda_jax.ops.gates` in few instructions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

LOG2E = 1.4426950408889634
EPSILON = 1e-6  # of the L2 norm
# log(1 + e^x) is x itself in float32 long before this, and e^x is still finite
LARGE = 60.0


class Activation(NamedTuple):
    """How raw inputs become those of the equation: `Decay.lower_bound` and `negative_eigenvalues` of `kda_raw`."""

    lower_bound: float | None
    negative_eigenvalues: bool

    def decay(self, x: jax.Array, speed: jax.Array) -> jax.Array:
        """exp(g) of x = g_raw + dt_bias and speed = exp(A_log); the logarithm to 3e-7."""
        if self.lower_bound is None:
            softplus = jnp.maximum(jnp.log(1 + jnp.exp2(jnp.minimum(x, LARGE) * LOG2E)), x)
            return jnp.exp2(softplus * (speed * -LOG2E))
        return jnp.exp2(sigmoid(x * speed) * (self.lower_bound * LOG2E))

    def decay_gradients(self, x: jax.Array, speed: jax.Array, dg: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What a gradient of g gives for x and for A_log."""
        if self.lower_bound is None:
            grown = jnp.exp2(jnp.minimum(x, LARGE) * LOG2E)
            softplus, slope = jnp.maximum(jnp.log(1 + grown), x), grown / (1 + grown)
            dg = dg * -speed
            return dg * slope, dg * softplus
        away = jnp.exp2(jnp.minimum(x * -speed, LARGE) * LOG2E)  # e^-z; sigmoid'(z) = e^-z sigmoid(z)^2 cancels nothing
        s = 1 / (1 + away)
        dx = dg * (away * s * s * (speed * self.lower_bound))
        return dx, dx * x

    def strength(self, x: jax.Array) -> jax.Array:
        """beta of beta_raw."""
        return sigmoid(x) * self.strongest

    def strength_gradient(self, strength: jax.Array, dbeta: jax.Array) -> jax.Array:
        """What a gradient of beta gives for beta_raw."""
        return dbeta * (strength * (1 - strength * (1 / self.strongest)))

    @property
    def strongest(self) -> float:
        return 2.0 if self.negative_eigenvalues else 1.0


def sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp2(x * -LOG2E))
