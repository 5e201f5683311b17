"""How a linear-attention layer mixes tokens, as data: KDA, what it is compared with, and where their decay starts."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kda_jax.layers.sizes import check_sizes
from kda_jax.ops.gates import check_lower_bound
from kda_jax.ops.validate import check_chunking


@dataclasses.dataclass(frozen=True)
class MixerConfig:
    """The choices of a `KimiDeltaAttention` layer; the defaults are Kimi Linear's.

    Attributes:
      decay: one log decay a key channel (KDA), one a value head (Gated DeltaNet), or None.
      delta_rule: a write replaces what the state holds for its key; False only adds to it.
      write: strength of a write: "sigmoid", beta = sigmoid(b_proj x); "dt", Mamba-2's softplus(f_proj x + dt_bias),
        which also sets the decay and needs decay "head".
      normalize: L2-normalise queries and keys.
      lower_bound: None for the unbounded softplus decay, or a number in [-5, 0) for Kimi K3's bounded one.
      negative_eigenvalues: beta in [0, 2] instead of [0, 1].
      conv_width: taps of the short convolution on q, k and v; 0 leaves only its SiLU.
      output_gate: "low_rank" (rank head_dim), "full" (Kimi K3), or None.
      gate_activation: "sigmoid" as published, or "silu" (the report's swish ablation).
      decay_init: see `init_decay`.
      value_dim: channels V of a value head, by default head_dim.
      float32_taps: hold the convolutions' taps and the output norm's scale in float32 whatever the dtype of the other
        weights, as Kimi K3's checkpoints.
      chunk_size: tokens the operator treats at once, a power of two.

    Raises:
      ValueError: for a value outside its choices, or choices that exclude each other.
    """

    decay: Literal["channel", "head"] | None = "channel"
    delta_rule: bool = True
    write: Literal["sigmoid", "dt"] = "sigmoid"
    normalize: bool = True
    lower_bound: float | None = None
    negative_eigenvalues: bool = False
    conv_width: int = 4
    output_gate: Literal["low_rank", "full"] | None = "low_rank"
    gate_activation: Literal["sigmoid", "silu"] = "sigmoid"
    decay_init: Literal["published", "slow", "tied", "spread"] = "published"
    value_dim: int | None = None
    float32_taps: bool = False
    chunk_size: int = 64

    def __post_init__(self) -> None:
        choices = {
            "decay": ("channel", "head", None),
            "write": ("sigmoid", "dt"),
            "output_gate": ("low_rank", "full", None),
            "gate_activation": ("sigmoid", "silu"),
            "decay_init": ("published", "slow", "tied", "spread"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"MixerConfig.{name} must be one of {allowed}, got {getattr(self, name)!r}")
        check_lower_bound("MixerConfig.lower_bound", self.lower_bound)
        if self.lower_bound is not None:
            object.__setattr__(self, "lower_bound", float(self.lower_bound))  # which JSON can hold
        check_chunking(self.chunk_size, None)
        if self.write == "dt" and (self.decay != "head" or self.lower_bound is not None or self.negative_eigenvalues):
            raise ValueError(
                'MixerConfig.write="dt" needs decay="head", lower_bound=None and negative_eigenvalues=False, got '
                f"{self.decay=}, {self.lower_bound=}, {self.negative_eigenvalues=}"
            )
        if self.decay is None and self.lower_bound is not None:
            raise ValueError(f"MixerConfig.lower_bound needs a decay, got {self.lower_bound=} with decay=None")
        check_sizes(self, {"conv_width": 0, "value_dim": 1}, optional=("value_dim",))

    @property
    def is_kda(self) -> bool:
        """Whether the KDA operator computes this mixer: decay per channel, delta rule, L2 norm."""
        return self.decay == "channel" and self.delta_rule and self.normalize


KDA = MixerConfig()

MIXERS: dict[str, dict] = {
    "kda": {"decay": "channel", "delta_rule": True},
    "gdn": {"decay": "head", "delta_rule": True},
    "deltanet": {"decay": None, "delta_rule": True},
    "gla": {"decay": "channel", "delta_rule": False},
    "sgla": {"decay": "head", "delta_rule": False},
    "linear": {"decay": None, "delta_rule": False},
    "mamba2": {"decay": "head", "delta_rule": False, "write": "dt", "normalize": False},
}
"""What each name changes: decay {per channel, per head, none} times delta rule {on, off}, and a Mamba-2-like one."""


def mixer_config(name: str, base: MixerConfig = KDA) -> MixerConfig:
    """`base` with the fields that define the mixer `name`, a key of `MIXERS`.

    Raises:
      ValueError: for another name.
    """
    if name not in MIXERS:
        raise ValueError(f"unknown mixer {name!r}; the mixers are {', '.join(MIXERS)}")
    changes = dict(MIXERS[name])
    if changes["decay"] is None:
        changes["lower_bound"] = None
    return dataclasses.replace(base, **changes)


def init_decay(
    key: Array, num_heads: int, num_channels: int, config: MixerConfig
) -> tuple[Float[Array, " HV"], Float[Array, "HV K"]]:
    """First values of A_log and dt_bias, always float32, such that exp(A_log) = A and softplus(dt_bias) = dt.

        published   A ~ U(1, 16) a head,  dt ~ exp U(log 1e-3, log 1e-1) a channel         (Kimi Linear, as in Mamba-2)
        slow        A ~ U(1, 2),          dt ~ exp U(log 1e-3, log 2e-3)
        tied        as published, but the channels of a head share one dt
        spread      A = 1,                dt log-spaced over the heads, 1e-3 to 1e-1

    so that a token's log decay starts near -A dt. The bounded decay has A = 1 throughout (Kimi K3).

    Args:
      key: PRNG key.
      num_heads: HV.
      num_channels: K, or 1 for one decay a head.
      config: its `decay_init` and `lower_bound` are read.
    """
    slow = config.decay_init == "slow"
    A_key, dt_key = jax.random.split(key)
    shape = (num_heads, 1 if config.decay_init == "tied" else num_channels)
    if config.decay_init == "spread":
        A = jnp.ones(num_heads, jnp.float32)
        dt = jnp.logspace(-3, -1, num_heads, dtype=jnp.float32)[:, None]
    else:
        A = jax.random.uniform(A_key, (num_heads,), jnp.float32, 1.0, 2.0 if slow else 16.0)
        low, high = jnp.log(jnp.asarray([1e-3, 2e-3 if slow else 1e-1], jnp.float32))
        dt = jnp.exp(jax.random.uniform(dt_key, shape, jnp.float32, low, high))
    A_log = jnp.zeros_like(A) if config.lower_bound is not None else jnp.log(A)
    dt_bias = dt + jnp.log(-jnp.expm1(-dt))
    return A_log, jnp.broadcast_to(dt_bias, (num_heads, num_channels))
