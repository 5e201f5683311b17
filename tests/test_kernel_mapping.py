"""One function on every device's batch rows and heads, wherever its inputs lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tolerances import assert_close

from pallas_kernels.mapping import over_batch_and_heads

B, T, H, M, K = 4, 6, 2, 3, 5


def run(_, q, v, marks):
    """Each value head v times its own key head and mark."""
    q = jnp.repeat(q, v.shape[2] // q.shape[2], axis=2)
    return (jnp.where(marks[..., None, None] > 0, q * v, 0),)


@pytest.mark.parametrize(
    ("values", "marks"),
    [
        (("data", None, "model"), ()),
        (("data", None, "model"), (None, "data")),
        (("data", None, "model"), ("model",)),
        (("model", None, "data"), ("data",)),
    ],
)
def test_inputs_that_lie_otherwise_than_the_first(rng, values, marks):
    """Whole on every device, or with an axis of devices that stands for the batch there and for tokens elsewhere."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    q, v = (rng.normal(size=(B, T, heads, K)).astype(np.float32) for heads in (H, H * M))
    valid = rng.integers(0, 2, (B, T))
    specs = ("data", None, "model"), values, marks
    placed = [
        jax.device_put(x, NamedSharding(mesh, PartitionSpec(*s))) for x, s in zip((q, v, valid), specs, strict=True)
    ]
    mapped = over_batch_and_heads(run, None, "b t h k, b t j k, b t", "b t j k", value_heads_a_head=M)
    assert_close(jax.jit(mapped)(*placed)[0], np.repeat(q, M, 2) * v * valid[..., None, None], 1e-6)
