"""The benchmark: what its lines hold, what it refuses, and that it does not time what is wrong."""

import functools
import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from absl import flags

from experiments import bench, bench_tables, ceilings, clock, metrics, peers, versions
from experiments.errors import ConfigError
from experiments.peers import Peer
from experiments.versions import Version
from kda_jax.ops import api
from kda_jax.ops.gates import l2_normalize

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(versions, "CHECKED", (1, 70))
    monkeypatch.setattr(versions, "CHANNELS", 8)
    monkeypatch.setattr(clock, "ROUNDS", 3)
    monkeypatch.setattr(clock, "SAMPLE_S", 1e-9)


def settings(**flag):
    given = {"shapes": ["1x24x3"], "decode": None, "gates": ["slow"], "passes": list(versions.PASSES), "only": ""}
    given |= {"implementations": ["scan"], "peer_names": ["none"], "dtype": "float32"}
    return bench.parse(**(given | flag))


def raw_peer(q, k, v, x, beta):
    """As a peer with raw inputs and heads first would be."""
    q, k, v, x, beta = (jnp.moveaxis(array, 0, 2) for array in (q, k, v, x, beta))
    o, final_state = api.kda(l2_normalize(q), l2_normalize(k), v, -5 * jax.nn.sigmoid(x), beta, implementation="scan")
    return jnp.moveaxis(o, 2, 0), final_state


BOTH = "forward+backward"
RAW = ("q", "k", "v", "g_sigmoid", "beta")
scan = functools.partial(api.kda, implementation="scan")


def test_lines_and_table(monkeypatch):
    """Peers are found right in their own layouts, and are what others with the same gate are compared with."""
    own = [Version("raw scan", raw_peer, RAW, heads_first=True, peer=True), Version("scan 2", scan, peer=True)]
    table = {"absent": Peer("no_such_module", list), "needs a GPU": Peer("json", list, gpu=True)}
    monkeypatch.setattr(peers, "PEERS", {"other": Peer("json", lambda: own)} | table)
    chosen = settings(peer_names=["all"], gates=["slow", "fast"])
    assert chosen.peers == ["other"]
    rows = json.loads(json.dumps(list(bench.run(chosen)), allow_nan=False))
    builds, checks, times = rows[:9], rows[9:15], rows[15:]
    names = ["scan", "raw scan", "scan 2"]
    built = {(row["version"], row["T"], row["pass"]) for row in builds if row["compile_s"] > 0}
    assert built == {(n, *of) for n in names for of in ((70, BOTH), (24, "forward"), (24, BOTH))}
    assert [(row["version"], row["gates"]) for row in checks] == [(n, g) for n in names for g in ("slow", "fast")]
    assert all(0 < error < 1e-5 for row in checks for error in row["relative_rms"].values())
    assert [(row["gates"], row["pass"], row["version"]) for row in times] == [
        (gate, name, version)
        for name in versions.PASSES
        for gate, timed in (("slow", names), ("fast", ["scan", "scan 2"]))  # raw inputs with the first gates alone
        for version in timed
    ]
    for row in times:
        assert (row["B"], row["T"], row["H"], row["K"], row["V"]) == (1, 24, 3, 8, 8)
        assert 0 < row["min_ms"] <= row["median_ms"]
        assert row["temporary_bytes"] > 0
        of = {"activated": "scan 2", "raw, bounded": "raw scan"}[row["inputs"]]
        same = [r for r in times if (r["gates"], r["pass"], r["version"]) == (row["gates"], row["pass"], of)]
        assert row["over_fastest_peer"] == pytest.approx(row["median_ms"] / same[0]["median_ms"])
    lines = bench_tables.times(rows).splitlines()
    assert len(lines) == 2 + 5
    assert [cell.strip() for cell in lines[2].split("|")[1:5]] == ["1 x 24 x 3", "slow", "scan", "activated"]


