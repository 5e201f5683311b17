"""What the benchmark measures of decoding: the right steps beside copies, by the bytes that they move."""

import pytest

from experiments import bench, bench_tables, clock, decoding, peers, versions
from experiments.decoding import Step
from experiments.peers import Peer


def test_lines_and_table(monkeypatch):
    """The plain step and a peer beside the copies; a peer that is wrong is left out."""
    monkeypatch.setattr(versions, "CHANNELS", 8)
    monkeypatch.setattr(clock, "ROUNDS", 3)
    monkeypatch.setattr(clock, "SAMPLE_S", 1e-9)

    def late(state, *inputs):
        return state, decoding._ours("scan")(state, *inputs)[1]

    own = [Step("right", "float32", decoding._ours("scan"), peer=True), Step("wrong", "float32", late, peer=True)]
    monkeypatch.setattr(peers, "PEERS", {"other": Peer("json", list, steps=lambda: own)})
    monkeypatch.setattr(decoding, "STEPS", 2)
    chosen = bench.parse([], ["2x1"], ["slow"], ["forward"], ["scan"], ["other"], "", "float32")
    rows = list(bench.run(chosen))
    found = {(row["version"], row["state"]): row for row in rows if row["measurement"] == "decode"}
    ways = {(name, dtype) for name in ("copy", "scan", "default") for dtype in ("float32", "bfloat16")}
    assert set(found) == ways | {("right", "float32")}
    assert any("state" in row["error"] and row["version"] == "wrong" for row in rows if "error" in row)
    for (_, dtype), row in found.items():
        moved = 2 * 2 * 8 * 8 * (4 if dtype == "float32" else 2)
        assert row["TB/s"] * row["median_ms"] * 1e9 == pytest.approx(moved)
        assert row["of_copy"] == pytest.approx(found["copy", dtype]["median_ms"] / row["median_ms"])
    assert len(bench_tables.decoding(rows).splitlines()) == 2 + 7
