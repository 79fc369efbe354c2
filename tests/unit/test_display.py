"""The picture of a run in the terminal."""

from __future__ import annotations

import io
import itertools
import json
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dreamfleet import display
from dreamfleet.cli import commands, main
from dreamfleet.display import live, picture, sparkline
from dreamfleet.fleet.record import MachineStatus, ProcessUsage, RunStatus, Scores, WorkerStatus
from dreamfleet.fleet.supervisor import silent


def worker(name: str, memory: int = 41_000_000, cpu: float = 0.1, **changes: Any) -> WorkerStatus:
    usage = ProcessUsage(cpu, memory)
    made = WorkerStatus(name, name.split("-")[0], "running", 7, "here", 0.0, 0, "", usage, 131)
    return replace(made, **changes)


def lost(name: str, error: str = "") -> WorkerStatus:
    return worker(
        name, state="restarting", pid=None, seconds=0.0, restarts=1, error=error, usage=None
    )


WORKERS = (
    worker("agent", 620_000_000, 1.4),
    worker("replay", 85_000_000),
    worker("logger", 62_000_000, 0.0),
    worker("env-0"),
    worker("env-1", seconds=7, restarts=1),
)
STATUS = RunStatus(
    pid=1,
    created=0.0,
    host="here",
    started=0.0,
    task="gym:CartPole-v1",
    logdir="runs/pole",
    steps=12_000,
    train_ratio=32.0,
    state="running",
    responding=True,
    step=8_400,
    scores=Scores(3, 400.0, (10.0, 20.0, 400.0), (10.0, 20.0, 400.0)),
    metrics={"score": 143.3, "learner/updates": 4012.0, "learner/updates_per_second": 32.31},
    steps_per_second=64.2,
    seconds=131,
    waiting="",
    workers=WORKERS,
    supervisor=ProcessUsage(0.02, 58_000_000),
)


def shown(status: RunStatus, width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(picture(status))
    return console.export_text()


def test_everything_a_person_asks_is_there() -> None:
    text = shown(STATUS)
    for words in (
        "gym:CartPole-v1",
        "70%",
        "8,400 of 12,000 steps",
        "2:11 running, 0:56 left, not saved yet",
        "143.3   3 episodes, best 400",
        "64.2 steps/s",
        "32.3 updates/s",
        "runs/pole",
    ):
        assert words in text
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    (env,) = (line for line in lines if "env x 2" in line)
    assert "running, 1 restart" in env
    assert "82MB" in env
    assert "0:07" in env  # the youngest


def test_the_age_of_the_checkpoint_is_shown() -> None:
    saved = replace(STATUS, checkpoint_age=75.0)
    assert "2:11 running, 0:56 left, saved 1:15 ago" in shown(saved)
    assert "saved 1:15 ago" in saved.line()
    assert "saved" not in shown(replace(STATUS, metrics={})), "there is nothing to save yet"


def row(status: RunStatus, name: str) -> str:
    return next(line for line in shown(status).splitlines() if name in line)


def test_a_worker_that_is_restarting_is_said_and_why() -> None:
    one = replace(STATUS, workers=(*WORKERS[:4], lost("env-1", "ValueError: the pole is broken")))
    assert "1 restarting, 1 restart" in row(one, "env x 2")
    assert "env-1 failed: ValueError: the pole is broken" in shown(one)
    agent = replace(STATUS, workers=(lost("agent"), *WORKERS[1:]))
    assert "● restarting, 1 restart" in row(agent, "agent")
    ended = tuple(replace(each, state="ended", usage=None) for each in WORKERS)
    assert "● ended" in row(replace(STATUS, workers=ended), "agent")


def test_machines_that_have_joined_are_shown_and_those_that_left_for_a_while() -> None:
    cpu_box = MachineStatus("cpu-box", "joined", 8, 0, 3725.0, 0.4, 12_345, 812.31, 0, "")
    laptop = MachineStatus("laptop", "joined", 4, 1, 65.0, 0.4, 345, 101.7, 2, "the pole is broken")
    away = MachineStatus("a" * 60, "away", 4, 0, 900.0, 14.0, 345, 33.0, 0, "")
    left = MachineStatus("other", "left", 4, 0, 30.0, 30.0, 9, 0.0, 0, "has been silent for 60 s")
    old = replace(left, name="forgotten", seconds=5000.0)
    status = replace(STATUS, machines=(cpu_box, laptop, away, left, old))
    assert "machine" not in shown(STATUS)
    assert "● joined 1:02:05 ago" in row(status, "cpu-box")
    assert row(status, "cpu-box").split()[6:8] == ["8", "812.3"]
    assert "4 + 1 eval" in row(status, "laptop")
    assert "● away for 0:14" in row(status, "aaa")
    assert "33" not in row(status, "aaa")  # what it made is over
    assert "● left 0:30 ago" in row(status, "other")
    assert "laptop: the pole is broken" in shown(status)
    assert "other: has been silent for 60 s" in shown(status)
    assert "forgotten" not in shown(status)
    assert max(map(len, shown(status).splitlines())) <= 80
    line = status.line()
    assert "2 machines joined (13 environments)" in line
    assert "1 machine away" in line
    many = replace(status, machines=tuple(replace(cpu_box, name=f"box-{n}") for n in range(20)))
    assert "and 8 more machines" in shown(many)


def test_a_failure_is_shown_for_a_while() -> None:
    error = "OSError: no space left"
    recent, old = (
        worker("replay", error=error, seconds=30),
        worker("replay", error=error, seconds=900),
    )
    assert f"replay failed: {error}" in shown(replace(STATUS, workers=(recent,)))
    assert error not in shown(replace(STATUS, workers=(old,)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": "ended"}, "not under way. The same command resumes it."),
        ({"state": "ended", "step": 12_000}, "has ended: it has made all its steps"),
        ({"state": "failed"}, "The run has failed. The same command resumes it."),
        ({"waiting": "the logger does not respond"}, "Waiting: the logger does not respond."),
        ({"waiting": "the replay waits for 7 steps"}, "Waiting: the replay waits for 7 steps."),
        ({"metrics": {"learner/start": "resuming from there"}}, "agent resuming from there"),
    ],
)
def test_what_stands_in_the_way_is_said(change: dict[str, Any], words: str) -> None:
    def text(status: RunStatus) -> str:
        return " ".join(shown(status).split())  # columns are as wide as the library makes them

    assert words in text(replace(STATUS, **change))
    assert words not in text(STATUS)


def test_a_run_without_an_end_has_no_bar() -> None:
    text = shown(replace(STATUS, steps=0, scores=Scores()))
    assert "%" not in text
    assert "left" not in text


def test_sparks_rise_with_the_scores() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0] * 50 + [1.0] * 50, 4) == "▁▁██"
    assert len(sparkline(list(range(1000)), 26)) == 26
    assert sparkline([5, 5]) == "▄▄"
    assert sparkline([]) == ""


class Looking:
    """Finds a run that continues for a while and then has ended."""

    def __init__(self, logdir: Path, score_bytes: float = 0.0) -> None:
        self._steps: Iterator[int] = iter((2000, 3000, 4000))

    def look(self, patience: float = 0.0) -> RunStatus:
        step = next(self._steps)
        return replace(STATUS, step=step, state="running" if step < 4000 else "ended")


def test_following_without_a_terminal_lasts_until_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dreamfleet.fleet.status.Watcher", Looking)
    monkeypatch.setattr(commands, "_STATUS_SECONDS", 0.0)
    svg = tmp_path / "new" / "status.svg"
    assert main(["status", str(tmp_path), "--follow", "--svg", str(svg)]) == 0
    pictures = capsys.readouterr().out.split("dreamfleet gym:CartPole-v1")[1:]
    assert [
        next(step for step in ("1,000", "2,000", "3,000", "4,000") if f"{step} of" in each)
        for each in pictures
    ] == ["2,000", "3,000", "4,000"]
    assert "not under way" in pictures[-1]
    assert "<svg" in svg.read_text()


def test_without_a_terminal_there_are_lines(tmp_path: Path) -> None:
    plain, terminal = Console(force_terminal=False), Console(force_terminal=True, quiet=True)
    said: list[str] = []
    with live(tmp_path, plain, said.append) as progress:
        progress("a line")
    assert said == ["a line"]
    with live(tmp_path, terminal) as progress:
        assert progress is silent


class Endless(Looking):
    def __init__(self, logdir: Path) -> None:
        self._steps = itertools.count(1000, 1000)


def test_notebook_shows_run_in_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    enough = threading.Event()

    class Place:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            assert raw
            assert "<pre>" in data["text/html"]
            shown.append(data["text/plain"])
            enough.set()

    def show(data: dict[str, str], *, raw: bool, display_id: bool) -> Place:
        assert raw
        assert display_id
        shown.append(data["text/plain"])
        return Place()

    ipython = types.SimpleNamespace(
        get_ipython=lambda: types.SimpleNamespace(kernel="a kernel"),
        display=types.SimpleNamespace(display=show),
    )
    monkeypatch.setitem(sys.modules, "IPython", ipython)  # type: ignore[arg-type]
    monkeypatch.setattr(display, "Watcher", Endless)
    monkeypatch.setattr(display, "_SECONDS_BETWEEN_LOOKS", 0.01)
    with live(tmp_path) as progress:
        assert progress is silent
        assert enough.wait(120)
    assert "1,000 of 12,000 steps" in shown[0]
    assert "2,000 of 12,000 steps" in shown[1]


def test_json_is_one_object_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dreamfleet.fleet.status.Watcher", Looking)
    monkeypatch.setattr(commands, "_STATUS_SECONDS", 0.0)
    assert main(["status", str(tmp_path), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["step"], found["state"], found["score"]) == (2000, "running", 143.3)
    assert [worker["name"] for worker in found["workers"]] == [each.name for each in WORKERS]
    assert found["workers"][0]["usage"] == {"cpu": 1.4, "memory": 620_000_000}
    assert main(["status", str(tmp_path), "--json", "--follow"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2000, 3000, 4000]


def test_lines_that_say_nothing_new_are_said_now_and_then() -> None:
    said: list[str] = []
    told = display.calm(said.append)
    for seconds in range(9, 29, 2):
        told("step 0 of 1,200  0 steps/s")
        told(f"Waiting: the learner is compiling the agent ({seconds} s so far).")
    assert said == [
        "step 0 of 1,200  0 steps/s",
        "Waiting: the learner is compiling the agent (9 s so far).",
    ]
    told("step 8 of 1,200  4 steps/s")
    told("step 9 of 1,200  4 steps/s")
    assert len(said) == 4
    often = display.calm(said.append, seconds=0.0)
    often("again")
    often("again")
    assert said[4:] == ["again", "again"]
