"""The tables that end the benchmark."""

import itertools
from collections.abc import Sequence

from experiments import tables
from experiments.commands import Row
from experiments.versions import PASSES


def times(rows: Sequence[Row]) -> str:
    """A row a shape, gates and version: ms (median, and the minimum in brackets) and over the fastest peer's median."""
    head = ["B x T x H", "gates", "version", "inputs"]
    for name in PASSES:
        head += [f"{name}, ms", "over peer", "temporary MiB"]
    body: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for row in rows:
        if row["measurement"] == "time":
            shape = " x ".join(str(row[axis]) for axis in "BTH")
            key = (shape, row["gates"], row["version"], row["inputs"])
            body.setdefault(key, {name: [""] * 3 for name in PASSES})[row["pass"]] = _cells(row)
    return tables.align([head, *([*key, *itertools.chain(*cells.values())] for key, cells in body.items())])


def decoding(rows: Sequence[Row]) -> str:
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
        if row["measurement"] == "decode" and "error" not in row
    ]
    return tables.align([head, *body])


def _cells(row: Row) -> list[str]:
    if "error" in row:
        return ["failed", "", ""]
    ratio = row["over_fastest_peer"]
    return [
        f"{row['median_ms']:.3f} ({row['min_ms']:.3f})",
        f"{ratio:.2f}" if ratio else "",
        f"{row['temporary_bytes'] / 2**20:,.0f}",
    ]
