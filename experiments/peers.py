"""The other public KDA that run in JAX, each called as it is fastest: its own layout, its own kind of inputs."""

import importlib.util
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from experiments.errors import ConfigError
from experiments.versions import LOWEST, Version


def _jax_linear_attention() -> Version:
    from jla import ops

    implementation = "mosaic_gpu" if jax.default_backend() == "gpu" else "chunked"

    def run(q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array]:
        options = {"g": g, "beta": beta, "impl": implementation, "output_final_state": True}
        return ops.linear_attention("kda", q, k, v, **options)

    return Version(f"jax-linear-attention {implementation}", run, peer=True)


def _tokamax() -> Version:
    from tokamax import ops

    def run(q: Array, k: Array, v: Array, x: Array, beta: Array) -> tuple[Array, Array]:
        heads, channels = k.shape[0], k.shape[-1]
        o, final_state = ops.kimi_delta_attention(
            *(q, k, v, x, beta),
            a_log=jnp.zeros(heads),
            delta_time_bias=jnp.zeros(heads * channels),
            lower_bound=LOWEST,
            use_qk_l2norm=True,
            use_gate_in_kernel=True,  # its only form outside a TPU
            output_final_state=True,
            implementation="xla_chunked",
        )
        return o, final_state[:, 0]  # one segment a row

    return Version("tokamax xla_chunked", run, raw=True, heads_first=True, peer=True)


# The package to install: the module that it installs, and how to call it.
PEERS: dict[str, tuple[str, Callable[[], Version]]] = {
    "jax-linear-attention": ("jla", _jax_linear_attention),
    "tokamax": ("tokamax", _tokamax),
}


def installed() -> list[str]:
    """The peers that can be imported."""
    return [name for name, (module, _) in PEERS.items() if importlib.util.find_spec(module)]


def parse(names: Sequence[str]) -> list[str]:
    """The peers meant by ["all"] (those installed), ["none"] or their names.

    Raises:
      ConfigError: for a name that is unknown or not installed.
    """
    if list(names) in (["all"], ["none"]):
        return installed() if names[0] == "all" else []
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"--peers: no peer {name!r}; give all, none, or some of {', '.join(PEERS)}")
        if name not in installed():
            raise ConfigError(f"--peers: {name} is not installed; `pip install {name}`, or leave it out")
    return list(names)


def make(name: str) -> Version:
    """Import a peer."""
    return PEERS[name][1]()