def test_another_framework(monkeypatch):
    """Its arrays are its own, and it has no backward pass."""

    class Listed(clock.Program):
        def prepare(self, arguments):
            return [[x] for x in arguments]

        def fetch(self, results):
            return [x for (x,) in results]

    def build(name, *arguments):
        return Listed(lambda *lists: [[x] for x in scan(*(x for (x,) in lists[:-1]))], 1.0, 2)

    version = Version("other", None, passes=("forward",), build=build, peer=True)
    monkeypatch.setattr(peers, "PEERS", {"other": Peer("json", lambda: [version])})
    rows = list(bench.run(settings(peer_names=["other"])))
    assert [
        set(row["relative_rms"]) for row in rows if row["version"] == "other" and row["measurement"] == "check"
    ] == [{"o", "final_state"}]
    timed = [row for row in rows if row["version"] == "other" and row["measurement"] == "time"]
    assert [(row["pass"], row["temporary_bytes"]) for row in timed] == [("forward", 2)]
    assert bench_tables.times(rows).splitlines()[-1].split("|")[-3].strip() == ""


def test_a_wrong_implementation_is_not_timed(monkeypatch):
    """Only its gradient of beta is wrong, by a thousandth."""
    right = api._IMPLEMENTATIONS["chunk"]

    def wrong(q, k, v, g, beta, **options):
        return right(q, k, v, g, 1.001 * beta - jax.lax.stop_gradient(0.001 * beta), **options)

    monkeypatch.setitem(api._IMPLEMENTATIONS, "chunk", wrong)
    rows = list(bench.run(settings(implementations=["chunk"], only="^chunk, ")))
    assert [row["measurement"] for row in rows] == ["build"] * 3 + ["check"] * 2
    said = "WrongResultError: chunk, slow gates: relative RMS too large: dbeta 1.0e-03 (at most 1e-04)"
    assert said in rows[-1]["error"]


def test_a_wrong_peer_is_left_out(monkeypatch):
    """Its state lacks the last token; it is not timed, and ours are, without a ratio."""

    def wrong(q, k, v, g, beta):
        late = api.kda(q[:, :-1], k[:, :-1], v[:, :-1], g[:, :-1], beta[:, :-1])[1]
        return api.kda(q, k, v, g, beta)[0], late

    monkeypatch.setattr(peers, "PEERS", {"other": Peer("json", lambda: [Version("other", wrong, peer=True)])})
    rows = list(bench.run(settings(peer_names=["other"])))
    assert "final_state" in next(row["error"] for row in rows if "error" in row)
    assert [row["version"] for row in rows if row["measurement"] == "time"] == ["scan", "scan"]
    assert rows[-1]["over_fastest_peer"] is None


def finish(generator):
    """What it yields, and what it returns."""
    rows = []
    try:
        while True:
            rows.append(next(generator))
    except StopIteration as end:
        return rows, end.value


def test_a_version_that_fails_says_so():
    def fail(*_):
        raise MemoryError("too\nlarge")

    failing, chosen = Version("failing", fail), settings(shapes=["1x8x1"])
    lines, programs = finish(bench.build([failing], [], chosen, with_ceilings=False))
    assert [line["error"] for line in lines] == ["MemoryError: too large"] * 3
    rows = list(bench.measure([failing], programs, (1, 8, 1), chosen))
    assert [row["error"] for row in rows] == ["MemoryError: too large"] * 2
    assert bench_tables.times(rows).count("failed") == 2
    [row] = bench._right([failing], functools.partial(bench.check, programs=programs, settings=chosen))
    assert (row["measurement"], row["error"]) == ("check", "MemoryError: too large")


def test_ceilings(monkeypatch):
    """They count bytes and operations; attention that cannot run says so."""
    monkeypatch.setattr(ceilings, "ELEMENTS", 1000)
    monkeypatch.setattr(ceilings, "SIDE", 10)
    chosen = settings(passes=["forward"])
    lines, programs = finish(bench.build([], [], chosen, with_ceilings=True))
    assert {line["version"] for line in lines} == {ceilings.COPY, ceilings.PRODUCT, "cuDNN attention"}
    copy, product = ceilings.measure(programs)
    assert (copy["version"], product["version"]) == (ceilings.COPY, ceilings.PRODUCT)
    assert copy["rate"] * copy["median_ms"] * 1e9 == pytest.approx(8000)
    assert product["rate"] * product["median_ms"] * 1e9 == pytest.approx(2000)
    [row] = ceilings.attention(programs, (1, 24, 3), ["forward"], "float32")
    assert "cudnn" in row["error"].lower()


