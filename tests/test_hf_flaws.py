"""What is wrong with the files of a checkpoint is listed at once, by name."""

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from checkpoint_cases import LINEAR, build
from safetensors.numpy import load_file, save_file

from kda_jax.models import hf
from kda_jax.models.hf_files import INDEX, CheckpointError, Files


def test_all_flaws_are_listed(tmp_path):
    """Missing, superfluous, misshapen, of a wrong dtype, truncated, in a missing file: one error, every name."""
    hf.save(tmp_path, LINEAR, build("kimi_linear"), shard_bytes=3000)
    files = sorted(tmp_path.glob("*.safetensors"))
    first = load_file(files[0])
    names = list(first)
    first[names[0]] = first[names[0]][:-1]
    first[names[1]] = first[names[1]].astype(np.int32)
    removed = names[2]
    del first[removed]
    save_file(first | {"model.extra": np.zeros(2, np.float32)}, files[0])
    second = files[1].read_bytes()
    files[1].write_bytes(second[:-10])
    gone = list(load_file(files[2]))
    files[2].unlink()
    with pytest.raises(CheckpointError) as error:
        hf.load(tmp_path)
    lines = str(error.value).splitlines()
    assert lines[0] == f"the checkpoint does not hold this model, {len(lines) - 1} flaws:"
    found = "\n".join(lines[1:])
    assert re.search(rf"^{names[0]}: shape \[.*\], expected \[", found, re.M)
    assert f"{names[1]}: dtype I32, expected one of F64, F32, F16, BF16" in lines
    assert f"missing: {removed}" in lines
    assert "superfluous: model.extra" in lines
    assert re.search(rf"^model\..*: truncated: \d+ bytes of \d+ in {files[1].name}$", found, re.M)
    assert re.search(rf"^unreadable: {files[2].name}: ", found, re.M)
    assert {f"missing: {name}" for name in gone} <= set(lines)
    assert len(lines) == 7 + len(gone)


def test_a_tensor_in_two_files_is_named(tmp_path):
    """As where two checkpoints lie in one directory: nothing says which is meant."""
    hf.save(tmp_path, LINEAR, build("kimi_linear"))
    save_file({"model.norm.weight": np.zeros(8, np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(
        CheckpointError, match=r"1 flaws:\ntwice: model.norm.weight, in model.safetensors and other.saf"
    ):
        hf.load(tmp_path)


def test_a_damaged_header_is_named(tmp_path):
    hf.save(tmp_path, LINEAR, build("kimi_linear"))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match=r"unreadable: model.safetensors: the header would take \d+ bytes of 20"):
        hf.load(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        "[1]",
        '{"a": "b"}',
        '{"a": {"dtype": "F32", "shape": null, "data_offsets": [0, 4]}}',
        '{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
    ],
)
def test_a_header_of_another_form_is_named(tmp_path, header):
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode())
    [flaw] = Files.of(tmp_path).flaws
    assert flaw.startswith("unreadable: model.safetensors: ")


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": []}'])
def test_an_index_of_another_form_is_named(tmp_path, index):
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=f"{INDEX} names no files: "):
        Files.of(tmp_path)


def test_a_config_half_written_is_removed(tmp_path, monkeypatch):
    """The directory's old one stays."""
    (tmp_path / "config.json").write_text("{}")
    whole = Path.write_text

    def half(path, text):
        whole(path, text[: len(text) // 2])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="no space left"):
        hf.save(tmp_path, LINEAR, build("kimi_linear"))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("config.json", "{}")]
