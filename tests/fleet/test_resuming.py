"""`dreamfleet resume` and `dreamfleet train` in the directory of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

import dreamfleet
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.cli import main
from dreamfleet.config import read_config

FIRST = ["--task", "bundled:dummy", "--agent", "random", "--batch-size", "2", "--batch-length", "4",
         "--envs", "3", "--envs-per-process", "3", "--seed", "7", "--steps", "100", "--log-every",
         "0.5", "--train-ratio", "1", "--eval-episodes", "0", "--on-failure", "stop"]  # fmt: skip


def test_a_run_is_resumed_as_it_was_and_says_what_is_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logdir = str(tmp_path)
    assert main(["train", "--logdir", logdir, *FIRST]) == 0
    assert "Resuming" not in capsys.readouterr().out
    first = read_config(tmp_path)

    assert main(["resume", "--steps", "150", "--batch-size", "3", logdir]) == 0
    said = capsys.readouterr().out.splitlines()
    start = next(n for n, line in enumerate(said) if line.startswith("Resuming at step 10"))
    assert [line for line in said[start + 1 :] if " -> " in line] == [
        "steps 100 -> 150",
        "batch_size 2 -> 3",
    ]
    second = read_config(tmp_path)
    assert second == first.changed({"steps": 150, "batch_size": 3})

    assert main(["train", "--logdir", logdir, "--steps", "200"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if " -> " in line] == [
        "steps 150 -> 200"
    ]
    assert read_config(tmp_path) == second.changed({"steps": 200})
    snapshot = Checkpoint(tmp_path / "ckpt" / "agent").load(parts=())
    assert snapshot is not None
    assert snapshot.step >= 200

    saved: list[int] = []

    def note(step: int, *_: object) -> None:
        saved.append(step)

    dreamfleet.resume(tmp_path, steps=300, on_checkpoint=note, display=None)
    assert "steps 200 -> 300" in capsys.readouterr().out
    assert saved[-1] >= 300

    log = (tmp_path / "logs" / "agent.log").read_text()
    assert main(["resume", logdir]) == 0
    said = capsys.readouterr().out.splitlines()
    assert any("has made its 300 steps" in line and "such as --steps 6" in line for line in said)
    assert (tmp_path / "logs" / "agent.log").read_text() == log, "no process was started"
