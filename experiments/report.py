"""The table of a workdir: for each mixer the learning rate that its grid chose, and there the median and every seed."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments import metrics
from experiments.models import MIXERS
from experiments.tables import align

Line = dict[str, Any]
THRESHOLD = 0.95  # of held-out tokens, for "steps to 95 %"


@dataclasses.dataclass(frozen=True)
class Run:
    """The log of one mixer, and the median of its speed."""

    mixer: str
    header: dict[str, Any]
    lines: list[Line]
    tokens_per_second: float

    @property
    def score(self) -> str:
        """The scalar that decides: bits a byte where there are such, else the accuracy of held-out tokens."""
        return "eval_bits_per_byte" if "eval_bits_per_byte" in self.lines[-1] else "eval_accuracy"

    @property
    def rate(self) -> float:
        """The learning rate with the best median score at the last step; equal scores are told apart by the loss."""
        sign = 1 if self.score == "eval_bits_per_byte" else -1

        def badness(rate: float) -> tuple[float, float]:
            last = self.last(rate)
            return sign * _median(last, self.score), _median(last, "eval_loss")

        return min(dict.fromkeys(line["learning_rate"] for line in self.lines), key=badness)

    def last(self, rate: float) -> list[Line]:
        """The last line of every seed at `rate`."""
        step = self.lines[-1]["step"]
        return [line for line in self.lines if line["step"] == step and line["learning_rate"] == rate]

    def curve(self, name: str) -> dict[int, tuple[list[int], list[float]]]:
        """Steps and values of the scalar `name` at the chosen rate, by seed."""
        rate = self.rate
        curves: dict[int, tuple[list[int], list[float]]] = {}
        for line in self.lines:
            if line["learning_rate"] == rate and name in line:
                steps, values = curves.setdefault(line["seed"], ([], []))
                steps.append(line["step"])
                values.append(line[name])
        return curves

    def steps_to(self, accuracy: float) -> list[float]:
        """For each seed at the chosen rate, the first evaluated step with that accuracy; infinity if none."""
        curves = self.curve("eval_accuracy").values()
        return [next((s for s, a in zip(*curve, strict=True) if a >= accuracy), float("inf")) for curve in curves]


def load(workdir: Path) -> list[Run]:
    """The finished runs in `workdir`, in the order of `models.MIXERS`."""
    runs = []
    for path in sorted(workdir.glob("*/metrics.jsonl"), key=lambda path: MIXERS.index(path.parent.name)):
        header, lines = metrics.read(path)
        if lines and lines[-1]["step"] == header["config"]["train"]["steps"]:
            _, timing = metrics.read(path.with_name("timing.jsonl"))
            speed = statistics.median(line["tokens_per_second"] for line in timing)
            runs.append(Run(header["config"]["model"]["mixer"], header, lines, speed))
    return runs


def table(runs: Sequence[Run]) -> str:
    """The comparison, a row a mixer, in Markdown."""
    if runs[0].score == "eval_bits_per_byte":
        return align([_TEXT_HEAD, *(_text_row(run) for run in runs)])
    return align([_RECALL_HEAD, *(_recall_row(run) for run in runs)])


def slices(runs: Sequence[Run]) -> str:
    """Bits a byte by position in the document and by decade, a column a mixer; empty for tasks without."""
    names = [name for name in runs[0].lines[-1] if name.startswith("eval_bits_per_byte_")]
    names.sort(key=lambda name: int(name.split("_")[-1].removesuffix("s")))
    by_position = [name for name in names if "_from_" in name]
    by_decade = [name for name in names if "_from_" not in name]
    return (
        _slice_table("from byte", by_position, runs) + "\n" + _slice_table("decade", by_decade, runs) if names else ""
    )


_WHAT = ["mixer", "parameters", "rate"]
_RECALL_HEAD = [*_WHAT, "token accuracy", "whole sequence", "steps to 95 %", "tokens/s", "token accuracy by seed"]
_TEXT_HEAD = [*_WHAT, "bits a byte", "token accuracy", "tokens/s", "bits a byte by seed"]


def _recall_row(run: Run) -> list[str]:
    last = run.last(run.rate)
    steps = statistics.median(run.steps_to(THRESHOLD))
    return [
        *_what(run),
        f"{_median(last, 'eval_accuracy'):.3f}",
        f"{_median(last, 'eval_sequence_accuracy'):.3f}",
        "not reached" if steps == float("inf") else f"{steps:,.0f}",
        f"{run.tokens_per_second:,.0f}",
        _by_seed(last, "eval_accuracy"),
    ]


def _text_row(run: Run) -> list[str]:
    last = run.last(run.rate)
    return [
        *_what(run),
        f"{_median(last, 'eval_bits_per_byte'):.3f}",
        f"{_median(last, 'eval_accuracy'):.3f}",
        f"{run.tokens_per_second:,.0f}",
        _by_seed(last, "eval_bits_per_byte"),
    ]


def _slice_table(title: str, names: Sequence[str], runs: Sequence[Run]) -> str:
    """Median bits a byte, a row a slice and a column a mixer."""
    rows = ([name.split("_")[-1], *(f"{_median(run.last(run.rate), name):.3f}" for run in runs)] for name in names)
    return align([[title, *(run.mixer for run in runs)], *rows])


def _what(run: Run) -> list[str]:
    return [run.mixer, f"{run.header['parameters']:,}", f"{run.rate:g}"]


def _by_seed(last: Iterable[Line], name: str) -> str:
    return ", ".join(f"{line['seed']}: {line[name]:.3f}" for line in last)


def _median(lines: Iterable[Line], name: str) -> float:
    """Not a number, from a run that diverged, counts as infinity."""
    return statistics.median(float("inf") if math.isnan(line[name]) else line[name] for line in lines)
