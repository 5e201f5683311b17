"""The layers as Flax Linen modules: the same parameters, under `init` and `apply`.

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            y, cache = linen.KimiDeltaAttention(64, num_heads=2, head_dim=32)(x)
            return nn.Dense(10)(y)

Arguments are those of the NNX layer without `rngs`, and Linen's `name`. The parameters are the collection "params",
in the NNX layer's tree. A cache is an argument and a result here too, not a collection.
"""

import functools

from flax import nnx

from kda_jax.layers import attention, kda, mla

KimiDeltaAttention = functools.partial(nnx.bridge.to_linen, kda.KimiDeltaAttention)
Attention = functools.partial(nnx.bridge.to_linen, attention.Attention)
LatentAttention = functools.partial(nnx.bridge.to_linen, mla.LatentAttention)
