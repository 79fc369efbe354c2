"""`dreamfleet resume` and `dreamfleet train` in the directory of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

import dreamfleet
from dreamfleet.cli import main
from dreamfleet.config import read_config

FIRST = ["--task", "bundled:dummy", "--agent", "random", "--batch-size", "2", "--batch-length", "4",
         "--env-options", "size=[8,8]",
         "--envs", "3", "--envs-per-process", "3", "--seed", "7", "--steps", "100", "--log-every",
         "0.5", "--train-ratio", "1", "--eval-episodes", "0", "--on-failure", "stop",
         "--launcher", "serial"]  # fmt: skip


def test_a_run_is_resumed_as_it_was_and_says_what_is_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logdir = str(tmp_path)
    assert main(["train", "--logdir", logdir, *FIRST]) == 0
    assert "Resuming" not in capsys.readouterr().out
    first = read_config(tmp_path)

    assert main(["resume", "--steps", "1000", "--batch-size", "3", logdir]) == 0
    said = capsys.readouterr().out.splitlines()
    start = next(n for n, line in enumerate(said) if line.startswith("Resuming at step "))
    assert [line for line in said[start + 1 :] if " -> " in line] == [
        "steps 100 -> 1000",
        "batch_size 2 -> 3",
    ]
    second = read_config(tmp_path)
    assert second == first.changed({"steps": 1000, "batch_size": 3})

    saved: list[int] = []

    def note(step: int, *_: object) -> None:
        saved.append(step)

    dreamfleet.resume(tmp_path, steps=2000, on_checkpoint=note, display=None)
    assert [line for line in capsys.readouterr().out.splitlines() if " -> " in line] == [
        "steps 1000 -> 2000"
    ]
    assert read_config(tmp_path) == second.changed({"steps": 2000})
    assert saved[-1] >= 2000

    log = (tmp_path / "logs" / "serial.log").read_text()
    assert main(["resume", logdir]) == 0
    said = capsys.readouterr().out.splitlines()
    assert any("has made its 2,000 steps" in line and "such as --steps " in line for line in said)
    assert (tmp_path / "logs" / "serial.log").read_text() == log, "no process was started"
