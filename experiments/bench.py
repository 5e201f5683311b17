"""Check every implementation and peer against the recurrence, then time them side by side.

    python -m experiments.bench [--shapes=1x1024x4,...] [--gates=slow,fast] [--passes=forward,forward+backward]
        [--implementations=chunk,...] [--peers=all|none|jax-linear-attention,tokamax,...] [--only=REGEX]
        [--decode=1x32,...] [--dtype=float32|bfloat16] [--queue=FILE] [--output=FILE.jsonl]

First all programs are compiled, side by side. What is checked is what is timed: the program for o and the final state,
and the one with the gradients of q, k, v, g and beta for a random cotangent of o; over 256 tokens, with the heads of
the first shape. A line of JSON is one measurement and the first says of what; tables end the run. Versions take turns,
so that a drift of the machine meets all alike. On a GPU the ceilings of copying and of matrix products, causal
attention by cuDNN and decoding are measured too. Peers that run in PyTorch share the GPU's memory with JAX only where
XLA_PYTHON_CLIENT_PREALLOCATE=false. Compiling takes longest: several runs, each of some shapes, compile side by side
and measure one after the other where they are given the same --queue.
"""

import dataclasses
import functools
import itertools
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import app, flags, logging

from experiments import bench_tables, ceilings, clock, decoding, metrics, peers, versions
from experiments.commands import Row, WrongResultError, one_line, read_flags, record
from experiments.errors import ConfigError
from experiments.versions import Shape, Version

flags.declare_key_flag("output")  # --help explains it too
_SHAPES = flags.DEFINE_list("shapes", None, "BxTxH,...; by default 1x1024x4 on a CPU, six large ones on a GPU.")
_GATES = flags.DEFINE_list(
    "gates", ["slow", "fast"], "Forgetting within about twenty tokens (slow) or within few (fast)."
)
_PASSES = flags.DEFINE_list("passes", list(versions.PASSES), "What is computed: of o, or of the gradients too.")
_ONLY = flags.DEFINE_string("only", "", "Regular expression, searched in what is measured: 'mosaic_gpu raw, bounded'.")
_DECODE = flags.DEFINE_list("decode", None, "SEQUENCESxHEADS,...; by default none on a CPU, five sizes on a GPU.")
_IMPLEMENTATIONS = flags.DEFINE_list("implementations", None, "Of kda_jax.kda; by default the fastest that runs.")
_PEERS = flags.DEFINE_list("peers", ["all"], "all (that are installed), none, or names.")
_QUEUE = flags.DEFINE_string("queue", None, "A file at which runs wait for one another, for which it is made.")
_DTYPE = flags.DEFINE_string("dtype", None, "Of q, k, v and o; by default float32 on a CPU, bfloat16 on a GPU.")

SHAPES = {
    "cpu": ["1x1024x4"],
    "gpu": ["1x8192x32", "1x65536x32", "4x4096x64", "1x8192x96", "2x16384x16", "1x1024x32"],
}
DECODE = {"cpu": [], "gpu": ["1x32", "8x32", "64x32", "256x32", "1024x32"]}

