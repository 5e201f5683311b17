"""One token of decoding in one kernel: a head's state is read once and written once, in place.

    S <- Diag(exp g) S        e = beta (v - S^T k)        S <- S + k e^T        o = scale S^T q

(Kimi Linear, arXiv 2510.26692, section 3.) Raw inputs are normalised and activated on the way, as in `kda_raw_step`.

A block is one warpgroup with all K rows of 32 or 64 columns of a state in its registers. A lane holds four columns of
8 to 16 rows, so a product with the state is a sum over registers, a shuffle or two and one exchange between the warps.
What the rows have in common is computed once a warp and handed round in shared memory. Blocks that share a
multiprocessor cover each other's waits for memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import memory
from pallas_kernels.activation import EPSILON, Activation, sigmoid

LANES, WARPS = 32, 4
LANE_COLUMNS = 4  # the most that Mosaic adds up over warps at once; 16 bytes of a float32 state
CHANNELS = plgpu.Layout.TILED(  # [32 n]: every warp has all of it
    plgpu.Tiling(((LANES,), (1,))), warp_dims=(plgpu.Replicated(WARPS),), lane_dims=(-2,), vector_dim=-1
)
f32 = jnp.float32


def columns_a_block(K: int, V: int) -> int:
    """64, or 32 where 64 do not divide V or would take more than half of the registers."""
    return 64 if V % 64 == 0 and K <= 128 else 32


def decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *decay: jax.Array,
    scale: float,
    activation: Activation | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """(o [B, HV, V] in v's dtype, new state [B, HV, K, V] in the old one's) of one token; shapes as in `kda_step`.

    With an `activation` the inputs are raw, and `decay` is A_log [HV], dt_bias [HV, K]. The inputs must be supported
    (`support.unsupported_step_reason`).
    """
    (B, H, K), (HV, V) = q.shape, v.shape[1:]
    width = columns_a_block(K, V)
    tile = _tile_layout(K, width)

    def load(ref: Any, layout: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(f32)

    def along(axis: int, x: jax.Array) -> jax.Array:
        """x as a function of the tile's row (0) or column (1)."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (K, width), (axis,)), tile)

    def kernel(q: Any, k: Any, v: Any, g: Any, beta: Any, *refs: Any) -> None:
        *decay, state, o, rows = refs
        b, h = lax.axis_index("b"), lax.axis_index("h")
        key_head, columns = lax.div(h, HV // H), pl.ds(lax.axis_index("c") * width, width)
        # the state first: its way from memory is the longest
        S, values = load(state.at[b, h, :, columns], tile), load(v.at[b, h, columns], tile.reduce(0))
        keys, queries, log_decay = (load(x, CHANNELS) for x in (k.at[b, key_head], q.at[b, key_head], g.at[b, h]))
        strength = beta[b, h].astype(f32)
        if activation:
            A_log, dt_bias = decay
            keys, queries = _l2_normalize(keys), _l2_normalize(queries)
            log_decay = _log_decay(log_decay + load(dt_bias.at[h], CHANNELS), jnp.exp(A_log[h].astype(f32)), activation)
            strength = activation.strength(strength)
        for i, x in enumerate((jnp.exp(log_decay), keys, scale * queries)):  # the same from every warp
            rows.at[i][...] = x
        plgpu.commit_smem()

        def row(i: int) -> jax.Array:  # from shared memory at every use: the registers belong to the state
            return along(0, load(rows.at[i], tile.reduce(1)))

        S = row(0) * S
        error = strength * (values - jnp.sum(row(1) * S, 0))
        S = S + row(1) * along(1, error)
        memory.store(state.at[b, h, :, columns], S.astype(state.dtype))
        memory.store(o.at[b, h, columns], jnp.sum(row(2) * S, 0).astype(o.dtype))

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(v.shape, v.dtype),
        grid=(B, HV, V // width),
        grid_names=("b", "h", "c"),
        scratch_types=[plgpu.SMEM((3, K), f32)],
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,  # every element of the state is read and written by the same lane
            reduction_scratch_bytes=WARPS * LANES * LANE_COLUMNS * 4,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )

    def update(refs: Any) -> None:
        o, state = refs
        o[...] = run(q, k, v, g, beta, *decay, state)  # an argument that is written is an output in the same place

    return pl.run_state(update)((jnp.empty_like(v), state))


def _tile_layout(K: int, width: int) -> Any:
    """[K, width]: a lane has four columns of adjacent rows, a warp a quarter of the rows."""
    rows = K * width // (WARPS * LANES * LANE_COLUMNS)
    tiling = plgpu.Tiling(((K, width), (K // WARPS, width), (rows, LANE_COLUMNS)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-6,), lane_dims=(-4, -3), vector_dim=-1)


def _l2_normalize(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x * x) + EPSILON)


def _log_decay(x: jax.Array, speed: jax.Array, activation: Activation) -> jax.Array:
    if activation.lower_bound is not None:
        return activation.lower_bound * sigmoid(speed * x)
    return -speed * (jnp.maximum(x, 0) + _log1p(jnp.exp(-jnp.abs(x))))


def _log1p(x: jax.Array) -> jax.Array:
    """log(1 + x) for x in [0, 1], to 2e-7 of it: 2 artanh(x / (2 + x)) as a series. Mosaic has no log1p."""
    s = x / (2 + x)
    series = (s * s) / 13 + 1 / 11
    for n in (9, 7, 5, 3, 1):
        series = series * (s * s) + 1 / n
    return 2 * s * series
