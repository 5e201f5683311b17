"""The project in two to three minutes on a CPU: recall of overwritten values, and a language model on bytes.

    python -m experiments.demo [--workdir=runs/demo]

Trains KDA, Gated DeltaNet and KDA without the delta rule on overwrite recall, and KDA on the text; prints the tables
and plots the curves.
"""

from pathlib import Path

from absl import app, flags, logging

from experiments import plot, report, sweep
from experiments.configs import overwrite, text

_WORKDIR = flags.DEFINE_string("workdir", "runs/demo", "Folder for metrics, checkpoints and the plot.")


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)  # the checkpoint library tells every step of a save
    workdir = Path(_WORKDIR.value)
    recall, language = overwrite.get_config("tiny"), text.get_config("tiny")
    recall.model.mixer, language.model.mixer = "kda,gdn,gla", "kda"
    print(
        f"Trains four small models on this CPU, two to three minutes; an interrupted run in {workdir} goes on.",
        flush=True,
    )
    panels = {
        f"Overwrite recall: the last value written (chance {1 / recall.task.num_values:.2f})": sweep.run(
            recall, workdir / "overwrite"
        ),
        "Bytes of the State of the Union": sweep.run(language, workdir / "text"),
    }
    for title, runs in panels.items():
        print(f"\n{title}\n\n{report.table(runs)}")
    plot.save(workdir / "demo.png", panels)
    print(f"The plot is {workdir / 'demo.png'}")


if __name__ == "__main__":
    app.run(main)
