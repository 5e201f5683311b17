"""The other public KDA, each called as it is fastest: its own layout, its own kind of inputs."""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from experiments.decoding import Step
from experiments.errors import ConfigError
from experiments.versions import LOWEST, Version


def _jax_linear_attention() -> list[Version]:
    from jla import ops

    ops.available("kda")  # loads its kernels, which the first of several threads would do too late for the others
    implementation = "mosaic_gpu" if jax.default_backend() == "gpu" else "chunked"

    def run(q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array]:
        options = {"g": g, "beta": beta, "impl": implementation, "output_final_state": True}
        return ops.linear_attention("kda", q, k, v, **options)

    return [Version(f"jax-linear-attention {implementation}", run, peer=True)]


def _tokamax() -> list[Version]:
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

    inputs = ("q", "k", "v", "g_sigmoid", "beta")
    return [Version("tokamax xla_chunked", run, inputs, heads_first=True, peer=True)]


def _flash_linear_attention() -> list[Version]:
    from experiments import torch_peers

    return torch_peers.flash_linear_attention()


def _flash_linear_attention_steps() -> list[Step]:
    from experiments import torch_peers

    return torch_peers.flash_linear_attention_steps()


def _cudnn_frontend() -> list[Version]:
    from experiments import torch_peers

    return torch_peers.cudnn_frontend()


@dataclasses.dataclass(frozen=True)
class Peer:
    """A package: the module that it installs, how it computes sequences and a step, and whether it needs a GPU."""

    module: str
    versions: Callable[[], list[Version]]
    steps: Callable[[], list[Step]] = list
    gpu: bool = False


# By the name under which it is installed.
PEERS: dict[str, Peer] = {
    "jax-linear-attention": Peer("jla", _jax_linear_attention),
    "tokamax": Peer("tokamax", _tokamax),
    "flash-linear-attention": Peer("fla", _flash_linear_attention, _flash_linear_attention_steps, gpu=True),
    "nvidia-cudnn-frontend": Peer("cudnn", _cudnn_frontend, gpu=True),
}


def installed() -> list[str]:
    """The peers that can be imported, and run here."""
    gpu = jax.default_backend() == "gpu"
    return [name for name, peer in PEERS.items() if (gpu or not peer.gpu) and importlib.util.find_spec(peer.module)]


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
            where = ", with a GPU" if PEERS[name].gpu else ""
            raise ConfigError(f"--peers: {name} is not installed{where}; `pip install {name}`, or leave it out")
    return list(names)


def versions(name: str) -> list[Version]:
    """Import a peer: what of it is compared over sequences."""
    return PEERS[name].versions()


def steps(name: str) -> list[Step]:
    """The same of a step."""
    return PEERS[name].steps()