def test_a_part_is_measured():
    rows = list(bench.run(settings(implementations=["chunk"], passes=["forward"], only="raw, un")))
    assert [(row["measurement"], row["version"], row["inputs"], row.get("pass")) for row in rows] == [
        (measurement, "chunk raw", "raw, unbounded", name)
        for measurement, name in (("build", "forward"), ("build", "forward"), ("check", None), ("time", "forward"))
    ]
    assert set(rows[2]["relative_rms"]) == {"o", "final_state"}


def test_a_part_that_is_none_is_refused():
    """Before anything is compiled or logged."""
    with pytest.raises(ConfigError, match=r"--only=nothing: matches none of: scan, activated$"):
        bench.run(settings(only="nothing"))


@pytest.mark.parametrize(
    ("command", "flag"), [("bench", "output"), *itertools.product(("step_bench", "decode_bench"), ("size", "output"))]
)
def test_help_explains_the_shared_flags(command, flag):
    module = importlib.import_module(f"experiments.{command}").__name__
    assert flag in {f.name for f in flags.FLAGS.get_key_flags_for_module(module)}


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ({"shapes": ["1x24"]}, "--shapes: '1x24' is not BxTxH"),
        ({"shapes": ["1x0x4"]}, "--shapes: '1x0x4' is not BxTxH with positive"),
        ({"decode": ["64"]}, "--decode: '64' is not SEQUENCESxHEADS with positive"),
        ({"gates": ["fast", "weak"]}, "--gates=fast,weak: give some of fast, slow"),
        ({"gates": []}, "--gates=: give some of"),
        ({"passes": ["backward"]}, r"--passes=backward: give some of forward, forward\+backward"),
        ({"only": "("}, r"--only=\(: not a regular expression"),
        ({"implementations": ["chnk"]}, "--implementations=chnk: .*'scan'.*got 'chnk'"),
        ({"implementations": ["chunk", "mosaic_gpu"]}, "--implementations=chunk,mosaic_gpu: .*mosaic_gpu"),
        ({"peer_names": ["tokamx"]}, "--peers: no peer 'tokamx'"),
        ({"dtype": "float16"}, "--dtype=float16: give one of float32, bfloat16"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(flag, message):
    with pytest.raises(ConfigError, match=message):
        settings(**flag)


def test_a_peer_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(peers, "PEERS", {"absent": Peer("no_such_module", list)})
    assert settings(peer_names=["all"]).peers == []
    with pytest.raises(ConfigError, match="--peers: absent is not installed"):
        settings(peer_names=["absent"])


@pytest.mark.parametrize(("dtype", "implementation"), [("float32", "chunk"), ("bfloat16", "mosaic_gpu")])
def test_the_default_implementation_does_not_round(monkeypatch, dtype, implementation):
    monkeypatch.setattr(versions, "refusal", lambda name, dtype: None)
    assert settings(implementations=None, dtype=dtype).implementations == [implementation]


def test_defaults_of_a_cpu():
    chosen = settings(shapes=None, implementations=None, dtype=None)
    assert (chosen.shapes, chosen.implementations, chosen.dtype) == ([(1, 1024, 4)], ["chunk"], "float32")


def test_command(tmp_path):
    """The file holds the printed lines; a wrong flag is one line of error."""
    output = tmp_path / "out.jsonl"
    start = [sys.executable, "-m", "experiments.bench", "--peers=none", "--gates=slow", "--shapes=1x8x1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    children = [
        subprocess.Popen([*start, *flags], cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, **pipes)
        for flags in (
            [f"--output={output}", "--implementations=scan"],
            ["--shape=1x8x1"],
            [f"--output={tmp_path}"],
            [f"--output={__file__}"],
            [f"--queue={tmp_path}"],
            ["oops"],
        )
    ]
    (good, _), *bad = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 1, 1, 1, 1, 1]
    assert good.startswith(output.read_text() + "|")
    header, lines = metrics.read(output)
    assert [line["measurement"] for line in lines] == ["build"] * 3 + ["check"] + ["time"] * 2
    assert header["config"]["shapes"] == [[1, 8, 1]]
    assert header["device"] == "cpu"
    assert {"jax", "numpy", "python"} <= set(header["versions"])
    for (out, error), part in zip(
        bad,
        ("Unknown command line flag 'shape'", f"--output={tmp_path}", "holds results", f"--queue={tmp_path}", "'oops'"),
        strict=True,
    ):
        assert out == ""
        assert error.startswith("error: ")
        assert part in error
        assert error.count("\n") == 1
