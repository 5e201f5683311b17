"""The kernels of sequences as one function of JAX, differentiable, mappable, partitioned over batch and heads."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from kda_jax.ops.chunk import kda_chunk
from kda_jax.ops.gates import Decay, l2_normalize, write_strength
from kda_jax.ops.packing import Alignment, Packing, align, plan_cu_seqlens, select_valid
from kda_jax.ops.types import RESULT_NAMES, Beta, Keys, LogDecay, Queries, State, Values
from pallas_kernels.activation import RAW_INERT, Activation
from pallas_kernels.backward import backward, unsupported_reason
from pallas_kernels.config import Config, default_config
from pallas_kernels.forward import forward
from pallas_kernels.inputs import CHUNK
from pallas_kernels.mapping import as_varying, over_batch_and_heads
from pallas_kernels.support import KEY_CHANNELS, VALUE_CHANNELS, filled_up

MARKS = "kda_marks"
# For policies of `jax.checkpoint`. Where `RESULT_NAMES` are saved, no kernel of the forward pass runs again; with these
# too, nothing before them.
RESIDUALS = ("kda_q", "kda_k", "kda_v", "kda_g", "kda_beta", "kda_initial_state", MARKS)
INTEGERS = ("n i", "b t")  # the axes of spans and of marks, which have no gradients


def kda_mosaic(
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecay,
    beta: Beta,
    *,
    scale: float,
    initial_state: State | None = None,
    packing: Packing | None = None,
    g_min: float | None = None,
    states_every: int = 0,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Kimi Delta Attention of activated inputs on Hopper (Kimi Linear, arXiv 2510.26692, section 3); the arguments
    are `kda_jax.kda`'s.

    The backward pass keeps the inputs alone, under the names of `RESIDUALS`: 4 K H / HV + 2 V + 4 K bytes a token and
    value head and those of beta (K = V = 128, as many key heads, beta in float32: 1284). Where
    `backward.unsupported_reason` gives a reason, it is that of the chunk form in XLA. With `segment_ids` the kernels
    also read, and the backward pass keeps, a mark a token (`Packing.marks`), by which they leave out padding and reset
    the state, whatever `g_min` is; with `cu_seqlens` the tokens are copied to where each sequence begins a chunk. Other
    numbers of channels than the kernels' are filled up with zeros. q, k and v of float32 are rounded to bfloat16, whose
    accuracy the results then have; so have the gradients of float16 inputs (`backward`).

    Args:
      states_every: also return the state after every so many tokens, a multiple of 64, but with `cu_seqlens`; gradients
        are then those of the chunk form.
      config: tuning; by default that of the shape on each device.
      interpret: `plgpu.InterpretGPUParams` to emulate the kernels on a CPU.

    Returns:
      o [B, T, HV, V] in v's dtype; final state [N, HV, K, V] float32; with `states_every` the states [B, ceil(T /
      states_every), HV, K, V] float32, the last of them after all tokens.
    """
    every, rest = divmod(states_every, CHUNK)
    if rest or every < 0:
        raise ValueError(f"states_every must be 0 or a multiple of {CHUNK}, got {states_every}")
    if every and packing is not None and packing.cu_seqlens is not None:
        raise ValueError(f"states_every must be 0 with cu_seqlens, got {states_every}")
    static = _Static(float(scale), g_min, config, interpret, every=every)
    return _run_packed(static, packing, (q, k, v, g.astype(jnp.float32), beta), initial_state)


