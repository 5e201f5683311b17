"""Which tensors of a published checkpoint hold each parameter of a `HybridLM`, and how: names, shapes, layout."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from kda_jax.models import mxfp4
from kda_jax.models.config import HybridConfig
from kda_jax.models.hf_config import is_k3
from kda_jax.models.hybrid import HybridLM
from kda_jax.models.sharding import Path

Shape = tuple[int, ...]
Read = Callable[[str], np.ndarray]
"""A tensor of the checkpoint by its name, best as a view of the file."""

OTHER_MODELS = ("vision_tower.", "mm_projector.")  # beside the text model in K3's checkpoints
A_LOG_LANES = 128  # K3 pads A_log with zeros to a multiple of these

# A parameter's path within the model or the layer -> its published name. Others keep theirs, see `_published`.
TOP = {
    "embed.embedding": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "lm_head.kernel": "lm_head.weight",
    "residual.norm.scale": "model.output_attn_res_norm.weight",
    "residual.proj.kernel": "model.output_attn_res_proj.weight",
}
LAYER = {
    "mixer_norm.scale": "input_layernorm.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    "mixer_residual.norm.scale": "self_attention_res_norm.weight",
    "mixer_residual.proj.kernel": "self_attention_res_proj.weight",
    "mlp_residual.norm.scale": "mlp_res_norm.weight",
    "mlp_residual.proj.kernel": "mlp_res_proj.weight",
    "mixer.q_conv.weight": "self_attn.q_conv1d.weight",
    "mixer.k_conv.weight": "self_attn.k_conv1d.weight",
    "mixer.v_conv.weight": "self_attn.v_conv1d.weight",
    "mixer.q_a_norm.scale": "self_attn.q_a_layernorm.weight",
    "mixer.kv_a_norm.scale": "self_attn.kv_a_layernorm.weight",
    "mixer.kv_a_proj.kernel": "self_attn.kv_a_proj_with_mqa.weight",
    "mlp.router.kernel": "block_sparse_moe.gate.weight",
    "mlp.router.bias": "block_sparse_moe.gate.e_score_correction_bias",
    "mlp.latent_down_proj.kernel": "block_sparse_moe.routed_expert_down_proj.weight",
    "mlp.latent_norm.scale": "block_sparse_moe.routed_expert_norm.weight",
    "mlp.latent_up_proj.kernel": "block_sparse_moe.routed_expert_up_proj.weight",
    "mlp.experts.gate_proj": "block_sparse_moe.experts.{expert}.w1.weight",
    "mlp.experts.up_proj": "block_sparse_moe.experts.{expert}.w3.weight",
    "mlp.experts.down_proj": "block_sparse_moe.experts.{expert}.w2.weight",
    "mlp.shared.gate_proj.kernel": "block_sparse_moe.shared_experts.gate_proj.weight",
    "mlp.shared.up_proj.kernel": "block_sparse_moe.shared_experts.up_proj.weight",
    "mlp.shared.down_proj.kernel": "block_sparse_moe.shared_experts.down_proj.weight",
}


class Tensor(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    shape: Shape
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Entry:
    """How the checkpoint holds one parameter.

    Attributes:
      path, shape, dtype: of the parameter in the model.
      name: of its tensor, with {expert} in it for a stack of one tensor an expert.
      shapes: those that the tensor (of one expert) may have; it is written in the first.
      transposed: the tensor is the transpose of the parameter (of one expert).
      packed: the tensor is MXFP4, name_packed and name_scale.
      alias: another name that the tensor may have.
    """

    path: Path
    shape: Shape
    dtype: np.dtype
    name: str
    shapes: tuple[Shape, ...]
    transposed: bool
    packed: bool = False
    alias: str | None = None

    @property
    def size(self) -> int:
        """Bytes of the parameter."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def names(self) -> list[str]:
        """Of the tensors, before what packing adds."""
        return [self.name.format(expert=e) for e in range(self.shape[0])] if "{expert}" in self.name else [self.name]

    def tensors(self) -> Iterator[Tensor]:
        """What is written."""
        for name in self.names:
            if self.packed:
                rows, columns = self.shapes[0]
                yield Tensor(f"{name}_packed", (rows, columns // 2), np.dtype(np.uint8))
                yield Tensor(f"{name}_scale", (rows, columns // mxfp4.BLOCK), np.dtype(np.uint8))
            else:
                yield Tensor(name, self.shapes[0], self.dtype)

    def decode(self, read: Read, index: tuple[slice, ...]) -> np.ndarray:
        """parameter[index], copied from as little of the checkpoint as the layout allows."""
        if "{expert}" not in self.name:
            return self._parameter(read, self.name, self.shape)[index].astype(self.dtype)
        names = self.names[index[0]]
        inner = [len(range(*part.indices(size))) for part, size in zip(index[1:], self.shape[1:], strict=True)]
        stack = np.empty((len(names), *inner), self.dtype)
        for e, name in enumerate(names):
            stack[e] = self._parameter(read, name, self.shape[1:])[index[1:]]
        return stack

    def encode(self, value: jax.Array) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors that hold the parameter, in the order of `tensors`; one expert at a time leaves the device."""
        for e, name in enumerate(self.names):
            part = np.asarray(value[e] if "{expert}" in self.name else value)
            part = part.T if self.transposed else part
            part = np.pad(part.reshape(-1), (0, math.prod(self.shapes[0]) - part.size)).reshape(self.shapes[0])
            if self.packed:
                try:
                    packed, scale = mxfp4.pack(part)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}; MoEConfig.storage=None saves them as they are") from error
                yield f"{name}_packed", packed
                yield f"{name}_scale", scale
            else:
                yield name, part

    def _parameter(self, read: Read, name: str, shape: Shape) -> np.ndarray:
        """The parameter (of one expert) as a view of its tensor; unpacked, if it is packed."""
        x = _unpacked(read, name) if self.packed else read(name)
        x = x.reshape(-1)[: math.prod(shape)]
        return x.reshape(shape[::-1]).T if self.transposed else x.reshape(shape)


def _unpacked(read: Read, name: str) -> np.ndarray:
    try:
        return mxfp4.unpack(read(f"{name}_packed"), read(f"{name}_scale"))
    except ValueError as error:
        raise ValueError(f"{name}_scale: {error}") from error


def entries(config: HybridConfig, model: HybridLM) -> list[Entry]:
    """How the published layout holds every parameter of the config's model, which may be abstract."""
    state = nnx.to_flat_state(nnx.state(model))
    return [_entry(config, path, variable.get_value()) for path, variable in state]


def _entry(config: HybridConfig, path: Path, value: jax.ShapeDtypeStruct) -> Entry:
    name, alias = _published(config, path)
    stack = "{expert}" in name
    shape = value.shape[1:] if stack else value.shape
    transposed = stack or path[-1] in ("kernel", "weight")
    shapes: tuple[Shape, ...]
    if path[-1] == "A_log":
        heads = shape[0]
        shapes = ((1, 1, heads, 1), (heads,), (-(-heads // A_LOG_LANES) * A_LOG_LANES,))
        shapes = shapes[::-1] if is_k3(config) else shapes
    elif path[-1] == "dt_bias":
        shapes = ((math.prod(shape),),)
    elif path[-1] == "weight":  # of a convolution
        shapes = ((shape[1], 1, shape[0]),)
    else:
        shapes = (shape[::-1] if transposed else shape,)
    packed = stack and config.moe is not None and config.moe.storage == "mxfp4"
    return Entry(path, value.shape, np.dtype(value.dtype), name, shapes, transposed, packed, alias)


def _published(config: HybridConfig, path: Path) -> tuple[str, str | None]:
    """The published name of a parameter, and one that transformers gives it."""
    prefix = "language_model." if is_k3(config) else ""
    if path[0] != "blocks":
        return prefix + TOP[".".join(map(str, path))], None
    layer = f"{prefix}model.layers.{path[1]}."
    name = ".".join(map(str, path[2:]))
    if name in LAYER:
        return layer + LAYER[name], None
    name = name.replace("mixer.", "self_attn.").replace(".kernel", ".weight").replace(".scale", ".weight")
    # transformers 5.24 saves the dense layers under the name of the sparse ones
    alias = layer + name.replace("mlp.", "block_sparse_moe.") if name.startswith("mlp.") else None
    return layer + name, alias
