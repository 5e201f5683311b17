"""Mixture of experts: a sigmoid router, experts as grouped products, shared experts, balance without a loss."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kda_jax.layers.inputs import check_inputs, zero_padding
from kda_jax.layers.mlp import Activation, GatedMLP, swiglu
from kda_jax.layers.norm import EPSILON
from kda_jax.layers.sizes import check_sizes
from kda_jax.ops.grouped_product import grouped_product
from kda_jax.ops.types import SegmentIds, state_dtype


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Sizes and choices of a `MixtureOfExperts`.

    Attributes:
      num_experts: routed experts E.
      top_k: experts a token is sent to.
      expert_width: hidden width F of an expert.
      shared_experts: experts that see every token, held as one of F times as many hidden channels; 0 for none.
      num_groups, top_groups: the experts stand in so many groups, of which a token may choose from so many.
      renormalize: divide the chosen scores by their sum.
      scaling: factor on the weights of the routed experts.
      latent_dim: width L that the routed experts work in, between two projections and before a norm (Kimi K3); None
        for the full width.
      storage: how a checkpoint holds the routed experts: "mxfp4", or None as the model holds them.

    Raises:
      ValueError: for a size out of range, naming the field.
    """

    num_experts: int
    top_k: int
    expert_width: int
    shared_experts: int = 0
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scaling: float = 1.0
    latent_dim: int | None = None
    storage: Literal["mxfp4"] | None = None

    def __post_init__(self) -> None:
        least = {"num_experts": 1, "top_k": 1, "expert_width": 1, "shared_experts": 0, "num_groups": 1, "top_groups": 1}
        check_sizes(self, {**least, "latent_dim": 1}, optional=("latent_dim",))
        if self.num_experts % self.num_groups:
            raise ValueError(f"MoEConfig.num_groups must divide {self.num_experts=}, got {self.num_groups}")
        if self.top_groups > self.num_groups:
            raise ValueError(f"MoEConfig.top_groups must be at most {self.num_groups=}, got {self.top_groups}")
        reachable = self.top_groups * (self.num_experts // self.num_groups)
        if self.top_k > reachable:
            raise ValueError(f"MoEConfig.top_k must be at most the {reachable} experts in reach, got {self.top_k}")
        if self.storage not in (None, "mxfp4"):
            raise ValueError(f'MoEConfig.storage must be None or "mxfp4", got {self.storage!r}')


class CorrectionBias(nnx.Variable):
    """What balances the experts: added to the scores for the choice alone; `balanced_bias` moves it, not gradients."""


def balanced_bias(bias: Float[Array, " E"], load: Int[Array, " E"], rate: float = 1e-3) -> Float[Array, " E"]:
    """bias + rate * sign(mean(load) - load): experts with less than the mean load become easier to choose.

    The auxiliary-loss-free balance of Wang et al. (arXiv 2408.15664), once after each training step.

    Args:
      bias: a router's correction bias.
      load: how many tokens of the step chose each expert.
      rate: step of the bias, in units of the score, which is in (0, 1).
    """
    load = load.astype(bias.dtype)
    return bias + rate * jnp.sign(jnp.mean(load) - load)


class Router(nnx.Module):
    """Which experts see a token, and with what weight, in float32:

        s = sigmoid(W x)        chosen: the top_k of s + bias        w = scaling * s / (sum of the chosen s + 1e-20)

    With groups, the choice is among the top_groups groups whose two best s + bias have the greatest sum.
    """

    def __init__(self, in_features: int, config: MoEConfig, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        shape = (in_features, config.num_experts)
        self.kernel = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape, param_dtype))
        self.bias = CorrectionBias(jnp.zeros(config.num_experts, jnp.float32))

    def __call__(self, x: Float[Array, "N D"]) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
        """The chosen experts of each token, and their weights."""
        dtype = state_dtype(x.dtype)
        # A product rounded to half precision would change the choice.
        scores = jax.nn.sigmoid(jnp.matmul(x.astype(dtype), self.kernel[...].astype(dtype), precision="highest"))
        choice = self._within_groups(scores + self.bias[...].astype(dtype)[None])
        _, experts = jax.lax.top_k(choice, self.config.top_k)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if self.config.renormalize:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return experts, weights * self.config.scaling

    def _within_groups(self, choice: Float[Array, "N E"]) -> Float[Array, "N E"]:
        """`choice` with -inf for the experts of the other groups."""
        groups = self.config.num_groups
        if groups == 1:
            return choice
        grouped = choice.reshape(len(choice), groups, -1)
        best = jnp.sum(jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
        _, kept = jax.lax.top_k(best, self.config.top_groups)
        allowed = jnp.any(kept[:, :, None] == jnp.arange(groups)[None, None], axis=1)
        return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


class Experts(nnx.Module):
    """E gated MLPs, each for a group of consecutive rows.

    Attributes:
      gate_proj, up_proj: [E, D, F].
      down_proj: [E, F, D].
    """

    def __init__(
        self,
        in_features: int,
        config: MoEConfig,
        *,
        activation: Activation,
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.activation, self.dtype = activation, dtype
        init = nnx.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
        count, width = config.num_experts, config.expert_width
        self.gate_proj = nnx.Param(init(rngs.params(), (count, in_features, width), param_dtype))
        self.up_proj = nnx.Param(init(rngs.params(), (count, in_features, width), param_dtype))
        self.down_proj = nnx.Param(init(rngs.params(), (count, width, in_features), param_dtype))

    def __call__(self, x: Float[Array, "M D"], sizes: Int[Array, " E"]) -> Float[Array, "M D"]:
        """The first sizes[0] rows through the first expert, the next sizes[1] through the second, and so on."""
        weights = (self.gate_proj[...], self.up_proj[...], self.down_proj[...])
        x, gate, up, down = nnx.nn.dtypes.promote_dtype((x, *weights), dtype=self.dtype)
        product = functools.partial(grouped_product, sizes=sizes)
        return product(self.activation(product(x, gate), product(x, up)), down)


class MixtureOfExperts(nnx.Module):
    """y = sum_{e chosen} w_e E_e(x) + shared(x) (Kimi Linear, section 4); no token is dropped, whatever the load.

    With `latent_dim`, the routed part is W_up RMSNorm(sum w_e E_e(W_down x)), its router still reads the full width.

    Args:
      in_features: width D of x and y.
      config: see `MoEConfig`.
      activation: of every expert.
      dtype, param_dtype: of the computation (by default that of x and the weights together) and of the weights. The
        router computes in float32, and its correction bias is float32.
    """

    def __init__(
        self,
        in_features: int,
        config: MoEConfig,
        *,
        activation: Activation = swiglu,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.in_features, self.config = in_features, config
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.router = Router(in_features, config, param_dtype=param_dtype, rngs=rngs)
        width = in_features if config.latent_dim is None else config.latent_dim
        self.experts = Experts(width, config, activation=activation, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        if config.latent_dim is not None:
            self.latent_down_proj, self.latent_up_proj = linear(in_features, width), linear(width, in_features)
            self.latent_norm = nnx.RMSNorm(width, epsilon=EPSILON, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        if config.shared_experts:
            self.shared = GatedMLP(
                in_features,
                config.shared_experts * config.expert_width,
                activation=activation,
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )

    def __call__(
        self, x: Float[Array, "B T D"], *, segment_ids: SegmentIds | None = None
    ) -> tuple[Float[Array, "B T D"], Int[Array, " E"]]:
        """The mixture, and the load: how many tokens chose each expert.

        Args:
          x: [B, T, in_features].
          segment_ids: [B, T] integers; 0 is padding: what stands there reaches no gradient and no load.

        Raises:
          ValueError: for a wrong shape.
        """
        check_inputs(x, self.in_features, segment_ids, None)
        x = zero_padding(x, segment_ids)
        tokens = x.reshape(-1, self.in_features)
        experts, weights = self.router(tokens)
        latent = tokens if self.config.latent_dim is None else self.latent_down_proj(tokens)
        y = self._routed(latent, experts, weights)
        y = y if self.config.latent_dim is None else self.latent_up_proj(self.latent_norm(y))
        y = y + self.shared(tokens) if self.config.shared_experts else y
        counted = jnp.ones(x.shape[:2], jnp.int32) if segment_ids is None else (segment_ids != 0).astype(jnp.int32)
        load = _count(experts, self.config.num_experts, jnp.repeat(counted.reshape(-1), self.config.top_k))
        return y.reshape(x.shape), load

    def _routed(
        self, x: Float[Array, "N L"], experts: Int[Array, "N k"], weights: Float[Array, "N k"]
    ) -> Float[Array, "N L"]:
        """sum_k weights[n, k] * expert experts[n, k] of x[n]: sort the copies by expert, multiply, sort back."""
        order = jnp.argsort(experts.reshape(-1), stable=True)
        sizes = _count(experts, self.config.num_experts)
        copies = _permute(jnp.repeat(x, self.config.top_k, axis=0), order)
        y = _permute(self.experts(copies, sizes), jnp.argsort(order))
        y = y.reshape(*experts.shape, y.shape[-1])
        return jnp.sum(y.astype(weights.dtype) * weights[..., None], axis=1).astype(y.dtype)


def _count(experts: Int[Array, "N k"], num_experts: int, each: Int[Array, " N*k"] | int = 1) -> Int[Array, " E"]:
    return jnp.zeros(num_experts, jnp.int32).at[experts.reshape(-1)].add(each)


def _permute(x: Float[Array, "M L"], order: Int[Array, " M"]) -> Float[Array, "M L"]:
    """x[order] for a permutation: that no index comes twice spares the gradient, a scatter, the atomic additions."""
    return x.at[order].get(unique_indices=True, mode="promise_in_bounds")