Programs = Mapping[Any, clock.Program | Exception]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure, checked."""

    shapes: Sequence[Shape]
    decode: Sequence[decoding.Size]
    gates: Sequence[str]
    passes: Sequence[str]
    implementations: Sequence[str]
    peers: Sequence[str]
    only: str
    dtype: str

    @property
    def checked(self) -> Shape:
        """What is checked; some peers compile for a number of heads, and that of a timed shape costs nothing more."""
        return (*versions.CHECKED, self.shapes[0][2])


def parse(
    shapes: Sequence[str] | None,
    decode: Sequence[str] | None,
    gates: Sequence[str],
    passes: Sequence[str],
    implementations: Sequence[str] | None,
    peer_names: Sequence[str],
    only: str,
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
    for flag, values, known in (("gates", gates, versions.GATES), ("passes", passes, versions.PASSES)):
        if not values or not set(values) <= set(known):
            raise ConfigError(f"--{flag}={','.join(values)}: give some of {', '.join(known)}")
    try:
        re.compile(only)
    except re.error as error:
        raise ConfigError(f"--only={only}: not a regular expression, {error}") from error
    if implementations is None:
        names = ("chunk",) if dtype == "float32" else ("mosaic_gpu", "chunk")  # the kernels would round float32
        implementations = [name for name in names if versions.refusal(name, dtype) is None][:1]
    for name in implementations:
        if reason := versions.refusal(name, dtype):
            raise ConfigError(f"--implementations={','.join(implementations)}: {reason}")
    backend = "gpu" if gpu else "cpu"
    texts = SHAPES[backend] if shapes is None else shapes
    sizes = [(B, T, H) for B, T, H in (_numbers("shapes", text, "BxTxH", "1x1024x4") for text in texts)]
    texts = DECODE[backend] if decode is None else decode
    steps = [(N, H) for N, H in (_numbers("decode", text, "SEQUENCESxHEADS", "64x32") for text in texts)]
    return Settings(sizes, steps, gates, passes, implementations, peers.parse(peer_names), only, dtype)


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


def run(settings: Settings, wait: Callable[[], None] = lambda: None) -> Iterator[Row]:
    """Every measurement, as it is made; what fails or is wrong says so in its line, and the rest goes on.

    wait: is called between compiling and measuring. Raises ConfigError, at the call, if --only matches nothing.
    """
    own = [version for name in settings.implementations for version in versions.ours(name)]
    failed, known = _with_peers(own, settings.peers, peers.versions) if settings.shapes else ([], [])
    known = [version for version in known if set(version.passes) & set(settings.passes)]
    chosen = [version for version in known if re.search(settings.only, _label(version))]
    if known and not chosen:
        raise ConfigError(f"--only={settings.only}: matches none of: {'; '.join(map(_label, known))}")
    return itertools.chain(failed, _run(chosen, settings, wait))


def _run(known: Sequence[Version], settings: Settings, wait: Callable[[], None]) -> Iterator[Row]:
    failed, steps = _with_peers(decoding.ours(), settings.peers, peers.steps) if settings.decode else ([], [])
    yield from failed
    gpu = jax.default_backend() == "gpu"
    programs = yield from build(known, steps, settings, gpu)
    wait()
    known = yield from _right(known, functools.partial(check, programs=programs, settings=settings))
    steps = yield from _right(steps, functools.partial(check_step, programs=programs, settings=settings))
    if gpu:
        yield from ceilings.measure(programs)
    for shape in settings.shapes:
        yield from measure(known, programs, shape, settings)
        if gpu:
            yield from ceilings.attention(programs, shape, settings.passes, settings.dtype)
    for size in settings.decode:
        yield from decoding.measure(steps, programs, size, settings.dtype)


def build(
    ways: Sequence[Version], steps: Sequence[decoding.Step], settings: Settings, with_ceilings: bool
) -> Generator[Row, None, Programs]:
    """The programs of all that is checked and timed, each with a line as it is ready."""
    beside: dict[Any, clock.Build] = dict(ceilings.builds()) if with_ceilings else {}
    alone: dict[Any, clock.Build] = {}
    for way in [*ways, ceilings.ATTENTION] if with_ceilings else ways:
        names = [name for name in settings.passes if name in way.passes]
        shapes = [(settings.checked, name) for name in names[-1:]] if way in ways else []
        for shape, name in [*shapes, *itertools.product(settings.shapes, names)]:
            task = functools.partial(versions.build, way, shape, name, settings.dtype)
            (beside if way.build is None else alone)[way, shape, name] = task
    for step in (*decoding.copies(), *steps):
        for size in (decoding.CHECKED, *settings.decode) if settings.decode else ():
            task = functools.partial(decoding.build, step, size, settings.dtype)
            (beside if step.build is None else alone)[step, size] = task
    programs = {}
    for key, program in clock.build_all(beside, alone):
        programs[key] = program
        result = {"error": one_line(program)} if isinstance(program, Exception) else {"compile_s": program.compile_s}
        yield {"measurement": "build", **_what(key), **result}
    return programs


def _with_peers[Way: (Version, decoding.Step)](
    own: Sequence[Way], names: Sequence[str], make: Callable[[str], list[Way]]
) -> tuple[list[Row], list[Way]]:
    """Lines that say which peers cannot be imported; our own, and what the others offer."""
    failed: list[Row] = []
    found = list(own)
    for name in names:
        try:
            found += make(name)
        except Exception as error:
            failed.append({"measurement": "check", "version": name, "peer": True, "error": one_line(error)})
    return failed, found


def _right[Way: (Version, decoding.Step)](
    ways: Sequence[Way], check: Callable[[Way], Iterator[Row]]
) -> Generator[Row, None, list[Way]]:
    """Those that are right; what another does a line says."""
    right = []
    for way in ways:
        try:
            yield from check(way)
            right.append(way)
        except Exception as error:
            yield {"measurement": "check", "version": way.name, "peer": way.peer, "error": one_line(error)}
    return right


def check(version: Version, programs: Programs, settings: Settings) -> Iterator[Row]:
    """The errors of a version; raises WrongResultError where it is not the recurrence."""
    name = [name for name in settings.passes if name in version.passes][-1]
    program = clock.built(programs[version, settings.checked, name])
    for gate in settings.gates:
        errors = versions.errors(version, program, settings.checked, gate, settings.dtype)
        yield {"measurement": "check", **_who(version), "gates": gate, "relative_rms": errors}
        _refuse(f"{version.name}, {gate} gates", versions.beyond_bounds(version, errors, settings.dtype))


def check_step(step: decoding.Step, programs: Programs, settings: Settings) -> Iterator[Row]:
    """The same of a step."""
    errors = decoding.errors(step, clock.built(programs[step, decoding.CHECKED]), settings.dtype)
    yield {"measurement": "check", "version": step.name, "peer": step.peer, "state": step.state, "relative_rms": errors}
    _refuse(f"{step.name}, a step", decoding.beyond_bounds(step, errors, settings.dtype))


def _refuse(what: str, beyond: Sequence[str]) -> None:
    if beyond:
        raise WrongResultError(f"{what}: relative RMS too large: {', '.join(beyond)}")


def measure(known: Sequence[Version], programs: Programs, shape: Shape, settings: Settings) -> Iterator[Row]:
    """Both passes of all versions on the same inputs; a version that fails (out of memory) says so in its line.

    What a version is compared with is the fastest peer of its kind. Raw inputs come with the first gates alone.
    """
    for name, gate in itertools.product(settings.passes, settings.gates):
        what = {"measurement": "time", **versions.sizes(shape), "gates": gate, "pass": name}
        inputs = versions.draw(shape, gate, settings.dtype)
        samples = {}
        for version in known:
            if name in version.passes and (version.kind == "activated" or gate == settings.gates[0]):
                try:
                    arguments = versions.arguments(version, inputs)
                    samples[version] = clock.warm_up(programs[version, shape, name], *arguments)
                except Exception as error:
                    yield {**what, **_who(version), "error": one_line(error)}
        times = clock.interleave(samples)
        for version, row in times.items():
            peers = [t["median_ms"] for other, t in times.items() if other.peer and other.kind == version.kind]
            ratio = row["median_ms"] / min(peers) if peers else None
            cost = {name: getattr(samples[version].program, name) for name in ("repeats", "temporary_bytes")}
            yield {**what, **_who(version), **row, "over_fastest_peer": ratio, **cost}


def _what(key: Any) -> Row:
    """Of which a program is: of a ceiling, a version with a shape and a pass, or a step with a size."""
    if isinstance(key, str):
        return {"version": key, "peer": True}
    if isinstance(key[0], Version):
        version, shape, name = key
        return {**_who(version), **versions.sizes(shape), "pass": name}
    return decoding.what(*key)


def _label(version: Version) -> str:
    return f"{version.name}, {version.kind}"


def _who(version: Version) -> Row:
    return {"version": version.name, "peer": version.peer, "inputs": version.kind}


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)  # tokamax warns of every shape that it has no tuning for

    def plan() -> tuple[Row, Iterator[Row]]:
        what = _SHAPES.value, _DECODE.value, _GATES.value, _PASSES.value
        settings = parse(*what, _IMPLEMENTATIONS.value, _PEERS.value, _ONLY.value, _DTYPE.value)
        try:
            wait = clock.queue(_QUEUE.value)
        except OSError as error:
            raise ConfigError(f"--queue={_QUEUE.value}: {error.strerror}; give a file that can be written") from error
        return header(settings), run(settings, wait)

    rows = record(argv, plan)
    for measurement, table in (("time", bench_tables.times), ("decode", bench_tables.decoding)):
        if any(row["measurement"] == measurement for row in rows):
            print(table(rows))
    if failed := {row["version"] for row in rows if "error" in row and not row["peer"]}:
        sys.exit(f"error: {', '.join(sorted(failed))}: failed or wrong, see the lines with an error")


if __name__ == "__main__":
    app.run(main, flags_parser=read_flags)