def kda_raw_mosaic(
    q: Queries,
    k: Keys,
    v: Values,
    g_raw: LogDecay,
    beta_raw: Beta,
    decay: Decay,
    *,
    scale: float,
    negative_eigenvalues: bool = False,
    initial_state: State | None = None,
    packing: Packing | None = None,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """`kda_mosaic` of a layer's raw projections, normalised and activated inside the kernel; the arguments are
    `kda_jax.kda_raw`'s.

    So are those of the backward pass, which keeps the raw ones alone; its kernels give their gradients and those of the
    decay's parameters. Packed inputs without backward kernels are activated in XLA.
    """
    activation = Activation(decay.lower_bound, bool(negative_eigenvalues))
    static = _Static(float(scale), decay.lower_bound, config, interpret, activation=activation)
    inputs, parameters = (q, k, v, g_raw, beta_raw), (decay.A_log, decay.dt_bias)
    if packing is not None and unsupported_reason(scale) is not None:
        activated = _activate(activation, select_valid(packing, *inputs), parameters)
        options: dict[str, Any] = {"g_min": decay.lower_bound, "config": config, "interpret": interpret}
        return kda_mosaic(*activated, scale=scale, initial_state=initial_state, packing=packing, **options)
    return _run_packed(static, packing, inputs, initial_state, *parameters)


class _Static(NamedTuple):
    scale: float
    g_min: float | None
    config: Config | None
    interpret: Any
    has_state: bool = False
    packed: bool = False  # the only row holds several sequences, the next input their spans
    segments: bool = False  # rows hold several sequences one after another, the next input their marks
    activation: Activation | None = None  # the inputs are raw, the last two the decay's parameters
    every: int = 0  # chunks from one returned state to the next

    def axes(self) -> tuple[str, str]:
        """Of the inputs and of the outputs, for `over_batch_and_heads`."""
        state = "n j k v" if self.packed else "b j k v"
        inputs = "b t h k, b t h k, b t j v, b t j k, b t j" + f", {state}" * self.has_state
        inputs += ", n i" * self.packed + ", b t" * self.segments + ", j, j k" * (self.activation is not None)
        return inputs, f"b t j v, {state}" + ", b c j k v" * (self.every > 0)

    def gradients(self) -> str:
        """The axes of the gradients of the inputs, integers excepted; the parameters' row by row, so that rows can be
        anywhere.
        """
        rows = {"j": "b j", "j k": "b j k"}
        return ", ".join(rows.get(axes, axes) for axes in self.axes()[0].split(", ") if axes not in INTEGERS)

    def split(self, inputs: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], Any, Any, list[jax.Array]]:
        """The arrays of tokens, with marks the sixth; the initial state and the spans, None where there are none; the
        decay's parameters.
        """
        more = list(inputs[5:])
        state = more.pop(0) if self.has_state else None
        spans = more.pop(0) if self.packed else None
        return (*inputs[:5], *(more.pop(0) for _ in range(self.segments))), state, spans, more


def _run_packed(
    static: _Static, packing: Packing | None, tokens: tuple[jax.Array, ...], state: jax.Array | None, *more: jax.Array
) -> tuple[jax.Array, ...]:
    """`_run` with the marks of segments; with `cu_seqlens`, of tokens moved to where each sequence begins a chunk."""
    if packing is None:
        return _run(static, tokens, state, *more)
    if packing.cu_seqlens is None or packing.slot is None:
        marks = checkpoint_name(packing.marks(), MARKS)
        return _run(static._replace(segments=True), tokens, state, marks, *more)
    q, _, v, *_ = tokens
    alignment = align(packing.cu_seqlens, packing.slot, CHUNK)
    between = (0, 0, 0, 0 if static.activation is None else RAW_INERT, 0)
    tokens = tuple(_gather(fill, x, alignment) for x, fill in zip(tokens, between, strict=True))
    spans = alignment.spans.astype(jnp.int32)
    if state is None:  # without, all gradients would be rows, which vmap may join
        state = jnp.zeros((spans.shape[0], *v.shape[2:3], *q.shape[3:], *v.shape[3:]), jnp.float32)
    o, final_state = _run(static._replace(packed=True), tokens, state, spans, *more)
    return _restore(o, alignment), final_state


# Each is the other's adjoint; XLA's own are scatters, which take three to seven times as long.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(between: float, x: jax.Array, alignment: Alignment) -> jax.Array:
    return alignment.gather(x, between)


@jax.custom_vjp
def _restore(x: jax.Array, alignment: Alignment) -> jax.Array:
    return alignment.restore(x)


_gather.defvjp(
    lambda between, x, alignment: (_gather(between, x, alignment), alignment),
    lambda _, alignment, dy: (_restore(dy, alignment), None),
)
_restore.defvjp(
    lambda x, alignment: (_restore(x, alignment), alignment), lambda alignment, dy: (_gather(0, dy, alignment), None)
)


def _run(
    static: _Static, tokens: tuple[jax.Array, ...], state: jax.Array | None, *more: jax.Array
) -> tuple[jax.Array, ...]:
    """`_kda` of any numbers of channels: zeros fill them up, in `more` those of dt_bias."""
    q, k, v, g, beta = tokens
    K, V = q.shape[-1], v.shape[-1]
    keys, values = filled_up(K, KEY_CHANNELS) - K, filled_up(V, VALUE_CHANNELS) - V

    def fill(x: jax.Array, *channels: int) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - len(channels)) + [(0, n) for n in channels]) if any(channels) else x

    inputs = [fill(q, keys), fill(k, keys), fill(v, values), fill(g, keys), beta]
    inputs += [] if state is None else [fill(state, keys, values)]
    inputs += [fill(x, keys) if x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.floating) else x for x in more]
    named = 5 + (state is not None)
    inputs[:named] = [checkpoint_name(x, name) for x, name in zip(inputs[:named], RESIDUALS, strict=False)]
    # All inputs vary over the same axes of a `shard_map`, so that their gradients do.
    varying = as_varying(tuple(inputs), tuple(inputs))
    results = _kda(static._replace(has_state=state is not None), *varying)
    o, *states = (checkpoint_name(x, name) for x, name in zip(results, RESULT_NAMES, strict=False))
    return o[..., :V], *(S[..., :K, :V] for S in states)


