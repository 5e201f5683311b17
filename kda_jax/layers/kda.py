"""The Kimi Delta Attention layer, and with other choices in its `MixerConfig` the mixers it is compared with."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kda_jax.layers.cache import DeltaCache
from kda_jax.layers.conv import ShortConvolution
from kda_jax.layers.inputs import check_inputs, zero_padding
from kda_jax.layers.mixer import KDA, MixerConfig, init_decay
from kda_jax.layers.norm import GatedRMSNorm
from kda_jax.ops.api import kda_raw
from kda_jax.ops.decode import kda_raw_step
from kda_jax.ops.gates import Decay, l2_normalize, write_strength
from kda_jax.ops.linear import linear_attention
from kda_jax.ops.types import SegmentIds, state_dtype

NO_DECAY = -1e30  # the raw decay whose activation is exactly 0, and so is its gradient


class KimiDeltaAttention(nnx.Module):
    """The token mixer of Kimi Linear (arXiv 2510.26692, section 4):

        y       = W_o (RMSNorm_head(o) * sigmoid(W_g x)),  o = KDA(q, k, v, g, beta)
        q, k, v = silu(conv(W x))                   then L2-normalised q and k
        g       = -exp(A_log) softplus(W_fb W_fa x + dt_bias)       one log decay a key channel, W_fa of rank head_dim
        beta    = sigmoid(W_b x)                    one write strength a value head
        W_g     = W_gb W_ga                         of rank head_dim

    and no bias anywhere. `mixer` chooses variants of each part.

    Args:
      in_features: width of x and y.
      num_heads: query and key heads H.
      head_dim: key channels K of a head, and value channels unless `mixer.value_dim` says otherwise.
      num_value_heads: HV, a multiple of H, by default H; value head j reads key head j // (HV // H).
      mixer: the layer's choices; `mixer_config(name)` gives the named ones.
      dtype: of the computation, by default that of x and the weights together; decay, beta and state stay float32.
      param_dtype: of the weights, except A_log and dt_bias, which are float32, and what `mixer` holds in float32.
      implementation: of the KDA operator over sequences, see `kda_jax.kda`; None, as for single tokens, is the best
        supported.

    Raises:
      ValueError: for a size that is not positive, a `num_value_heads` that H does not divide, or an `implementation`
        for a mixer that is not KDA.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        head_dim: int,
        *,
        num_value_heads: int | None = None,
        mixer: MixerConfig = KDA,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        implementation: str | Sequence[str] | None = None,
        rngs: nnx.Rngs,
    ):
        for name, value in {"in_features": in_features, "num_heads": num_heads, "head_dim": head_dim}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        value_heads = num_heads if num_value_heads is None else num_value_heads
        if value_heads < 1 or value_heads % num_heads:
            raise ValueError(f"num_value_heads must be a multiple of {num_heads=}, got {num_value_heads}")
        if implementation is not None and not mixer.is_kda:
            raise ValueError(f"implementation chooses among KDA's, which {mixer} is not; got {implementation!r}")
        value_dim = head_dim if mixer.value_dim is None else mixer.value_dim
        self.in_features, self.num_heads, self.head_dim = in_features, num_heads, head_dim
        self.num_value_heads, self.value_dim = value_heads, value_dim
        self.mixer, self.dtype, self.param_dtype, self.implementation = mixer, dtype, param_dtype, implementation

        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        taps_dtype = jnp.float32 if mixer.float32_taps else param_dtype
        convolution = functools.partial(
            ShortConvolution, width=mixer.conv_width, dtype=dtype, param_dtype=taps_dtype, rngs=rngs
        )
        keys, values = num_heads * head_dim, value_heads * value_dim
        self.q_proj, self.k_proj, self.v_proj = (
            linear(in_features, keys),
            linear(in_features, keys),
            linear(in_features, values),
        )
        self.q_conv, self.k_conv, self.v_conv = convolution(keys), convolution(keys), convolution(values)
        small = nnx.initializers.normal(0.02)  # the published deviation: at first dt_bias alone sets the decay
        if mixer.decay == "channel":
            self.f_a_proj = linear(in_features, head_dim)
            self.f_b_proj = linear(head_dim, value_heads * head_dim, kernel_init=small)
        elif mixer.decay == "head":
            self.f_proj = linear(in_features, value_heads, kernel_init=small)
        if mixer.decay is not None:
            channels = head_dim if mixer.decay == "channel" else 1
            A_log, dt_bias = init_decay(rngs.params(), value_heads, channels, mixer)
            self.A_log, self.dt_bias = nnx.Param(A_log), nnx.Param(dt_bias)
        if mixer.write == "sigmoid":
            self.b_proj = linear(in_features, value_heads)
        if mixer.output_gate == "low_rank":
            self.g_a_proj, self.g_b_proj = linear(in_features, head_dim), linear(head_dim, values)
        elif mixer.output_gate == "full":
            self.g_proj = linear(in_features, values)
        activation = {"sigmoid": jax.nn.sigmoid, "silu": jax.nn.silu}[mixer.gate_activation]
        self.o_norm = GatedRMSNorm(value_dim, activation=activation, param_dtype=taps_dtype, rngs=rngs)
        self.o_proj = linear(values, in_features)

    def init_cache(self, batch_size: int, capacity: int | None = None) -> DeltaCache:
        """The cache before the first token. Its size does not depend on `capacity`, which attention layers need."""
        del capacity
        dtype = self.param_dtype if self.dtype is None else self.dtype
        tails = tuple(conv.init_tail(batch_size, dtype) for conv in (self.q_conv, self.k_conv, self.v_conv))
        shape = (batch_size, self.num_value_heads, self.head_dim, self.value_dim)
        return DeltaCache(tails, jnp.zeros(shape, state_dtype(dtype)))

    def __call__(
        self, x: Float[Array, "B T D"], *, segment_ids: SegmentIds | None = None, cache: DeltaCache | None = None
    ) -> tuple[Float[Array, "B T D"], DeltaCache]:
        """The mixed tokens and the cache after them: one call for training, prefill, its continuation and decoding.

        Args:
          x: [B, T, in_features].
          segment_ids: [B, T] integers; equal ids are one sequence, 0 is padding: its output is 0, the cache ignores it.
          cache: what precedes the row's first sequence, None for nothing; the result belongs to the row's last one.

        Raises:
          ValueError: for a wrong shape.
        """
        check_inputs(x, self.in_features, segment_ids, cache)
        x = zero_padding(x, segment_ids)
        cache = self.init_cache(x.shape[0]) if cache is None else cache
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        convolutions = (self.q_conv, self.k_conv, self.v_conv)
        convolved = [c(p, t, segment_ids) for c, p, t in zip(convolutions, projected, cache.tails, strict=True)]
        (q, k, v), tails = zip(*convolved, strict=True)
        q, k = (y.reshape(*x.shape[:2], self.num_heads, self.head_dim) for y in (q, k))
        v = v.reshape(*x.shape[:2], self.num_value_heads, self.value_dim)
        attend = self._kda if self.mixer.is_kda else self._linear_attention
        o, state = attend(x, q, k, v, cache.state, segment_ids)
        y = self.o_norm(o, self._output_gate(x))
        y = self.o_proj(y.reshape(*x.shape[:2], self.num_value_heads * self.value_dim))
        return y, DeltaCache(tails, state.astype(cache.state.dtype))

    def _kda(self, x, q, k, v, state, segment_ids):
        """The KDA operator on raw projections; a single token takes the step."""
        g_raw, beta_raw = self._decay_projection(x), self.b_proj(x)
        decay = Decay(self.A_log[...], self.dt_bias[...], self.mixer.lower_bound)
        reflect = self.mixer.negative_eigenvalues
        if x.shape[1] == 1:
            if segment_ids is not None:  # padding has k = 0, so its state stays; no select reads the old state after
                valid = segment_ids[:, :, None, None] != 0
                g_raw = jnp.where(valid, g_raw.astype(state_dtype(g_raw.dtype)), NO_DECAY)
            q, k, v, g_raw, beta_raw = (y[:, 0] for y in (q, k, v, g_raw, beta_raw))
            o, state = kda_raw_step(q, k, v, g_raw, beta_raw, decay, state, negative_eigenvalues=reflect)
            return o[:, None] if segment_ids is None else jnp.where(valid, o[:, None], 0), state
        return kda_raw(
            q,
            k,
            v,
            g_raw,
            beta_raw,
            decay,
            negative_eigenvalues=reflect,
            initial_state=state,
            segment_ids=segment_ids,
            chunk_size=self.mixer.chunk_size,
            implementation=self.implementation,
        )

    def _linear_attention(self, x, q, k, v, state, segment_ids):
        """The comparison family, on activated inputs."""
        mixer, g = self.mixer, None
        if mixer.decay is not None:
            raw = self._decay_projection(x)
            g = Decay(self.A_log[...], self.dt_bias[...], mixer.lower_bound)(raw)
            g = g[..., 0] if mixer.decay == "head" else g
        if mixer.write == "dt":
            beta = jax.nn.softplus(raw[..., 0].astype(state_dtype(x.dtype)) + self.dt_bias[...][None, None, :, 0])
        else:
            beta = write_strength(self.b_proj(x), mixer.negative_eigenvalues)
        if mixer.normalize:
            q, k = l2_normalize(q), l2_normalize(k)
        return linear_attention(
            q,
            k,
            v,
            g,
            beta,
            delta_rule=mixer.delta_rule,
            initial_state=state,
            segment_ids=segment_ids,
            chunk_size=mixer.chunk_size,
        )

    def _decay_projection(self, x: Float[Array, "B T D"]) -> Float[Array, "B T HV K"]:
        """The raw decay, with one channel for a decay per head."""
        raw = self.f_b_proj(self.f_a_proj(x)) if self.mixer.decay == "channel" else self.f_proj(x)
        return raw.reshape(*x.shape[:2], self.num_value_heads, raw.shape[-1] // self.num_value_heads)

    def _output_gate(self, x: Float[Array, "B T D"]) -> Float[Array, "B T HV V"] | None:
        if self.mixer.output_gate is None:
            return None
        gate = self.g_proj(x) if self.mixer.output_gate == "full" else self.g_b_proj(self.g_a_proj(x))
        return gate.reshape(*x.shape[:2], self.num_value_heads, self.value_dim)
