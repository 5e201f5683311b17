"""Check every implementation and peer against the recurrence, then time them side by side.

    python -m experiments.bench [--shapes=1x1024x4,...] [--gates=fast,slow] [--implementations=chunk,...]
        [--peers=all|none|jax-linear-attention,tokamax] [--dtype=float32|bfloat16] [--output=FILE.jsonl]

What is checked is what is timed: the program for o and the final state, and the one with the gradients of q, k, v, g
and beta for a random cotangent of o. A line of JSON is one measurement and the first says of what; a table ends the
run. Versions take turns, so that a drift of the machine meets all alike. On a GPU the ceilings of copying and of
matrix products are measured too.
"""

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import app, flags, logging

from experiments import clock, metrics, peers, tables, versions
from experiments.commands import Row, one_line, open_log, read_flags
from experiments.errors import ConfigError
from experiments.versions import Shape, Version

_SHAPES = flags.DEFINE_list("shapes", None, "BxTxH,...; by default 1x1024x4 on a CPU, six large ones on a GPU.")
_GATES = flags.DEFINE_list("gates", ["fast", "slow"], "Forgetting within tokens (fast) or within about twenty (slow).")
_IMPLEMENTATIONS = flags.DEFINE_list("implementations", None, "Of kda_jax.kda; by default all that run, but scan.")
_PEERS = flags.DEFINE_list("peers", ["all"], "all (that are installed), none, or names.")
_DTYPE = flags.DEFINE_string("dtype", None, "Of q, k, v and o; by default float32 on a CPU, bfloat16 on a GPU.")
_OUTPUT = flags.DEFINE_string("output", os.devnull, "A file for the lines of JSON, which are printed too.")

SHAPES = {
    "cpu": ["1x1024x4"],
    "gpu": ["1x8192x32", "1x65536x32", "4x4096x64", "1x8192x96", "2x16384x16", "1x1024x32"],
}


class WrongResultError(RuntimeError):
    """A version is not the recurrence, so its speed means nothing."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure, checked."""

    shapes: Sequence[Shape]
    gates: Sequence[str]
    implementations: Sequence[str]
    peers: Sequence[str]
    dtype: str


def parse(
    shapes: Sequence[str] | None,
    gates: Sequence[str],
    implementations: Sequence[str] | None,
    peer_names: Sequence[str],
    dtype: str | None,
) -> Settings:
    """The values of the flags, with defaults for this backend where they are None.

    Raises:
      ConfigError: names the flag, its value and what is possible.
    """
    gpu = jax.default_backend() == "gpu"
    dtype = dtype or ("bfloat16" if gpu else "float32")
    if dtype not in versions.BOUNDS:
        raise ConfigError(f"--dtype={dtype}: give one of {', '.join(versions.BOUNDS)}")
    if not gates or not set(gates) <= set(versions.GATES):
        raise ConfigError(f"--gates={','.join(gates)}: give some of {', '.join(versions.GATES)}")
    if implementations is None:
        implementations = [name for name in ("mosaic_gpu", "chunk") if versions.refusal(name, dtype) is None]
    for name in implementations:
        if reason := versions.refusal(name, dtype):
            raise ConfigError(f"--implementations={','.join(implementations)}: {reason}")
    sizes = [_shape(text) for text in shapes or SHAPES["gpu" if gpu else "cpu"]]
    return Settings(sizes, gates, implementations, peers.parse(peer_names), dtype)


def _shape(text: str) -> Shape:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
        raise ConfigError(f"--shapes: {text!r} is not BxTxH with positive numbers, as in 1x1024x4")
    B, T, H = map(int, text.split("x"))
    return B, T, H


def header(settings: Settings) -> Row:
    """The first line: on what and with what the others were measured."""
    return {
        "config": dataclasses.asdict(settings) | {"rounds": clock.ROUNDS, "inputs": versions.INPUTS},
        "device": jax.devices()[0].device_kind,
        "cpu_count": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        **metrics.provenance(("jax", "jaxlib", "numpy", *settings.peers)),
    }


def run(settings: Settings) -> Iterator[Row]:
    """Every measurement, as it is made.

    Raises:
      WrongResultError: if one of ours is wrong, before anything is timed.
    """
    right = []
    for name in settings.implementations:
        for version in versions.ours(name):
            yield from check(version, settings)
            right.append(version)
    for name in settings.peers:
        try:
            peer = peers.make(name)
            yield from check(peer, settings)
            right.append(peer)
        except Exception as error:  # none of ours: a line says so, and the rest goes on
            yield {"measurement": "check", "version": name, "peer": True, "error": one_line(error)}
    if jax.default_backend() == "gpu":
        yield from ceilings()
    for shape in settings.shapes:
        yield from measure(right, shape, settings.gates, settings.dtype)


