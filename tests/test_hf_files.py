"""Saving and loading: bitwise, in several files, into shards, within little memory."""

import dataclasses
import json
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import layer_cases
import numpy as np
import pytest
from checkpoint_cases import CONFIGS, LINEAR, assert_same, build
from flax import nnx
from safetensors.numpy import load_file, save_file

from kda_jax.models import HybridLM, hf, mxfp4, orbax, sharding
from kda_jax.models.hf_files import INDEX


@pytest.mark.parametrize("shard_bytes", [10**9, 3000])
@pytest.mark.parametrize("name", CONFIGS)
def test_save_then_load_is_bitwise(name, shard_bytes, tmp_path):
    hf.save(tmp_path / "here", CONFIGS[name], build(name), shard_bytes=shard_bytes)
    files = sorted((tmp_path / "here").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes < 10**9) == (tmp_path / "here/model.safetensors.index.json").exists()
    sizes = [sum(x.nbytes for x in load_file(file).values()) for file in files]
    assert all(size <= shard_bytes or len(load_file(file)) == 1 for size, file in zip(sizes, files, strict=True))
    config, model = hf.load(tmp_path / "here")
    assert config == CONFIGS[name]
    assert_same(model, build(name))


def test_layout(tmp_path):
    """By hand: a linear map is [out, in]; taps [C, 1, W], the oldest first; K3's A_log is padded with zeros."""
    model = build("kimi_k3")
    hf.save(tmp_path, CONFIGS["kimi_k3"], model)
    tensors = load_file(tmp_path / "model.safetensors")
    mixer = model.blocks[0].mixer
    prefix = "language_model.model.layers.0."
    np.testing.assert_array_equal(tensors[prefix + "self_attn.q_proj.weight"], mixer.q_proj.kernel[...].T)
    taps = tensors[prefix + "self_attn.k_conv1d.weight"]
    assert (taps.shape, taps.dtype) == ((8, 1, 4), np.float32)
    np.testing.assert_array_equal(taps[:, 0, 3], mixer.k_conv.weight[3])
    A_log = tensors[prefix + "self_attn.A_log"]
    assert (A_log.shape, A_log.dtype) == ((128,), np.float32)
    np.testing.assert_array_equal(A_log[:2], mixer.A_log[...])
    assert not A_log[2:].any()
    name = "language_model.model.layers.1.block_sparse_moe.experts.2.w2.weight"
    weights = mxfp4.unpack(tensors[f"{name}_packed"], tensors[f"{name}_scale"])
    np.testing.assert_array_equal(weights.T, model.blocks[1].mlp.experts.down_proj[2])


def test_other_forms_load(tmp_path):
    """A_log of any published shape, a dense layer under transformers' name, a vision tower beside the text model."""
    hf.save(tmp_path / "there", LINEAR, build("kimi_linear"))
    tensors = load_file(tmp_path / "there/model.safetensors")
    name = "model.layers.0.self_attn.A_log"
    tensors = {key.replace("layers.0.mlp", "layers.0.block_sparse_moe"): x for key, x in tensors.items()}
    for A_log in (tensors[name].reshape(2), np.pad(tensors[name].reshape(2), (0, 126))):
        save_file(tensors | {name: A_log}, tmp_path / "there/model.safetensors")
        assert_same(hf.load(tmp_path / "there")[1], build("kimi_linear"))
    extra = {"vision_tower.x": np.zeros(3, np.float32)}
    save_file(tensors | extra, tmp_path / "there/model.safetensors")
    assert_same(hf.load(tmp_path / "there")[1], build("kimi_linear"))


def test_dtype_on_request(tmp_path):
    hf.save(tmp_path, CONFIGS["bfloat16"], build("bfloat16"))
    config, model = hf.load(tmp_path, dtype="float32")
    assert (config.dtype, config.param_dtype) == (jnp.float32, jnp.float32)
    got, want = (m.blocks[1].mlp.experts.up_proj[...] for m in (model, build("bfloat16")))
    np.testing.assert_array_equal(got, want.astype(jnp.float32))


def test_a_loaded_model_runs_in_its_dtype(tmp_path):
    """Float32 taps and norms among bfloat16 weights leave the computation and the caches in bfloat16."""
    hf.save(tmp_path, CONFIGS["kimi_k3"], build("kimi_k3"))
    _, model = hf.load(tmp_path)
    logits, cache = nnx.jit(lambda model, tokens: model(tokens, cache=model.init_cache(1, 4)))(
        model, jnp.array([[1, 2, 3]])
    )
    assert jnp.isfinite(logits).all()
    assert (
        {x.dtype for x in jax.tree.leaves(cache[0].tails)}
        == {entry.dtype for entry in cache[1].entries}
        == {jnp.dtype("bfloat16")}
    )


