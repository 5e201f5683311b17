"""Check every implementation and peer against the recurrence, then time them side by side.

    python -m experiments.bench [--shapes=1x1024x4,...] [--gates=fast,slow] [--implementations=chunk,...]
        [--decode=1x32,...] [--peers=all|none|jax-linear-attention,tokamax,...] [--dtype=float32|bfloat16]
        [--output=FILE.jsonl]

What is checked is what is timed: the program for o and the final state, and the one with the gradients of q, k, v, g
and beta for a random cotangent of o. A line of JSON is one measurement and the first says of what; tables end the
run. Versions take turns, so that a drift of the machine meets all alike. On a GPU the ceilings of copying and of
matrix products, causal attention by cuDNN and decoding are measured too. Peers that run in PyTorch share the GPU's
memory with JAX only where XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Callable, Generator, Iterator, Sequence

import jax
import jax.numpy as jnp
from absl import app, flags, logging

from experiments import clock, decoding, metrics, peers, tables, versions
from experiments.commands import Row, WrongResultError, one_line, read_flags, record
from experiments.errors import ConfigError
from experiments.versions import Shape, Version

_SHAPES = flags.DEFINE_list("shapes", None, "BxTxH,...; by default 1x1024x4 on a CPU, six large ones on a GPU.")
_GATES = flags.DEFINE_list("gates", ["fast", "slow"], "Forgetting within tokens (fast) or within about twenty (slow).")
_DECODE = flags.DEFINE_list("decode", None, "SEQUENCESxHEADS,...; by default none on a CPU, five sizes on a GPU.")
_IMPLEMENTATIONS = flags.DEFINE_list("implementations", None, "Of kda_jax.kda; by default all that run, but scan.")
_PEERS = flags.DEFINE_list("peers", ["all"], "all (that are installed), none, or names.")
_DTYPE = flags.DEFINE_string("dtype", None, "Of q, k, v and o; by default float32 on a CPU, bfloat16 on a GPU.")

SHAPES = {
    "cpu": ["1x1024x4"],
    "gpu": ["1x8192x32", "1x65536x32", "4x4096x64", "1x8192x96", "2x16384x16", "1x1024x32"],
}
DECODE = {"cpu": [], "gpu": ["1x32", "8x32", "64x32", "256x32", "1024x32"]}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure, checked."""

    shapes: Sequence[Shape]
    decode: Sequence[decoding.Size]
    gates: Sequence[str]
    implementations: Sequence[str]
    peers: Sequence[str]
    dtype: str