def check(version: Version, settings: Settings) -> Iterator[Row]:
    """The errors of a version; raises WrongResultError where it is not the recurrence."""
    for gate in settings.gates:
        errors = versions.errors(version, gate, settings.dtype)
        yield {"measurement": "check", **_who(version), "gates": gate, "relative_rms": errors}
        if beyond := versions.beyond_bounds(errors, settings.dtype):
            raise WrongResultError(f"{version.name}, {gate} gates: relative RMS too large: {', '.join(beyond)}")


def measure(candidates: Sequence[Version], shape: Shape, gates: Sequence[str], dtype: str) -> Iterator[Row]:
    """Both passes of all versions on the same inputs; a version that fails (out of memory) says so in its line."""
    sizes = dict(zip("BTHKV", (*shape, versions.CHANNELS, versions.CHANNELS), strict=True))
    for name, make in versions.PASSES.items():
        programs: dict[Version, clock.Program] = {}  # compiled for the first gates, used for all
        for gate in gates:
            what = {"measurement": "time", **sizes, "gates": gate, "pass": name}
            inputs = versions.draw(shape, gate, dtype)
            samples = {}
            for version in candidates:
                arguments = versions.arguments(version, inputs)
                try:
                    if version not in programs:
                        programs[version] = clock.build(make(version), *arguments)
                    samples[version] = clock.warm_up(programs[version], *arguments)
                except Exception as error:
                    yield {**what, **_who(version), "error": one_line(error)}
            times = clock.interleave(samples)
            fastest = min((row["median_ms"] for version, row in times.items() if version.peer), default=None)
            for version, row in times.items():
                ratio = row["median_ms"] / fastest if fastest else None
                program = programs[version]
                cost = {"temporary_bytes": program.temporary_bytes, "compile_s": program.compile_s}
                yield {**what, **_who(version), **row, "over_fastest_peer": ratio, **cost}


def ceilings(elements: int = 2**28, side: int = 8192) -> Iterator[Row]:
    """Bytes read and written a second by an elementwise copy, and operations a second of a bfloat16 matrix product."""
    a, b = jax.random.normal(jax.random.key(0), (2, side, side), jnp.bfloat16)
    copied = jnp.arange(elements, dtype=jnp.int32)
    amounts = {"copy, TB/s": 2 * copied.nbytes, "bfloat16 matrix product, TFLOP/s": 2 * side**3}
    copy = clock.warm_up(clock.build(lambda x: x + 1, copied), copied)
    product = clock.warm_up(clock.build(jnp.matmul, a, b), a, b)
    for name, times in clock.interleave(dict(zip(amounts, (copy, product), strict=True))).items():
        yield {"measurement": "ceiling", "version": name, **times, "rate": amounts[name] / times["median_ms"] / 1e9}


def _who(version: Version) -> Row:
    return {"version": version.name, "peer": version.peer, "inputs": "raw" if version.raw else "activated"}


def table(rows: Sequence[Row]) -> str:
    """A row a shape, gates and version: ms (median, and the minimum in brackets) and over the fastest peer's median."""
    head = ["B x T x H", "gates", "version", "inputs"]
    for name in versions.PASSES:
        head += [f"{name}, ms", "over peer", "temporary MiB", "compile s"]
    body: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row["measurement"] == "time":
            shape = " x ".join(str(row[axis]) for axis in "BTH")
            body.setdefault((shape, row["gates"], row["version"], row["inputs"]), []).extend(_cells(row))
    return tables.align([head, *([*key, *cells] for key, cells in body.items())])


def _cells(row: Row) -> list[str]:
    if "error" in row:
        return ["failed", "", "", ""]
    ratio = row["over_fastest_peer"]
    return [
        f"{row['median_ms']:.3f} ({row['min_ms']:.3f})",
        f"{ratio:.2f}" if ratio else "",
        f"{row['temporary_bytes'] / 2**20:,.0f}",
        f"{row['compile_s']:.1f}",
    ]


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)  # tokamax warns of every shape that it has no tuning for
    try:
        if argv[1:]:
            raise ConfigError(f"{argv[1]!r} is not a flag; see --help")
        settings = parse(_SHAPES.value, _GATES.value, _IMPLEMENTATIONS.value, _PEERS.value, _DTYPE.value)
        first = header(settings)
        log = open_log(Path(_OUTPUT.value), first)
        print(json.dumps(first), flush=True)
        rows = []
        for row in run(settings):
            rows.append(row)
            log.append([row])
            print(json.dumps(row), flush=True)
    except (ConfigError, WrongResultError) as error:
        sys.exit(f"error: {error}")
    print(table(rows))


if __name__ == "__main__":
    app.run(main, flags_parser=read_flags)