def test_sharded(tmp_path):
    """Every device holds its own part; the values are those of an unsharded load."""
    hf.save(tmp_path, CONFIGS["kimi_k3"], build("kimi_k3"))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    _, model = hf.load(tmp_path, shard=sharding.largest_axis(mesh, "data", least=64))
    assert_same(model, build("kimi_k3"))
    kernel = model.lm_head.kernel[...]
    assert {part.data.shape for part in kernel.addressable_shards} == {(8, 11)}
    assert {part.data.shape for part in model.norm.scale[...].addressable_shards} == {(32,)}
    hf.save(tmp_path / "again", CONFIGS["kimi_k3"], model)
    assert_same(hf.load(tmp_path / "again")[1], build("kimi_k3"))


def test_experts_stay_whole():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shard = sharding.largest_axis(mesh, "data", least=1)
    assert shard(("blocks", 1, "mlp", "experts", "up_proj"), (4, 8, 64)).spec == jax.P("data", None, None)
    assert shard(("blocks", 1, "mlp", "experts", "up_proj"), (3, 8, 64)).spec == jax.P(None, None, "data")
    assert shard(("norm", "scale"), (7,)).spec == jax.P()


def test_memory(tmp_path):
    """Beside the model itself, loading and saving hold about one file at a time."""
    config = dataclasses.replace(LINEAR, vocab_size=64, width=256, mlp_width=1024, pattern=("kda",) * 8, moe=None)
    model = layer_cases.randomize(nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0))), np.random.default_rng(0))
    hf.save(tmp_path / "first", config, model, shard_bytes=2**21)
    total = sum(file.stat().st_size for file in (tmp_path / "first").glob("*.safetensors"))
    assert total > 25e6
    tracemalloc.start()
    try:
        hf.save(tmp_path / "second", config, model, shard_bytes=2**21)
        assert tracemalloc.get_traced_memory()[1] < 8e6
        again = hf.load(tmp_path / "second")[1]
        kept, peak = tracemalloc.get_traced_memory()
        assert peak < kept + 8e6
    finally:
        tracemalloc.stop()
    assert_same(again, model)


@pytest.mark.parametrize("name", ["kimi_k3", "tied"])
def test_orbax_both_ways(name, tmp_path):
    hf.save(tmp_path / "published", CONFIGS[name], build(name))
    orbax.save(tmp_path / "orbax", *hf.load(tmp_path / "published"))
    config, model = orbax.load(tmp_path / "orbax")
    assert config == CONFIGS[name]
    assert_same(model, build(name))
    hf.save(tmp_path / "back", config, model)
    assert_same(hf.load(tmp_path / "back")[1], build(name))
    before, after = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("published", "back"))
    assert before == after


def test_orbax_holds_any_config(tmp_path):
    """Mixers that have no published layout, sharded."""
    mixer = dataclasses.replace(LINEAR.mixer, lower_bound=np.float32(-2.5))
    config = dataclasses.replace(LINEAR, pattern=("gdn", "attention"), implementation=("scan",), moe=None, mixer=mixer)
    model = layer_cases.randomize(nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0))), np.random.default_rng(0))
    orbax.save(tmp_path / "there", config, model)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    again, other = orbax.load(tmp_path / "there", shard=sharding.largest_axis(mesh, "data", least=64))
    assert again == config
    assert_same(other, model)
    assert len(other.lm_head.kernel[...].addressable_shards) == 2
    with pytest.raises(ValueError, match=r"what kda_jax\.models\.orbax\.save wrote"):
        orbax.load(tmp_path)


def test_errors(tmp_path, monkeypatch):
    model = build("kimi_linear")
    with pytest.raises(ValueError, match="model is not the config's"):
        hf.save(tmp_path / "x", dataclasses.replace(LINEAR, mlp_width=7), model)
    hf.save(tmp_path, LINEAR, model)
    with pytest.raises(FileExistsError, match="holds a checkpoint already: model"):
        hf.save(tmp_path, LINEAR, model)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no safetensors files in"):
        hf.load(tmp_path)
    (tmp_path / INDEX).write_text("{}")  # would speak of other files than those that are saved
    with pytest.raises(FileExistsError, match=f"holds a checkpoint already: {INDEX}"):
        hf.save(tmp_path, LINEAR, model)
    trained = nnx.clone(build("kimi_k3"))
    trained.blocks[1].mlp.experts.up_proj[0, 0, 0] = 1.234
    with pytest.raises(ValueError, match=r"layers\.1\.block_sparse_moe\.experts\.0\.w3\.weight: .*no MXFP4 numbers"):
        hf.save(tmp_path / "y", CONFIGS["kimi_k3"], trained, shard_bytes=3000)
    assert not list((tmp_path / "y").iterdir()), "what had been written would be in the way of the next save"
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r"pip install 'kda-jax\[hf\]'"):
        hf.save(tmp_path / "z", LINEAR, model)


def test_bfloat16_is_read_as_such(tmp_path):
    """Without a dtype in config.json, the embedding's decides."""
    hf.save(tmp_path, CONFIGS["bfloat16"], build("bfloat16"))
    document = json.loads((tmp_path / "config.json").read_text())
    del document["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(document))
    config, model = hf.load(tmp_path)
    assert config == CONFIGS["bfloat16"]
    assert model.embed.embedding[...].dtype == jnp.bfloat16
