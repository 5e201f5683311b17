"""The benchmark: what its lines hold, what it refuses, and that it does not time what is wrong."""

import fcntl
import functools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import bench, bench_tables, ceilings, clock, decoding, metrics, peers, versions
from experiments.decoding import Step
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
versions_scan = functools.partial(api.kda, implementation="scan")


def test_lines_and_table(monkeypatch):
    """Peers are found right in their own layouts, and are what others with the same gate are compared with."""
    own = [Version("raw scan", raw_peer, RAW, heads_first=True, peer=True), Version("scan 2", versions_scan, peer=True)]
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


@pytest.mark.parametrize(("gate", "mean"), [("fast", -2.5), ("slow", -0.0772)])
def test_inputs(gate, mean):
    """The mean of -5 sigmoid(-4.63 + N(0, 1)) is -0.0772 by numerical integration."""
    inputs = versions.draw((2, 2000, 2), gate, "bfloat16")
    assert float(inputs["g"].mean()) == pytest.approx(mean, rel=0.02)
    assert {name for name, x in inputs.items() if x.dtype == jnp.float32} == {"g", "beta"}
    inputs = versions.draw((2, 2000, 2), gate, "float32")
    for kind in versions.KINDS:
        _, unit_k, _, g, beta = (versions._ACTIVATIONS.get(name, lambda x: x)(inputs[name]) for name in kind)
        np.testing.assert_allclose(np.linalg.norm(unit_k, axis=-1), 1, rtol=1e-5)
        np.testing.assert_allclose(g, inputs["g"], rtol=1e-4)
        np.testing.assert_allclose(beta, inputs["beta"], rtol=1e-6)
    for version in (Version("", None), Version("", None, RAW, heads_first=True)):
        q, k, v, given, beta, do = versions.arguments(version, inputs)
        assert q.shape == k.shape == v.shape == do.shape == given.shape == (*beta.shape, versions.CHANNELS)
        assert beta.shape == ((2, 2, 2000) if version.heads_first else (2, 2000, 2))
        want = jnp.moveaxis(inputs["g_sigmoid"], 2, 0) if version.heads_first else inputs["g"]
        np.testing.assert_array_equal(given, want)


def test_gradients_are_those_of_the_cotangent():
    arrays = versions.arguments(versions.recurrence(versions.ACTIVATED), versions.draw((1, 5, 2), "slow", "float32"))

    def loss(*inputs):
        return (api.kda(*inputs, implementation="scan")[0] * arrays[-1]).sum()

    want = jax.grad(loss, argnums=range(5))(*arrays[:-1])
    got = versions.forward_backward(versions.recurrence(versions.ACTIVATED))(*arrays)[2:]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


def test_short_programs_run_several_times_a_sample(monkeypatch):
    """On a clock that only the programs move, by 1 ms and 30 ms a call."""
    now = 0.0
    turns = []

    def program(ms):
        def run():
            nonlocal now
            now += ms / 1e3
            turns.append(ms)

        return clock.Program(run, 0.0, 0)

    monkeypatch.setattr(clock.time, "perf_counter", lambda: now)
    monkeypatch.setattr(clock, "SAMPLE_S", 0.0035)
    samples = {ms: clock.warm_up(program(ms)) for ms in (1, 30)}
    turns.clear()
    times = clock.interleave(samples)
    assert turns == [1, 1, 1, 1, 30] * clock.ROUNDS
    assert times == {ms: {"median_ms": pytest.approx(ms), "min_ms": pytest.approx(ms)} for ms in (1, 30)}


