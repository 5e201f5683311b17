"""The kernels as one function: gradients, vmap, shard_map and partitioning, with the chunk form in the kernels'
place.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from reference import kda as oracle
from reference import kda_raw as raw_oracle
from tolerances import assert_close

from kda_jax import Decay
from kda_jax.ops.chunk import kda_chunk
from kda_jax.ops.packing import Packing, plan_cu_seqlens, plan_segments
from pallas_kernels import mapping, vjp
from pallas_kernels.backward import unsupported_reason
from pallas_kernels.inputs import CHUNK

B, T, H, HV, K, V = 2, 70, 2, 4, 8, 16
SCALE = K**-0.5


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """The kernels' signature, any backend and any channels."""

    def forward(inputs, initial_state, sequences, decay, *, scale, g_min, activation, every, config, interpret):
        assert activation is None
        q, k, v, g, beta, *marks = inputs
        if initial_state is None:
            initial_state = jnp.zeros((v.shape[0], v.shape[2], q.shape[3], v.shape[3]))
        packing = None
        if sequences is not None:
            packing = plan_cu_seqlens(jnp.pad(CHUNK * sequences.sum(1), (1, 0)), v.shape[1])
        for mark in marks:
            packing = Packing(mark > 0, mark == 1)
        options = {"scale": scale, "g_min": g_min, "packing": packing}
        o, final_state, states = kda_chunk(q, k, v, g, beta, initial_state=initial_state, **options)
        if not every:
            return o, final_state
        return o, final_state, jnp.concatenate([states[:, every - 1 : -1 : every], final_state[:, None]], axis=1)

    def backward(inputs, initial_state, cotangents, sequences, decay, *, activation, config, interpret, **options):
        assert activation is None

        tokens, marks = inputs[:5], inputs[5:]

        def chunk_form(*arrays):
            tokens, state = arrays[:5], arrays[5] if initial_state is not None else None
            tuning = {"config": config, "interpret": interpret}
            return forward((*tokens, *marks), state, sequences, (), **options, activation=None, every=0, **tuning)

        state = () if initial_state is None else (initial_state,)
        return jax.vjp(chunk_form, *tokens, *state)[1](cotangents)

    monkeypatch.setattr(vjp, "forward", forward)
    monkeypatch.setattr(vjp, "backward", backward)
    monkeypatch.setattr(vjp, "unsupported_reason", lambda scale: None)
    mapping.over_batch_and_heads.cache_clear()


def inputs(rng, batch=(B,), heads=H):
    def normal(*shape):
        return rng.normal(size=(*batch, *shape))

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    arrays = (
        unit(normal(T, heads, K)),
        unit(normal(T, heads, K)),
        normal(T, HV, V),
        -(normal(T, HV, K) ** 2),
        rng.random((*batch, T, HV)),
    )
    return [jnp.asarray(x, jnp.float32) for x in (*arrays, normal(HV, K, V))]


def run(*arrays):
    *arrays, state = arrays
    return vjp.kda_mosaic(*arrays, scale=SCALE, initial_state=state)


def check_gradients(rng):
    arrays = inputs(rng)
    do, dstate = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((B, T, HV, V), (B, HV, K, V)))
    (o, state), pull = jax.jit(lambda *x: jax.vjp(run, *x))(*arrays)
    (want_o, want_state), want = oracle(*arrays, scale=SCALE, do=do, dfinal_state=dstate)
    assert_close(o, want_o, 1e-5, "o")
    assert_close(state, want_state, 1e-5, "final_state")
    for name, got, expected in zip(
        ("q", "k", "v", "g", "beta", "initial_state"), pull((do, dstate)), want, strict=True
    ):
        assert_close(got, expected, 1e-4, name)


def test_gradients_without_backward_kernels_are_those_of_the_chunk_form(rng, monkeypatch):
    monkeypatch.setattr(vjp, "unsupported_reason", lambda scale: "no backward kernels")
    monkeypatch.setattr(vjp, "backward", None)
    check_gradients(rng)


def test_what_has_no_backward_kernels():
    assert "scale" in unsupported_reason(0.0)
    assert unsupported_reason(SCALE) is None


def test_gradients_of_every_input(rng):
    check_gradients(rng)


def test_gradients_through_the_states_of_chunks(rng):
    """Of two chunks: what reaches the state between them comes from the second chunk and from its own cotangent."""
    arrays = inputs(rng)
    do, between, last = (jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in (arrays[2], *[arrays[5]] * 2))
    states = jnp.stack([between, last], 1)
    run = functools.partial(vjp.kda_mosaic, scale=SCALE, states_every=CHUNK)
    (_, final_state, got), pull = jax.jit(lambda *x: jax.vjp(lambda *x: run(*x[:5], initial_state=x[5]), *x))(*arrays)
    head, tail = ([x[:, part] for x in (*arrays[:5], do)] for part in (slice(CHUNK), slice(CHUNK, None)))
    (_, middle), _ = oracle(*head[:5], arrays[5], scale=SCALE, do=head[5], dfinal_state=between)
    (_, end), second = oracle(*tail[:5], middle, scale=SCALE, do=tail[5], dfinal_state=2 * last)
    _, first = oracle(*head[:5], arrays[5], scale=SCALE, do=head[5], dfinal_state=between + second[5])
    for i, want in enumerate((middle, end)):
        assert_close(got[:, i], want, 1e-5, f"state {i}")
    assert_close(final_state, end, 1e-5, "final_state")
    names, gradients = ("q", "k", "v", "g", "beta", "initial_state"), pull((do, last, states))
    for name, x, a, b in zip(names, gradients, first, second, strict=True):
        assert_close(x, a if name == "initial_state" else np.concatenate([a, b], 1), 1e-4, name)


