"""From raw projections to the equation's inputs inside kernels: `kda_jax.ops.gates` in few instructions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.fragments import reciprocal

LOG2E = 1.4426950408889634
EPSILON = 1e-6  # of the L2 norm
# log(1 + e^x) is x itself in float32 long before this, and e^x is still finite
LARGE = 60.0
RAW_INERT = -jnp.inf  # in the place of g_raw: the token leaves the state as it is


class Activation(NamedTuple):
    """How raw inputs become those of the equation: `Decay.lower_bound` and `negative_eigenvalues` of `kda_raw`."""

    lower_bound: float | None
    negative_eigenvalues: bool

    def decay(self, x: jax.Array, speed: jax.Array, *, interpret: bool) -> jax.Array:
        """exp(g) of x = g_raw + dt_bias and speed = exp(A_log); the logarithm to 3e-7."""
        if self.lower_bound is None:
            softplus = jnp.maximum(jnp.log(1 + jnp.exp2(jnp.minimum(x, LARGE) * LOG2E)), x)
            return jnp.exp2(softplus * (speed * -LOG2E))
        sigmoid = reciprocal(1 + jnp.exp2(x * (speed * -LOG2E)), interpret=interpret)
        return jnp.exp2(sigmoid * (self.lower_bound * LOG2E))

    def decay_gradients(
        self, x: jax.Array, speed: jax.Array, dg: jax.Array, *, interpret: bool
    ) -> tuple[jax.Array, jax.Array]:
        """What a gradient of g gives for x and for A_log."""
        if self.lower_bound is None:
            grown = jnp.exp2(jnp.minimum(x, LARGE) * LOG2E)
            softplus = jnp.maximum(jnp.log(1 + grown), x)
            dg = dg * -speed
            return dg * (grown * reciprocal(1 + grown, interpret=interpret)), dg * softplus
        exponent = jnp.minimum(x * (speed * -LOG2E), LARGE * LOG2E)
        away = jnp.exp2(exponent)  # e^-z; sigmoid' = e^-z sigmoid^2
        sigmoid = reciprocal(1 + away, interpret=interpret)
        dz = (dg * sigmoid) * (away * sigmoid)
        return dz * (speed * self.lower_bound), (dz * exponent) * (-self.lower_bound / LOG2E)

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
