"""The picture of a run in the terminal."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dreamfleet.cli import live, main
from dreamfleet.cli import status as status_command
from dreamfleet.cli.live import clock, picture, sparkline
from dreamfleet.config import RunConfig
from dreamfleet.fleet.overview import RoleStatus, RunStatus, Watcher, role_names
from dreamfleet.fleet.record import claim_directory
from dreamfleet.fleet.supervisor import silent
from dreamfleet.transport import resolve

ROLES = (
    RoleStatus("agent", 1, 1.4, 620_000_000, 131),
    RoleStatus("replay", 2, 0.1, 85_000_000, 131),
    RoleStatus("logger", 3, 0.0, 62_000_000, 131),
    RoleStatus("env-0", 4, 0.1, 41_000_000, 131),
    RoleStatus("env-1", 5, 0.1, 41_000_000, 7, restarts=1),
)
STATUS = RunStatus(
    config=RunConfig(steps=12_000, logdir=Path("runs/pole"), envs=2),
    running=True,
    answers=True,
    step=8_400,
    scores=(10.0, 20.0, 400.0),
    metrics={"score": 143.3, "learner/updates": 4012.0, "learner/updates_per_second": 32.31},
    steps_per_second=64.2,
    seconds=131,
    seconds_left=59,
    roles=ROLES,
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
        "2:11 running, 0:59 left",
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


def test_a_role_that_is_away_is_said() -> None:
    lost = (*ROLES[:4], RoleStatus("env-1", restarts=1))
    assert "1 away, 1 restart" in shown(replace(STATUS, roles=lost))
    gone = (RoleStatus("agent"), *ROLES[1:])
    assert "away" in next(line for line in shown(replace(STATUS, roles=gone)).splitlines()
                          if "agent" in line)  # fmt: skip
    done = shown(replace(STATUS, roles=gone, step=12_000))
    assert "away" not in done
    assert "ended" in done


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"running": False}, "not under way"),
        ({"running": False, "step": 12_000}, "has ended: it has made all its steps"),
        ({"answers": False}, "logger does not answer"),
        (
            {"steps_per_second": 0.0, "metrics": {"replay/waiting": "waits for 7 steps"}},
            "waits for 7 steps",
        ),
    ],
)
def test_what_stands_in_the_way_is_said(change: dict[str, object], words: str) -> None:
    assert words in shown(replace(STATUS, **change))
    assert words not in shown(STATUS)


def test_a_run_without_an_end_has_no_bar() -> None:
    text = shown(replace(STATUS, config=RunConfig(steps=0), seconds_left=None, scores=()))
    assert "%" not in text
    assert "left" not in text


def test_sparks_rise_with_the_scores() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0] * 50 + [1.0] * 50, 4) == "▁▁██"
    assert len(sparkline(list(range(1000)), 26)) == 26
    assert sparkline([5, 5]) == "▄▄"
    assert sparkline([]) == ""


def test_clocks_are_short() -> None:
    assert [clock(s) for s in (7, 187, 3723, 270_000)] == ["0:07", "3:07", "1:02:03", "3 d 3 h"]


def test_roles_are_those_of_the_launcher() -> None:
    config = RunConfig(envs=3, eval_envs=2, envs_per_process=2)
    assert role_names(config) == ["agent", "replay", "logger", "env-0", "env-2", "env-3"]
    assert role_names(replace(config, launcher="serial")) == ["all roles"]


def test_a_serial_run_is_one_process_that_is_there(tmp_path: Path) -> None:
    """Its roles are threads: none of them is away because it has no process."""
    config = RunConfig(logdir=tmp_path, launcher="serial", logger_addr=resolve("ipc://{auto}"))
    (tmp_path / "config.json").write_text(config.to_json())
    with claim_directory(tmp_path), Watcher(tmp_path) as watcher:
        status = watcher.look(0.0)
    assert status is not None
    assert [(role.name, role.pid) for role in status.roles] == [("all roles", os.getpid())]
    text = shown(status)
    assert "all roles" in text
    assert "● running" in text
    assert "away" not in text


class Looking:
    """Finds a run that goes on for a while and then has ended."""

    def __init__(self, logdir: Path) -> None:
        self._steps = iter((1000, 2000, 3000, 4000))

    def __enter__(self) -> Looking:
        return self

    def __exit__(self, *_: object) -> None: ...

    def look(self, patience: float = 0.0) -> RunStatus:
        step = next(self._steps)
        return replace(STATUS, step=step, running=step < 4000)


def test_following_without_a_terminal_goes_on_until_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status_command, "Watcher", Looking)
    for name in ("_BETWEEN", "_BETWEEN_PICTURES"):
        monkeypatch.setattr(status_command, name, 0.0)
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
    with live.live(tmp_path, plain) as progress:
        assert progress is live.say
    with live.live(tmp_path, terminal) as progress:
        assert progress is silent


def test_a_run_that_ended_is_shown_with_its_last_logged_step(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(RunConfig(steps=900, logdir=tmp_path).to_json())
    (tmp_path / "scores.jsonl").write_text('{"step": 700, "episode/score": 1.0}\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 800}\n{"step": 900}\n{"step": 95')
    with Watcher(tmp_path) as watcher:
        status = watcher.look(patience=0)
    assert status is not None
    assert status.step == 900
    assert status.scores == (1.0,)