def _mapped(run: Any, static: _Static, arrays: str, results: str, inputs: tuple[jax.Array, ...]) -> Any:
    mapped = over_batch_and_heads(
        run,
        static,
        arrays,
        results,
        value_heads_a_head=inputs[2].shape[2] // inputs[0].shape[2],
        partition=static.interpret is None,  # its callbacks have effects, which a partitioning rule does not take
    )
    return as_varying(mapped(*inputs), inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(static: _Static, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    return _mapped(_local, static, *static.axes(), inputs)


def _kda_forward(static: _Static, *inputs: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    return _kda(static, *inputs), inputs


def _kda_backward(
    static: _Static, inputs: tuple[jax.Array, ...], cotangents: tuple[jax.Array, ...]
) -> tuple[jax.Array | None, ...]:
    if not static.every and unsupported_reason(static.scale) is None:
        arrays = ", ".join(static.axes())
        gradients = list(_mapped(_local_backward, static, arrays, static.gradients(), (*inputs, *cotangents)))
        if static.activation is not None:
            gradients[-2:] = [dx.sum(0).astype(x.dtype) for dx, x in zip(gradients[-2:], inputs[-2:], strict=True)]
    else:
        gradients = _chunk_form_gradients(static, inputs, cotangents)
    left = iter(gradients)
    return tuple(None if axes in INTEGERS else next(left) for axes in static.axes()[0].split(", "))


_kda.defvjp(_kda_forward, _kda_backward)


def _chunk_form_gradients(
    static: _Static, inputs: tuple[jax.Array, ...], cotangents: tuple[jax.Array, ...]
) -> list[jax.Array]:
    tokens, state, spans, parameters = static.split(inputs)
    packing = None
    if spans is not None:
        ends = CHUNK * (spans[:, 0] + spans[:, 1])
        packing = plan_cu_seqlens(jnp.pad(ends, (1, 0)), tokens[2].shape[1])
    for marks in tokens[5:]:
        packing = Packing(marks > 0, marks == 1)

    def chunk_form(tokens: Any, state: jax.Array | None, parameters: Any) -> tuple[jax.Array, ...]:
        q, k, v, g, beta = tokens if static.activation is None else _activate(static.activation, tokens, parameters)
        if state is None:
            sequences = v.shape[0] if spans is None else spans.shape[0]
            state = jnp.zeros((sequences, v.shape[2], q.shape[3], v.shape[3]), jnp.float32)
        options: dict[str, Any] = {"scale": static.scale, "g_min": static.g_min, "packing": packing}
        o, final_state, states = kda_chunk(q, k, v, g, beta, initial_state=state, **options)
        if not static.every:
            return o, final_state
        chunks = states.shape[1]
        ends = jnp.minimum(static.every * (1 + jnp.arange(-(-chunks // static.every))), chunks)
        return o, final_state, states[:, ends - 1]

    return jax.tree.leaves(jax.vjp(chunk_form, tokens[:5], state, parameters)[1](cotangents))


def _activate(activation: Activation, tokens: tuple[jax.Array, ...], parameters: Sequence[jax.Array]) -> Any:
    """The activated tokens of raw ones and A_log, dt_bias."""
    (q, k, v, g, beta), (A_log, dt_bias) = tokens, parameters
    decay = Decay(A_log, dt_bias, activation.lower_bound)
    strength = write_strength(beta, activation.negative_eigenvalues)
    return l2_normalize(q), l2_normalize(k), v, decay(g), strength


def _local(static: _Static, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    """The forward pass of one device."""
    options = _options(static, inputs)
    return forward(*static.split(inputs), every=static.every, **options)


def _local_backward(static: _Static, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The backward pass of one device."""
    *inputs, do, dstate = arrays
    tokens, state, spans, decay = static.split(tuple(inputs))
    options = _options(static, arrays)
    return backward(tokens, state, (do, dstate), spans, decay, **options)


def _options(static: _Static, arrays: tuple[jax.Array, ...]) -> dict[str, Any]:
    B, T, HV, V = arrays[2].shape
    _, state, *_ = static.split(arrays)
    sequences = B if state is None else state.shape[0]
    config = static.config or default_config(sequences * HV, arrays[0].shape[3], V, -(-T // CHUNK))
    names = "scale", "g_min", "activation", "interpret"
    return {"config": config, **{name: getattr(static, name) for name in names}}
