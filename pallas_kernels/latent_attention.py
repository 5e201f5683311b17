"""Attention of one token to a cache of latents, each of which is read once for all heads.

    o_h = sum_s p_hs c_s[:R]        p_h = softmax_s(scale q_h^T c_s)        start <= s < stop

(Multi-head latent attention with the heads' projections moved to the queries' side: DeepSeek-V2, arXiv 2405.04434,
section 2.1; flash decoding.) A block takes one sequence, one of the equal parts of its places and up to 32 heads; it
keeps the largest score, the sum of the weights and the sum of the weighted latents, which `merge` brings together.

One warpgroup fetches latents ahead, another computes. Places are the rows of both products and heads the columns,

    scores [64 places, heads] = c q^T        o^T [R, heads] += c[:, :R]^T p

since wgmma wants 64 rows and takes as few as 8 columns: a model with 16 heads wastes nothing.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import memory
from pallas_kernels import registers as rg
from pallas_kernels.config import MULTIPROCESSORS
from pallas_kernels.within import iota, zeros

PLACES = rg.ROWS  # of the cache that a block takes at a time
HEADS = 32  # the most a block: with 512 channels their sums take half of the registers
COLUMNS = 8  # wgmma's columns come in eights
LEAST_STEPS = 4  # of a part
SHARED_MEMORY = 227 * 1024
STAGES = 4  # the most that help
f32 = jnp.float32


def latent_attention(
    q: jax.Array, latents: jax.Array, window: jax.Array, *, value_channels: int, scale: float, interpret: Any = None
) -> jax.Array:
    """o [B, H, R] in q's dtype; q [B, H, C], latents [B, S, C], window [B, 2] integers (start, stop); 0 for none.

    The inputs must be supported (`support.unsupported_latents_reason`).
    """
    (B, H, C), S = q.shape, latents.shape[1]
    heads = min(-(-H // COLUMNS) * COLUMNS, HEADS)
    groups = -(-H // heads)
    q = jnp.pad(q, ((0, 0), (0, groups * heads - H), (0, 0)))
    parts = number_of_parts(B * groups, S // PLACES)
    run = make_latent_attention(
        (B, groups, heads), (S, C), value_channels, q.dtype, parts=parts, scale=scale, interpret=interpret
    )
    return merge(*run(window, q, latents))[:, :H].astype(q.dtype)


def merge(o: jax.Array, largest: jax.Array, weight: jax.Array) -> jax.Array:
    """[B, H, R] of o [B, parts, groups, R, heads], largest and weight [B, parts, groups, heads], all float32."""
    share = jnp.exp2(largest - jnp.maximum(jnp.max(largest, 1, keepdims=True), jnp.finfo(f32).min))
    total = jnp.sum(share * weight, 1)
    o = jnp.einsum("bpgh,bpgrh->bghr", share, o, precision="highest") / jnp.where(total == 0, 1, total)[..., None]
    return o.reshape(o.shape[0], -1, o.shape[-1])


def number_of_parts(blocks: int, steps: int) -> int:
    """Of a sequence's places, so that `blocks` times as many keep all multiprocessors busy until about the end."""
    most = max(1, min(steps // LEAST_STEPS, 2 * MULTIPROCESSORS // blocks + 1))
    return min(range(1, most + 1), key=lambda parts: (-(-parts * blocks // MULTIPROCESSORS) / parts, parts))


def columns_a_tile(C: int) -> int:
    """Channels side by side in shared memory: the widest that divide them all."""
    return math.gcd(C, 64)


def stages(C: int, heads: int) -> int:
    """Steps whose latents shared memory holds at once, next to queries and weights; a kilobyte is for the rest."""
    return min((SHARED_MEMORY - 1024 - 2 * heads * (C + PLACES)) // (2 * C * PLACES), STAGES)


def make_latent_attention(
    queries: tuple[int, int, int],
    cache: tuple[int, int],
    R: int,
    dtype: Any,
    *,
    parts: int,
    scale: float,
    interpret: Any = None,
) -> Any:
    """The kernel (window [B, 2] int32, q [B, groups heads, C], latents [B, S, C]) -> o [B, parts, groups, R, heads],
    largest scale log2(e) score and sum of weights [B, parts, groups, heads], float32; `queries` is B, groups, heads.
    """
    (B, groups, heads), (_, C) = queries, cache
    ring = stages(C, heads)
    emulated = interpret is not None

    def kernel(window: Any, q: Any, latents: Any, o: Any, largest: Any, weight: Any, *scratch: Any) -> None:
        qs, tiles, weights, ready, full, free = scratch
        b, part, group = lax.axis_index("b"), lax.axis_index("p"), lax.axis_index("g")
        start, stop = window[b, 0], window[b, 1]
        first, last = lax.div(start, PLACES), lax.div(stop + PLACES - 1, PLACES)
        share = lax.div(last - first + parts - 1, parts)
        first += part * share
        steps = jnp.clip(last - first, 0, share)

        def across(x: jax.Array, rows: int) -> jax.Array:
            """x, a number for each head, in every row."""
            return lax.broadcast_in_dim(x, (rows, heads), (1,))

        def step(n: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            total, top, norm, s = carry
            plgpu.barrier_wait(full.at[s])

            def score(product: Any) -> jax.Array:
                plgpu.wgmma(product, tiles.at[s], qs.T)
                return product[...]

            scores = pl.run_scoped(score, plgpu.ACC((PLACES, heads), f32)) * (scale * math.log2(math.e))
            place = iota(0, heads) + (first + n) * PLACES
            scores = jnp.where((place >= start) & (place < stop), scores, jnp.full_like(scores, -jnp.inf))
            new_top = jnp.maximum(top, jnp.max(scores, 0))
            p, fading = jnp.exp2(scores - across(new_top, PLACES)), jnp.exp2(top - new_top)
            weights.T[...] = p.astype(dtype)
            plgpu.commit_smem()
            faded = total * across(fading, R)

            def weigh(sum_: Any) -> jax.Array:
                if not emulated:  # the interpreter cannot start from a value
                    sum_[...] = faded
                plgpu.wgmma(sum_, tiles.at[s, :, pl.ds(0, R)].T, weights.T)
                return sum_[...]

            total = pl.run_scoped(weigh, plgpu.ACC((R, heads), f32))
            plgpu.barrier_arrive(free.at[s])
            return (
                faded + total if emulated else total,
                new_top,
                norm * across(fading, PLACES) + p,
                jnp.where(s == ring - 1, 0, s + 1),
            )

        @pl.when(lax.axis_index("wg") == 1)
        def fetch() -> None:
            plgpu.copy_gmem_to_smem(q.at[b, pl.ds(group * heads, heads)], qs, ready)

            def load(n: jax.Array, s: jax.Array) -> None:
                rows = pl.ds((first + n) * PLACES, PLACES)
                plgpu.copy_gmem_to_smem(latents.at[b, rows], tiles.at[s], full.at[s])

            memory.load_ahead(steps, free, load, ring)

        @pl.when(lax.axis_index("wg") == 0)
        def compute() -> None:
            plgpu.barrier_wait(ready)
            lowest = plgpu.layout_cast(jnp.full((heads,), -jnp.inf, f32), rg.LAYOUT.reduce(0))
            total = plgpu.layout_cast(jnp.zeros((R, heads), f32), rg.LAYOUT)
            total, top, norm, _ = lax.fori_loop(0, steps, step, (total, lowest, zeros(heads), jnp.int32(0)))
            memory.store(o.at[b, part, group], total)
            memory.store(largest.at[b, part, group], top)
            memory.store(weight.at[b, part, group], jnp.sum(norm, 0))

    columns = columns_a_tile(C)
    numbers = jax.ShapeDtypeStruct((B, parts, groups, heads), f32)
    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((B, parts, groups, R, heads), f32), numbers, numbers],
        grid=(B, parts, groups),
        grid_names=("b", "p", "g"),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            memory.tile((heads, C), dtype, columns),
            memory.tile((ring, PLACES, C), dtype, columns),
            memory.tile((heads, PLACES), dtype, columns),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=ring),
            plgpu.Barrier(num_barriers=ring),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )
