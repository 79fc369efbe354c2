"""`dreamfleet plot` from the command line."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from dreamfleet import plotting
from dreamfleet.cli import main
from dreamfleet.config import RunConfig


def run(logdir: Path, level: float, **settings: Any) -> str:
    """A run's directory whose scores rise to a level."""
    logdir.mkdir()
    (logdir / "config.json").write_text(RunConfig(logdir=logdir, **settings).to_json())
    rows = [{"step": 100 * n, "episode/score": level * min(1, n / 50)} for n in range(1, 301)]
    (logdir / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(logdir)


def table(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    lines = capsys.readouterr().out.splitlines()[1:-1]
    return [[cell.strip() for cell in line.strip().split("  ") if cell.strip()] for line in lines]


def test_seeds_are_one_curve_and_settings_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run(tmp_path / f"{seed}", 100 + seed, seed=seed) for seed in range(3)]
    runs.append(run(tmp_path / "other", 50, train_ratio=8.0, steps=7))
    out = tmp_path / "new" / "curves.png"
    assert main(["plot", *runs, "--out", str(out)]) == 0
    assert table(capsys) == [
        [
            "gym:CartPole-v1",
            "dreamer, train_ratio=64.0",
            "3",
            "30,000",
            "101",
            "98.52 to 103.5",
            "100 to 102",
        ],
        ["gym:CartPole-v1", "dreamer, train_ratio=8.0", "1", "30,000", "50"],
    ]
    data = out.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 700
    assert height > 500
    assert [each.name for each in out.parent.iterdir()] == ["curves.png"]


def test_runs_of_one_seed_are_not_called_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run(tmp_path / f"{number}", 100) for number in range(3)]
    out = tmp_path / "curves.svg"
    assert main(["plot", *runs, "--out", str(out)]) == 0
    assert table(capsys)[0][2] == "1 (3 runs)"


def test_a_picture_has_as_many_panels_as_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plotting, "save_figure", lambda figure, _: drawn.append(figure))
    for count in (1, 3, 4, 7):
        runs = [run(tmp_path / f"{count}-{n}", 1, task=f"gym:Task{n}-v0") for n in range(count)]
        assert main(["plot", *runs]) == 0
        assert sum(axis.get_visible() for axis in drawn[-1].axes) == count


def test_runs_that_differ_in_anything_are_not_seeds_of_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = {"envs": 2, "batch_size": 3, "batch_length": 40, "train_ratio": 1.0}
    runs = [
        run(tmp_path / "plain", 10),
        # A setting that the first run does not have at all.
        run(tmp_path / "option", 20, env_options={"repeat": 2}),
        # More settings than a label holds, and the last one differs.
        run(tmp_path / "one", 30, **many),
        run(tmp_path / "two", 40, **many | {"train_ratio": 2.0}),
    ]
    assert main(["plot", *runs, "--out", str(tmp_path / "curves.png")]) == 0
    rows = table(capsys)
    assert [row[2:] for row in rows] == [
        ["1", "30,000", "10"],
        ["1", "60,000", "20"],
        ["1", "30,000", "30"],
        ["1", "30,000", "40"],
    ]
    labels = [row[1] for row in rows]
    assert len(set(labels)) == 4
    assert labels[2].endswith("... (one)")


def test_a_repeat_that_is_given_counts_also_for_atari(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, options in (("given", {"repeat": 1}), ("not", {}), ("none", {"repeat": None})):
        logdir = run(tmp_path / name, 5, task="atari100k:pong", env_options=options)
        assert main(["plot", logdir, "--out", str(tmp_path / "curves.png")]) == 0
    assert [row[3] for row in table(capsys) if row[0] == "atari100k:pong"] == [
        *("30,000", "120,000", "120,000"),
    ]


def test_frames_are_compared_with_what_is_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Published curves count frames: 30,000 steps with every action taken twice are 60,000."""
    options = {"task": "dmc:walker_stand", "env_options": {"repeat": 2}}
    logdir = run(tmp_path / "walker", 700, **options)
    out = tmp_path / "curves.svg"
    assert main(["plot", logdir, "--out", str(out)]) == 0
    assert table(capsys) == [
        ["dmc:walker_stand", "dreamer", "1", "60,000", "700", "537 ± 121"],
    ]
    drawn = out.read_text()
    assert "<svg" in drawn


def test_panels_are_tasks(tmp_path: Path) -> None:
    tasks = ["gym:CartPole-v1", "gym:Pendulum-v1", "bundled:catch", "atari100k:pong"]
    runs = [run(tmp_path / task.replace(":", "-"), 10, task=task) for task in tasks]
    assert main(["plot", *runs, "--out", str(tmp_path / "curves.png")]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "holds no run"),
        (["RUN", "--out", "curves.jpeg"], "must end in .png"),
        (["RUN", "--bins", "1"], "at least 2"),
        ([], "LOGDIRS is missing"),
    ],
)
def test_mistakes_are_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    logdir = run(tmp_path / "run", 10)
    assert main(["plot", *(logdir if word == "RUN" else word for word in arguments)]) == 2
    assert words in capsys.readouterr().err


def test_without_matplotlib_the_fix_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plot", run(tmp_path / "run", 10), "--out", str(tmp_path / "c.png")]) == 1
    assert "pip install 'dreamfleet[plot]'" in capsys.readouterr().err


def test_evaluations_are_drawn_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that are only evaluated in another way are seeds of each other."""
    logdir = run(tmp_path / "run", 100, eval_every=1000)
    other = run(tmp_path / "other", 100, seed=1, eval_every=2000, eval_envs=3)
    rows = [{"step": 1000 * n, "mean": 10.0 * n, "kind": "round"} for n in range(1, 21)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for each in (logdir, other):
        (Path(each) / "evaluations.jsonl").write_text(text)
    out = str(tmp_path / "curves.png")
    assert main(["plot", logdir, other, "--evaluations", "--out", out]) == 0
    (row,) = table(capsys)
    assert row[2:5] == ["2", "20,000", "195"]  # the mean of the last tenth: 190 and 200
    assert main(["plot", run(tmp_path / "no", 1), "--evaluations", "--out", out]) == 1
    assert "holds no evaluations" in capsys.readouterr().err


def test_settings_are_compared_over_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A method is what differs within a task. Tasks have levels, steps and options of their own."""
    tasks = {"dmc:walker_walk": (500, {"repeat": 2}), "gym:CartPole-v1": (250, {})}
    runs = [
        run(
            tmp_path / f"{task[:3]}-{seed}-{ratio}", level * ratio / 16, task=task, seed=seed,
            train_ratio=float(ratio), steps=level, env_options=options,
        )
        for ratio in (8, 16)
        for task, (level, options) in tasks.items()
        for seed in range(3)
    ]  # fmt: skip
    assert main(["plot", *runs, "--aggregate", "--out", str(tmp_path / "curves.png")]) == 0
    lines = table(capsys)[-2:]
    # dm_control: 250 and 500 of 1000; CartPole: 125 and 250 between the curves' lowest and highest.
    low = 125 / 50
    both = [(0.25 * 3 + 3 * (125 - low) / (250 - low)) / 6, (0.5 * 3 + 3) / 6]
    for line, ratio, expected in zip(lines, ("8.0", "16.0"), both, strict=True):
        assert line[:3] == [f"dreamer, train_ratio={ratio}", "2", "6"]
        assert float(line[3].split()[0]) == pytest.approx(expected, abs=0.02)
    assert lines[1][4] == "1 [1, 1]"
