"""A training step: what the backward pass keeps, and which kernels run in a recomputed, mapped and sharded one."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_policies
from jax.sharding import PartitionSpec
from lowering import lower

from kda_jax.models import HybridConfig, HybridLM
from kda_jax.ops.types import RESULT_NAMES
from pallas_kernels import support, vjp

B, T, H, HV, K, V = 2, 128, 2, 4, 64, 128
FORWARD, BACKWARD = 2, 3  # kernels


def shapes(B=B):
    def half(*shape):
        return jax.ShapeDtypeStruct((B, *shape), jnp.bfloat16)

    keys, f32 = half(T, H, K), jnp.float32
    gate, beta = jax.ShapeDtypeStruct((B, T, HV, K), f32), jax.ShapeDtypeStruct((B, T, HV), f32)
    return keys, keys, half(T, HV, V), gate, beta


def attend(*x):
    return vjp.kda_mosaic(*x, scale=1.0)[0]


def test_bytes_that_the_backward_pass_keeps():
    _, pull = jax.eval_shape(lambda *x: jax.vjp(attend, *x), *shapes())
    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))
    assert kept == B * T * HV * (4 * K * H // HV + 2 * V + 4 * K + 4)


def loss(policy, *x):
    """Two layers, recomputed as the policy says; after each the result goes through what is not linear."""
    q, k, v, g, beta = x
    layer = jax.checkpoint(lambda v: jnp.tanh(attend(q, k, v, g, beta)), policy=policy)
    return layer(layer(v)).astype(jnp.float32).sum()


POLICIES = {  # and how often each layer's forward pass runs again
    "inputs and outputs": (checkpoint_policies.save_only_these_names(*vjp.RESIDUALS, *RESULT_NAMES), 0),
    "outputs": (checkpoint_policies.save_only_these_names(*RESULT_NAMES), 0),
    "inputs": (checkpoint_policies.save_only_these_names(*vjp.RESIDUALS), 1),
    "nothing": (None, 1),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_recomputed_mapped_sharded_step_runs_on_the_kernels(name):
    policy, again = POLICIES[name]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    heads = PartitionSpec(None, "data", None, "model")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(heads,) * 5, out_specs=PartitionSpec(), check_vma=True)
    def step(*x):
        return jax.lax.psum(jax.vmap(functools.partial(loss, policy))(*x).sum(), ("data", "model"))

    specs = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in shapes()]
    traced = jax.jit(jax.value_and_grad(step, argnums=range(5))).trace(*specs)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2 * ((1 + again) * FORWARD + BACKWARD)


def test_a_recomputed_model_runs_the_forward_kernels_once(monkeypatch):
    monkeypatch.setattr(support, "_unsupported_device", lambda: None)
    config = HybridConfig(
        vocab_size=32,
        width=64,
        num_heads=1,
        head_dim=64,
        pattern=("kda",),
        num_layers=2,
        remat=True,
        dtype=jnp.bfloat16,
    )
    graph, weights = nnx.split(nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0))))

    def mean_logit(weights, tokens):
        return nnx.merge(graph, weights)(tokens)[0].mean()

    text = lower(jax.grad(mean_logit), (weights, jax.ShapeDtypeStruct((1, T), jnp.int32)))
    assert text.count("custom_call @mosaic_gpu") == 2 * (FORWARD + BACKWARD)
