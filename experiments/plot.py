"""Held-out accuracy, or bits a byte, against steps: for each mixer the median over seeds, and every seed faintly."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.report import Run

# Mixers that differ in the delta rule alone share a colour (Okabe and Ito's) and differ in the dashes.
BLUE, ORANGE, GREEN, PURPLE, BLACK = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000"
STYLES = {
    "kda": ("KDA", BLUE, "-"),
    "gla": ("KDA, no delta rule (gla)", BLUE, "--"),
    "gdn": ("Gated DeltaNet", ORANGE, "-"),
    "sgla": ("Gated DeltaNet, no delta rule (sgla)", ORANGE, "--"),
    "deltanet": ("DeltaNet", GREEN, "-"),
    "linear": ("DeltaNet, no delta rule (linear)", GREEN, "--"),
    "mamba2": ("Mamba-2 style", PURPLE, "-."),
    "attention": ("full attention", BLACK, ":"),
}
LABELS = {
    "eval_accuracy": "accuracy of held-out tokens",
    "eval_bits_per_byte": "bits a byte, held out (lower is better)",
}


def save(path: Path, panels: Mapping[str, Sequence[Run]]) -> None:
    """Write a PNG with one panel a title."""
    figure = Figure(figsize=(6.4 * len(panels), 5), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (title, runs) in zip(axes, panels.items(), strict=True):
        _panel(ax, title, runs)
    figure.savefig(path, dpi=150)


def _panel(ax: Axes, title: str, runs: Sequence[Run]) -> None:
    for run in runs:
        label, colour, dashes = STYLES[run.mixer]
        curves = list(run.curve(run.score).values())
        steps = curves[0][0]
        median = [statistics.median(values) for values in zip(*(values for _, values in curves), strict=True)]
        ax.plot(steps, median, dashes, color=colour, linewidth=2, label=label)
        if len(curves) > 1:
            for _, values in curves:
                ax.plot(steps, values, dashes, color=colour, linewidth=0.8, alpha=0.35)
    seeds = len(runs[0].header["seed"])
    ax.set(title=title, xlabel="training steps", ylabel=LABELS[runs[0].score])
    if runs[0].score == "eval_accuracy":
        ax.set_ylim(0, 1.02)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    title = "one seed" if seeds == 1 else f"median of {seeds} seeds"
    below = (0.5, -0.13)
    ax.legend(title=title, loc="upper center", bbox_to_anchor=below, ncols=2, frameon=False, fontsize="small")