def test_gradients_of_packed_sequences(rng):
    """Each of its own state, one of them empty; the tokens behind the last get none."""
    cu = [0, 30, 30, 66]
    arrays = [x[:1] for x in inputs(rng)]
    arrays[5] = jnp.asarray(rng.normal(size=(3, HV, K, V)), jnp.float32)
    do, dstate = jnp.asarray(rng.normal(size=(1, T, HV, V)), jnp.float32), jnp.asarray(arrays[5][::-1])
    packing = plan_cu_seqlens(jnp.asarray(cu), T)
    run = functools.partial(vjp.kda_mosaic, scale=SCALE, packing=packing)
    _, pull = jax.jit(lambda *x: jax.vjp(lambda *x: run(*x[:5], initial_state=x[5]), *x))(*arrays)
    got = pull((do, dstate))
    for n, (start, end) in enumerate(itertools.pairwise(cu)):
        own = [x[:, start:end] for x in arrays[:5]]
        _, want = oracle(*own, arrays[5][n : n + 1], scale=SCALE, do=do[:, start:end], dfinal_state=dstate[n : n + 1])
        for name, x, y in zip(("q", "k", "v", "g", "beta"), got, want[:5], strict=False):
            if end > start:
                assert_close(x[:, start:end], y, 1e-4, name)
        assert_close(got[5][n : n + 1], want[5], 1e-4, "initial_state")
    assert all(not x[:, 66:].any() for x in got[:5])


@pytest.mark.parametrize("reason", [None, "no backward kernels"])
def test_segments_with_bounded_decay(rng, monkeypatch, reason):
    """A reset is beyond every bound."""
    monkeypatch.setattr(vjp, "unsupported_reason", lambda scale: reason)
    ids = np.repeat([3, 0, 5, 2], [20, 7, 30, 13])[None]
    packing = plan_segments(jnp.asarray(ids))
    *arrays, state = (x[:1] for x in inputs(rng))
    arrays[3] = jnp.maximum(arrays[3], -5.0)
    do, dstate = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((1, T, HV, V), (1, HV, K, V)))
    run = functools.partial(vjp.kda_mosaic, scale=SCALE, packing=packing, g_min=-5.0)
    (o, final_state), pull = jax.jit(lambda *x: jax.vjp(lambda *x: run(*x[:5], initial_state=x[5]), *x))(*arrays, state)
    got = pull((do, dstate))
    for segment, gradient in ((3, jnp.zeros_like(dstate)), (5, jnp.zeros_like(dstate)), (2, dstate)):
        own = ids[0] == segment
        before = state if segment == 3 else jnp.zeros_like(state)
        options = {"scale": SCALE, "do": do[:, own], "dfinal_state": gradient}
        (want_o, last), want = oracle(*(x[:, own] for x in arrays[:5]), before, **options)
        assert_close(o[:, own], want_o, 1e-5, "o")
        for name, x, y in zip(("q", "k", "v", "g", "beta"), got, want[:5], strict=False):
            assert_close(x[:, own], y, 1e-4, name)
        if segment == 3:
            assert_close(got[5], want[5], 1e-4, "initial_state")
    assert_close(final_state, last, 1e-5, "final_state")


def test_packed_raw_projections_without_backward_kernels_are_activated_first(rng, monkeypatch):
    monkeypatch.setattr(vjp, "unsupported_reason", lambda scale: "no backward kernels")
    q, k, v, g, beta, _ = inputs(rng, batch=(1,))
    ids = np.repeat([3, 0, 5, 2], [20, 7, 30, 13])[None]
    packing = plan_segments(jnp.asarray(ids))
    A_log, dt_bias = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((HV,), (HV, K)))
    raw = 3 * q, 2 * k, v, g, beta
    run = jax.jit(lambda *x: vjp.kda_raw_mosaic(*x, Decay(A_log, dt_bias, -1.0), scale=SCALE, packing=packing))
    o, final_state = run(*raw)
    for segment in (3, 5, 2):
        own = [np.asarray(x[:, ids[0] == segment]) for x in raw]
        want, last = raw_oracle(*own, np.asarray(A_log), np.asarray(dt_bias), lower_bound=-1.0, scale=SCALE)
        assert_close(o[:, ids[0] == segment], want, 1e-5, "o")
    assert_close(final_state, last, 1e-5, "final_state")


def test_no_initial_state_is_zero(rng):
    arrays = inputs(rng)[:-1]
    o, _ = jax.jit(functools.partial(vjp.kda_mosaic, scale=SCALE))(*arrays)
    assert_close(o, oracle(*arrays, scale=SCALE)[0], 1e-5)


