"""What the kernels read of a chunk in shared memory: q, k and exp(g), of activated or of raw inputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kda_jax.ops.gates import G_MIN_LOWEST
from pallas_kernels import registers as rg
from pallas_kernels.activation import EPSILON, LOG2E, RAW_RESET, RESET, Activation
from pallas_kernels.within import Dense, Exact, Masks, iota, zeros

CHUNK = rg.ROWS
GROUP = 32  # channels a pass over the scores: what the registers hold
f32 = jnp.float32
COMPILER_PARAMS = plgpu.CompilerParams(
    unsafe_no_auto_barriers=True,
    approx_math=True,
    reduction_scratch_bytes=0,  # all sums stay within a warp
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)


class Raw(NamedTuple):
    """What the kernels know of raw inputs. tokens: behind them the state stays as it is, whatever zeros decay to."""

    activation: Activation
    gate: Any  # the dtype of g_raw
    tokens: int


class Problem(NamedTuple):
    """What a forward kernel is made for: q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K] float32, beta [B, T, HV]
    float32. With `raw` two more inputs, A_log [HV] and dt_bias [HV, K], both float32. bounded: every g >= -5, but where
    with `resets` the state before a token is reset.
    """

    q_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    dtype: Any
    bounded: bool
    raw: Raw | None = None
    resets: bool = False

    @property
    def chunks(self) -> int:
        return pl.cdiv(self.q_shape[1], CHUNK)

    @property
    def masked(self) -> bool:
        """Whether resets are left to masks, and every decay is bounded."""
        return self.bounded and self.resets

    @property
    def gate(self) -> Any:
        """The dtype of g."""
        return f32 if self.raw is None else self.raw.gate

    @property
    def arrays(self) -> int:
        """How many inputs there are."""
        return 5 if self.raw is None else 7


class Parameters(NamedTuple):
    """What raw inputs of a chunk are activated with: exp(A_log), dt_bias [K] in shared memory, and the inverse norms of
    q's and k's rows.
    """

    speed: jax.Array
    bias: Any
    norms: tuple[jax.Array, jax.Array]


def load(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=rg.LAYOUT)


Reader = Callable[[Any], tuple[jax.Array, ...]]


def reader(
    problem: Problem, q: Any, k: Any, g: Any, first: jax.Array, parameters: Parameters | None, *, interpret: bool
) -> Reader:
    """The function of a slice of GROUP channels to q, k and exp(g) there, [64, GROUP] float32; first: the chunk's first
    token. Raw inputs are normalised and activated on the way.
    """
    raw = problem.raw
    if raw is None or parameters is None:

        def log_decay(cs: Any) -> jax.Array:
            x = load(g.at[:, cs])
            return jnp.maximum(x, G_MIN_LOWEST) if problem.masked else x

        return lambda cs: (*(load(x.at[:, cs]).astype(f32) for x in (q, k)), jnp.exp2(log_decay(cs) * LOG2E))

    resets = problem.resets and not problem.masked

    def read(cs: Any) -> tuple[jax.Array, ...]:
        bias = plgpu.load(parameters.bias.at[cs], layout=rg.LAYOUT.reduce(0), optimized=False)
        x = load(g.at[:, cs]).astype(f32) + lax.broadcast_in_dim(bias, (CHUNK, GROUP), (1,))
        decay = raw.activation.decay(x, parameters.speed, resets=resets, interpret=interpret)
        if raw.tokens % CHUNK:
            decay = jnp.where(iota(0, GROUP) + first < raw.tokens, decay, jnp.ones_like(decay))
        return *(load(x.at[:, cs]).astype(f32) * norm for x, norm in zip((q, k), parameters.norms, strict=True)), decay

    return read


def within_blocks(problem: Problem, g: Any, *, interpret: bool) -> Exact | Dense:
    """How scores inside blocks are formed; g: the chunk's, in shared memory, of GROUP channels or more."""
    if not problem.bounded:
        return Exact(problem.dtype)
    if not problem.masked:
        return Dense(problem.dtype)
    x = load(g.at[:, pl.ds(0, GROUP)])[:, :8].astype(f32)  # a reset is one in every channel that fills up none
    is_reset = x < RESET / 2 if problem.raw is None else x > RAW_RESET / 2
    return Dense(problem.dtype, Masks.of(is_reset, interpret=interpret))


def inverse_norms(*refs: Any) -> jax.Array:
    """Of every row of refs [64, n] side by side, as an array [64, GROUP]."""
    total = zeros(GROUP)
    for ref in refs:
        for start in range(0, ref.shape[1], GROUP):
            x = load(ref.at[:, pl.ds(start, GROUP)]).astype(f32)
            total = total + x * x
    return lax.broadcast_in_dim(lax.rsqrt(jnp.sum(total, axis=1) + EPSILON), total.shape, (0,))
