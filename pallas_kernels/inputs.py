"""What the kernels read of a chunk in shared memory: q, k and exp(g), of activated or of raw inputs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import memory
from pallas_kernels import registers as rg
from pallas_kernels.activation import EPSILON, LOG2E, Activation
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
    float32; with `segments` also marks [B, 64 ceil(T / 64)] float32 (`Marks`); with `raw` also A_log [HV] and dt_bias
    [HV, K], both float32. bounded: every g >= -5.
    """

    q_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    dtype: Any
    bounded: bool
    raw: Raw | None = None
    segments: bool = False

    @property
    def chunks(self) -> int:
        return pl.cdiv(self.q_shape[1], CHUNK)

    @property
    def gate(self) -> Any:
        """The dtype of g."""
        return f32 if self.raw is None else self.raw.gate

    @property
    def arrays(self) -> int:
        """How many inputs there are."""
        return 5 + self.segments + 2 * (self.raw is not None)

    def split(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], Any, Sequence[Any]]:
        """q, k, v, g and beta; the marks, None where there are none; A_log and dt_bias."""
        return inputs[:5], inputs[5] if self.segments else None, inputs[5 + self.segments :]


class Marks(NamedTuple):
    """What `Packing.marks` says of a chunk's tokens: 0 for padding, which leaves the state as it is whatever it holds,
    1 where the state before the token is reset whatever its decay, 2 elsewhere.
    """

    rows: jax.Array  # [64] float32

    @classmethod
    def load(cls, ref: Any) -> "Marks":
        """Of a chunk's, [64] in global memory."""
        return cls(plgpu.load(ref, layout=rg.LAYOUT.reduce(1), optimized=False))

    def over(self, columns: int) -> jax.Array:
        return lax.broadcast_in_dim(self.rows, (CHUNK, columns), (0,))

    def clear(self, *refs: Any, channels: int, interpret: bool) -> None:
        """Zeros for the padding of 16-bit refs [64, n] in shared memory, `tile`s of so many channels; all warps and
        products see them behind a `commit_smem`.
        """
        memory.clear_rows(refs, self.over(8) == 0, channels, interpret=interpret)

    def keep(self, x: jax.Array) -> jax.Array:
        """x [64, n], 0 at padding."""
        return jnp.where(self.over(x.shape[1]) > 0, x, jnp.zeros_like(x))

    def decay(self, e: jax.Array, *, bounded: bool) -> jax.Array:
        """e = exp(g) [64, n], 1 at padding; 0 at resets, or 1 where `bounded` ones leave them to `Masks`."""
        mark = self.over(e.shape[1])
        return jnp.where(mark > 1, e, jnp.ones_like(e) if bounded else 1 - mark)


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
    problem: Problem,
    tokens: tuple[Any, Any, Any],
    first: jax.Array,
    marks: Marks | None,
    parameters: Parameters | None,
    *,
    interpret: bool,
) -> Reader:
    """The function of a slice of GROUP channels to q, k and exp(g) there, [64, GROUP] float32. tokens: q, k and g in
    shared memory, the first two without what padding holds; first: the chunk's first token. Raw inputs are normalised
    and activated on the way.
    """
    raw, (q, k, g) = problem.raw, tokens

    def marked(e: jax.Array) -> jax.Array:
        return e if marks is None else marks.decay(e, bounded=problem.bounded)

    if raw is None or parameters is None:
        return lambda cs: (
            *(load(x.at[:, cs]).astype(f32) for x in (q, k)),
            marked(jnp.exp2(load(g.at[:, cs]) * LOG2E)),
        )

    def read(cs: Any) -> tuple[jax.Array, ...]:
        bias = plgpu.load(parameters.bias.at[cs], layout=rg.LAYOUT.reduce(0), optimized=False)
        x = load(g.at[:, cs]).astype(f32) + lax.broadcast_in_dim(bias, (CHUNK, GROUP), (1,))
        decay = raw.activation.decay(x, parameters.speed, interpret=interpret)
        if raw.tokens % CHUNK and marks is None:
            decay = jnp.where(iota(0, GROUP) + first < raw.tokens, decay, jnp.ones_like(decay))
        q_, k_ = (load(x.at[:, cs]).astype(f32) * norm for x, norm in zip((q, k), parameters.norms, strict=True))
        return q_, k_, marked(decay)

    return read


def within_blocks(problem: Problem, marks: Marks | None, *, interpret: bool) -> Exact | Dense:
    """How scores inside blocks are formed."""
    if not problem.bounded:
        return Exact(problem.dtype)
    return Dense(problem.dtype, None if marks is None else Masks.of(marks.over(8) == 1, interpret=interpret))


def inverse_norms(*refs: Any) -> jax.Array:
    """Of every row of refs [64, n] side by side, as an array [64, GROUP]."""
    total = zeros(GROUP)
    for ref in refs:
        for start in range(0, ref.shape[1], GROUP):
            x = load(ref.at[:, pl.ds(start, GROUP)]).astype(f32)
            total = total + x * x
    return lax.broadcast_in_dim(lax.rsqrt(jnp.sum(total, axis=1) + EPSILON), total.shape, (0,))