def parse(
    shapes: Sequence[str] | None,
    decode: Sequence[str] | None,
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
    backend = "gpu" if gpu else "cpu"
    texts = shapes or SHAPES[backend]
    sizes = [(B, T, H) for B, T, H in (_numbers("shapes", text, "BxTxH", "1x1024x4") for text in texts)]
    texts = DECODE[backend] if decode is None else decode
    steps = [(N, H) for N, H in (_numbers("decode", text, "SEQUENCESxHEADS", "64x32") for text in texts)]
    return Settings(sizes, steps, gates, implementations, peers.parse(peer_names), dtype)


def _numbers(flag: str, text: str, form: str, example: str) -> tuple[int, ...]:
    if not re.fullmatch("x".join([r"[1-9]\d*"] * (form.count("x") + 1)), text):
        raise ConfigError(f"--{flag}: {text!r} is not {form} with positive numbers, as in {example}")
    return tuple(map(int, text.split("x")))


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
    known = [version for name in settings.implementations for version in versions.ours(name)]
    right = yield from _right(known, settings.peers, peers.versions, functools.partial(check, settings=settings))
    steps = []
    if settings.decode:
        ours, check_one = decoding.ours(), functools.partial(check_step, settings=settings)
        steps = yield from _right(ours, settings.peers, peers.steps, check_one)
    if jax.default_backend() == "gpu":
        yield from ceilings()
        for shape in settings.shapes:
            yield from attention(shape)
    for shape in settings.shapes:
        yield from measure(right, shape, settings.gates, settings.dtype)
    for size in settings.decode:
        yield from decoding.measure(steps, size, settings.dtype)


def _right[Way: (Version, decoding.Step)](
    ours: Sequence[Way],
    peer_names: Sequence[str],
    make: Callable[[str], list[Way]],
    check: Callable[[Way], Iterator[Row]],
) -> Generator[Row, None, list[Way]]:
    """Those of ours and of the peers that are right; that a peer is not a line says, and the rest goes on."""
    right = []
    for way in ours:
        yield from check(way)
        right.append(way)
    for name in peer_names:
        wrong = {"measurement": "check", "version": name, "peer": True}
        try:
            for way in make(name):
                wrong["version"] = way.name
                yield from check(way)
                right.append(way)
        except Exception as error:
            yield {**wrong, "error": one_line(error)}
    return right


def check(version: Version, settings: Settings) -> Iterator[Row]:
    """The errors of a version; raises WrongResultError where it is not the recurrence."""
    for gate in settings.gates:
        errors = versions.errors(version, gate, settings.dtype)
        yield {"measurement": "check", **_who(version), "gates": gate, "relative_rms": errors}
        _refuse(f"{version.name}, {gate} gates", versions.beyond_bounds(errors, settings.dtype))


def check_step(step: decoding.Step, settings: Settings) -> Iterator[Row]:
    """The same of a step."""
    errors = decoding.errors(step, settings.dtype)
    yield {"measurement": "check", "version": step.name, "peer": step.peer, "state": step.state, "relative_rms": errors}
    _refuse(f"{step.name}, a step", decoding.beyond_bounds(step, errors, settings.dtype))


def _refuse(what: str, beyond: Sequence[str]) -> None:
    if beyond:
        raise WrongResultError(f"{what}: relative RMS too large: {', '.join(beyond)}")


def measure(candidates: Sequence[Version], shape: Shape, gates: Sequence[str], dtype: str) -> Iterator[Row]:
    """Both passes of all versions on the same inputs; a version that fails (out of memory) says so in its line.

    What a version is compared with is the fastest peer of its kind.
    """
    sizes = dict(zip("BTHKV", (*shape, versions.CHANNELS, versions.CHANNELS), strict=True))
    for name in versions.PASSES:
        programs: dict[Version, clock.Program] = {}  # compiled for the first gates, used for all
        for gate in gates:
            what = {"measurement": "time", **sizes, "gates": gate, "pass": name}
            inputs = versions.draw(shape, gate, dtype)
            samples = {}
            for version in (version for version in candidates if name in version.passes):
                arguments = versions.arguments(version, inputs)
                try:
                    if version not in programs:
                        programs[version] = versions.build(version, name, *arguments)
                    samples[version] = clock.warm_up(programs[version], *arguments)
                except Exception as error:
                    yield {**what, **_who(version), "error": one_line(error)}
            times = clock.interleave(samples)
            for version, row in times.items():
                peers = [t["median_ms"] for other, t in times.items() if other.peer and other.kind == version.kind]
                ratio = row["median_ms"] / min(peers) if peers else None
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


def attention(shape: Shape) -> Iterator[Row]:
    """Causal softmax attention of the same heads by cuDNN, in bfloat16: where KDA overtakes it."""
    B, T, H = shape
    arrays = jax.random.normal(jax.random.key(0), (3, B, T, H, versions.CHANNELS), jnp.bfloat16)
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    way = Version("cuDNN attention", lambda q, k, v: (attend(q, k, v), jnp.zeros(())))  # for the state
    for name, make in versions.PASSES.items():
        program = clock.build(lambda *x, make=make: make(way)(*x, x[0]), *arrays)
        [times] = clock.interleave({name: clock.warm_up(program, *arrays)}).values()
        what = {"B": B, "T": T, "H": H, "K": versions.CHANNELS, "V": versions.CHANNELS, "pass": name}
        yield {"measurement": "attention", **what, "version": way.name, **times}


def _who(version: Version) -> Row:
    return {"version": version.name, "peer": version.peer, "inputs": version.kind}


def table(rows: Sequence[Row]) -> str:
    """A row a shape, gates and version: ms (median, and the minimum in brackets) and over the fastest peer's median."""
    head = ["B x T x H", "gates", "version", "inputs"]
    for name in versions.PASSES:
        head += [f"{name}, ms", "over peer", "temporary MiB", "compile s"]
    body: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for row in rows:
        if row["measurement"] == "time":
            shape = " x ".join(str(row[axis]) for axis in "BTH")
            key = (shape, row["gates"], row["version"], row["inputs"])
            body.setdefault(key, {name: [""] * 4 for name in versions.PASSES})[row["pass"]] = _cells(row)
    return tables.align([head, *([*key, *itertools.chain(*cells.values())] for key, cells in body.items())])


def decode_table(rows: Sequence[Row]) -> str:
    """A row a size, dtype of the state and version."""
    head = ["sequences x heads", "state", "version", "step, us", "TB/s", "of copy"]
    body = [
        [
            f"{row['sequences']} x {row['H']}",
            *(row["state"], row["version"]),
            f"{1e3 * row['median_ms']:.1f} ({1e3 * row['min_ms']:.1f})",
            *(f"{row['TB/s']:.2f}", f"{row['of_copy']:.2f}"),
        ]
        for row in rows
        if row["measurement"] == "decode"
    ]
    return tables.align([head, *body])


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

    def plan() -> tuple[Row, Iterator[Row]]:
        settings = parse(_SHAPES.value, _DECODE.value, _GATES.value, _IMPLEMENTATIONS.value, _PEERS.value, _DTYPE.value)
        return header(settings), run(settings)

    rows = record(argv, plan)
    print(table(rows))
    if any(row["measurement"] == "decode" for row in rows):
        print(decode_table(rows))


if __name__ == "__main__":
    app.run(main, flags_parser=read_flags)