def test_vmap_joins_the_batch(rng):
    *arrays, state = inputs(rng, batch=(3, B))
    shared = arrays[4][0]  # beta, not mapped
    o, final_state = jax.jit(jax.vmap(run, in_axes=(0, 0, 0, 0, None, 0)))(*arrays[:4], shared, state)
    for i in range(3):
        want_o, want_state = oracle(*(x[i] for x in arrays[:4]), shared, state[i], scale=SCALE)
        assert_close(o[i], want_o, 1e-5, "o")
        assert_close(final_state[i], want_state, 1e-5, "final_state")


def test_vmap_over_packed_sequences(rng):
    """The spans are those of one row, so rows do not join."""
    arrays = inputs(rng, batch=(2, 1))[:5]
    states = jnp.asarray(rng.normal(size=(3, HV, K, V)), jnp.float32)
    packing = plan_cu_seqlens(jnp.asarray([0, 30, 30, T]), T)
    run = functools.partial(vjp.kda_mosaic, scale=SCALE, packing=packing, initial_state=states)
    o, final_state = jax.jit(jax.vmap(run))(*arrays)
    for i in range(2):
        for n, (start, end) in {0: (0, 30), 2: (30, T)}.items():
            want, last = oracle(*(x[i, :, start:end] for x in arrays), states[n : n + 1], scale=SCALE)
            assert_close(o[i, :, start:end], want, 1e-5, "o")
            assert_close(final_state[i, n : n + 1], last, 1e-5, "final_state")


def test_vmap_over_gradients_of_packed_sequences(rng):
    """Without an initial state all gradients are rows, and still they do not join."""
    arrays = inputs(rng, batch=(2, 1))[:5]
    packing = plan_cu_seqlens(jnp.asarray([0, 30, 30, T]), T)
    run = functools.partial(vjp.kda_mosaic, scale=SCALE, packing=packing)
    gradients = jax.jit(jax.vmap(jax.grad(lambda *x: jnp.sum(run(*x)[0] ** 2), range(5))))(*arrays)
    for i, (start, end) in itertools.product(range(2), ((0, 30), (30, T))):
        own = [x[i, :, start:end] for x in arrays]
        do = 2 * oracle(*own, scale=SCALE)[0]
        _, want = oracle(*own, scale=SCALE, do=do, dfinal_state=np.zeros((1, HV, K, V)))
        for name, x, y in zip(("q", "k", "v", "g", "beta"), gradients, want, strict=False):
            assert_close(x[i, :, start:end], y, 1e-4, name)


def mesh():
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


HEADS = PartitionSpec("data", None, "model")
SPECS = (HEADS,) * 5 + (PartitionSpec("data", "model"),)


def test_shard_map_checks_and_differentiates(rng):
    arrays = inputs(rng)

    def loss(*x):
        return sum((y**2).sum() for y in run(*x))

    @functools.partial(jax.shard_map, mesh=mesh(), in_specs=SPECS, out_specs=PartitionSpec(), check_vma=True)
    def sharded(*x):
        return jax.lax.psum(loss(*x), ("data", "model"))

    got = jax.jit(jax.grad(lambda *x: sharded(*x), argnums=range(6)))(*arrays)
    want = jax.jit(jax.grad(loss, argnums=range(6)))(*arrays)
    for name, x, y in zip(("q", "k", "v", "g", "beta", "initial_state"), got, want, strict=True):
        assert_close(x, y, 1e-4, name)


COLLECTIVES = ("all-gather", "all-to-all", "all-reduce", "collective-permute")


@pytest.mark.parametrize("heads", [H, HV])
def test_gradients_stay_on_their_device(rng, heads):
    arrays = [jax.device_put(x, NamedSharding(mesh(), s)) for x, s in zip(inputs(rng, heads=heads), SPECS, strict=True)]

    def gradients(*x):
        out, pull = jax.vjp(run, *x)
        return pull(out)

    text = jax.jit(gradients).lower(*arrays).compile().as_text()
    assert not any(collective in text for collective in COLLECTIVES)


@pytest.mark.parametrize("heads", [H, HV])
def test_partitioned_over_batch_and_heads(rng, heads):
    arrays = [
        jax.device_put(x, NamedSharding(mesh(), spec)) for x, spec in zip(inputs(rng, heads=heads), SPECS, strict=True)
    ]

    def run(*x):
        return vjp.kda_mosaic(*x[:5], scale=SCALE, initial_state=x[5], states_every=CHUNK)

    compiled = jax.jit(run).lower(*arrays).compile()
    text = compiled.as_text()
    assert not any(collective in text for collective in COLLECTIVES)
    o, state, states = compiled(*arrays)
    assert o.sharding.spec == HEADS or o.sharding.is_equivalent_to(NamedSharding(mesh(), HEADS), o.ndim)
    want_o, want_state = oracle(*arrays, scale=SCALE)
    assert_close(o, want_o, 1e-5, "o")
    assert_close(state, want_state, 1e-5, "final_state")
    assert_close(states[:, 1], want_state, 1e-5, "the last chunk's state")