def test_a_queue(tmp_path):
    """It waits for a run that builds; a run that comes later waits for it."""
    clock.queue(None)()
    path = str(tmp_path / "queue")
    with open(path, "w") as building:
        fcntl.flock(building, fcntl.LOCK_SH)
        waiting = threading.Thread(target=clock.queue(path), daemon=True)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(30)
    assert not waiting.is_alive()
    with open(path, "w") as later, pytest.raises(BlockingIOError):
        fcntl.flock(later, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_a_promise_is_timed_too():
    def errors(version):
        program = versions.build(version, (1, 70, 3), BOTH, "float32")
        return versions.errors(version, program, (1, 70, 3), "fast", "float32")

    plain, promised, *raw = versions.ours("chunk")
    assert (plain.name, promised.name) == ("chunk", "chunk g_min=-5")
    found = errors(promised)
    assert found != errors(plain)
    assert versions.beyond_bounds(promised, found, "float32") == []
    assert [version.kind for version in raw] == ["raw, bounded", "raw, unbounded"]
    for version in raw:
        assert versions.beyond_bounds(version, errors(version), "float32") == []


def test_another_framework(monkeypatch):
    """Its arrays are its own, and it has no backward pass."""

    class Listed(clock.Program):
        def prepare(self, arguments):
            return [[x] for x in arguments]

        def fetch(self, results):
            return [x for (x,) in results]

    def build(name, *arguments):
        return Listed(lambda *lists: [[x] for x in versions_scan(*(x for (x,) in lists[:-1]))], 1.0, 2)

    version = Version("other", None, passes=("forward",), build=build, peer=True)
    monkeypatch.setattr(peers, "PEERS", {"other": Peer("json", lambda: [version])})
    rows = list(bench.run(settings(peer_names=["other"])))
    assert [
        set(row["relative_rms"]) for row in rows if row["version"] == "other" and row["measurement"] == "check"
    ] == [{"o", "final_state"}]
    timed = [row for row in rows if row["version"] == "other" and row["measurement"] == "time"]
    assert [(row["pass"], row["temporary_bytes"]) for row in timed] == [("forward", 2)]
    assert bench_tables.times(rows).splitlines()[-1].split("|")[-3].strip() == ""


def test_decoding(monkeypatch):
    """The plain step and a peer beside the copies; a peer that is wrong is left out."""

    def late(state, *inputs):
        return state, decoding._ours("scan")(state, *inputs)[1]

    own = [Step("right", "float32", decoding._ours("scan"), peer=True), Step("wrong", "float32", late, peer=True)]
    monkeypatch.setattr(peers, "PEERS", {"other": Peer("json", list, steps=lambda: own)})
    monkeypatch.setattr(decoding, "STEPS", 2)
    rows = list(bench.run(settings(peer_names=["other"], decode=["2x1"])))
    found = {(row["version"], row["state"]): row for row in rows if row["measurement"] == "decode"}
    ways = {(name, dtype) for name in ("copy", "scan", "default") for dtype in ("float32", "bfloat16")}
    assert set(found) == ways | {("right", "float32")}
    assert any("state" in row["error"] and row["version"] == "wrong" for row in rows if "error" in row)
    for (_, dtype), row in found.items():
        moved = 2 * 2 * 8 * 8 * (4 if dtype == "float32" else 2)
        assert row["TB/s"] * row["median_ms"] * 1e9 == pytest.approx(moved)
        assert row["of_copy"] == pytest.approx(found["copy", dtype]["median_ms"] / row["median_ms"])
    assert len(bench_tables.decoding(rows).splitlines()) == 2 + 7


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


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_wrong_last_head_is_seen(heads_first):
    shape = (1, 70, 3)

    def wrong(*inputs):
        o, final_state = versions_scan(*(jnp.moveaxis(x, 0, 2) if heads_first else x for x in inputs))
        factor = jnp.array([1, 1, 1.01])
        o = o * factor[None, None, :, None]
        return jnp.moveaxis(o, 2, 0) if heads_first else o, final_state * factor[None, :, None, None]

    version = Version("wrong", wrong, heads_first=heads_first)
    found = versions.errors(version, versions.build(version, shape, "forward", "float32"), shape, "slow", "float32")
    assert found == {name: pytest.approx(0.01 / 2**0.5, rel=0.5) for name in ("o", "final_state")}


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
