"""Tables and curves from logs written by hand, with the numbers worked out by hand."""

import json

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import metrics, plot, report, sweep
from experiments.errors import ConfigError


def write(workdir, mixer, lines, *, steps=300, speeds=(100.0, 900.0, 300.0)):
    """A run's two logs; `lines` are (step, seed, rate, scalars)."""
    header = {"config": {"model": {"mixer": mixer}, "train": {"steps": steps}}, "seed": [0, 1, 2], "parameters": 1234}
    folder = workdir / mixer
    folder.mkdir(parents=True)
    rows = [{"step": step, "seed": seed, "learning_rate": rate} | scalars for step, seed, rate, scalars in lines]
    timing = [{"step": 100 * (i + 1), "tokens_per_second": speed} for i, speed in enumerate(speeds)]
    for name, body in (("metrics", rows), ("timing", timing)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [header, *body]))


def recall(accuracies, rate, loss=1.0):
    """Lines of three seeds; `accuracies[seed]` are the held-out accuracies at steps 100, 200, 300."""
    return [
        (
            100 * (i + 1),
            seed,
            rate,
            {"loss": 9.0, "eval_accuracy": a, "eval_sequence_accuracy": a / 2, "eval_loss": loss},
        )
        for i in range(3)
        for seed, a in ((seed, row[i]) for seed, row in enumerate(accuracies))
    ]


def cells(table):
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]


@pytest.fixture
def workdir(tmp_path):
    good = recall([(0.1, 0.96, 0.97), (0.2, 0.94, 0.95), (0.3, 0.4, 0.5)], 1e-3)
    lucky = recall([(0.1, 0.2, 0.3), (0.1, 0.2, 0.3), (0.1, 0.2, 1.0)], 1e-4)  # the best seed, not the best median
    write(tmp_path, "kda", [*lucky, *good])
    slow = recall([(0.1, 0.1, 0.2)] * 3, 1e-3, loss=2.0), recall([(0.1, 0.1, 0.2)] * 3, 1e-4, loss=float("nan"))
    write(tmp_path, "attention", [*slow[1], *slow[0]])
    write(tmp_path, "gla", good, steps=400)
    return tmp_path


def test_recall_table(workdir):
    kda, attention = report.load(workdir)  # by kind, not by name; gla has not finished
    assert (kda.mixer, attention.mixer) == ("kda", "attention")
    assert (kda.rate, attention.rate) == (1e-3, 1e-3)
    assert kda.steps_to(0.95) == [200, 300, float("inf")]
    rows = cells(report.table([kda, attention]))
    assert report.slices([kda, attention]) == ""
    assert rows[0][:4] == ["mixer", "parameters", "rate", "token accuracy"]
    assert rows[2] == ["kda", "1,234", "0.001", "0.950", "0.475", "300", "300", "0: 0.970, 1: 0.950, 2: 0.500"]
    assert rows[3][:6] == ["attention", "1,234", "0.001", "0.200", "0.100", "not reached"]


def test_text_tables(tmp_path):
    def scalars(bits):
        return {
            "eval_loss": bits * 0.7,
            "eval_accuracy": 0.5,
            "eval_bits_per_byte": bits,
            "eval_bits_per_byte_from_64": bits - 1,
            "eval_bits_per_byte_from_0": bits + 1,
            "eval_bits_per_byte_1790s": bits + 0.25,
        }

    lines = [
        (300, seed, rate, scalars(bits)) for rate in (1e-3, 1e-4) for seed, bits in enumerate((2.0, 3.0, 2.5 + rate))
    ]
    write(tmp_path, "gdn", lines)
    (run,) = report.load(tmp_path)
    assert run.rate == 1e-4
    head, _, row = cells(report.table([run]))
    assert "bits a byte" in head
    assert row[3:] == ["2.500", "0.500", "300", "0: 2.000, 1: 3.000, 2: 2.500"]
    position, decade = map(cells, report.slices([run, run]).split("\n\n"))
    assert [position[0], *position[2:]] == [
        ["from byte", "gdn", "gdn"],
        ["0", "3.500", "3.500"],
        ["64", "1.500", "1.500"],
    ]
    assert [decade[0], *decade[2:]] == [["decade", "gdn", "gdn"], ["1790s", "2.750", "2.750"]]


def test_plot_shows_the_median_and_every_seed(workdir):
    runs = report.load(workdir)
    ax = Figure().subplots()
    plot._panel(ax, "recall", runs)
    median, *seeds = [line.get_ydata() for line in ax.get_lines()[:4]]
    assert list(median) == [0.2, 0.94, 0.95]
    assert sorted(map(list, seeds)) == [[0.1, 0.96, 0.97], [0.2, 0.94, 0.95], [0.3, 0.4, 0.5]]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["KDA", "full attention"]
    plot.save(workdir / "plot.png", {"recall": runs, "again": runs})
    image = matplotlib.image.imread(workdir / "plot.png")
    assert image.shape[1] > 1500
    assert np.ptp(image[..., :3]) == 1


def test_a_log_opened_at_a_step_drops_what_came_after(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = metrics.Log(path, {"seed": [0]}, 0)
    for step in (10, 20, 30):
        log.append([{"step": step, "seed": seed, "loss": 0.1} for seed in (0, 1)])
    log.close()
    whole = path.read_text()
    path.write_text(whole + '{"step": 40, "se')  # a kill in the middle of a line
    assert len(metrics.read(path)[1]) == 6
    log = metrics.Log(path, {"seed": ["ignored"]}, 20)
    assert path.read_text() == "".join(whole.splitlines(keepends=True)[:5])
    log.append([{"step": 30, "seed": seed, "loss": 0.1} for seed in (0, 1)])
    log.close()
    assert path.read_text() == whole
    metrics.Log(path, {"seed": [7]}, 0).close()
    assert path.read_text() == '{"seed": [7]}\n'


def test_a_workdir_serves_one_process_at_a_time(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with sweep.lock(tmp_path), pytest.raises(ConfigError, match="another process trains there"), sweep.lock(tmp_path):
        pass
    with sweep.lock(tmp_path):
        pass
