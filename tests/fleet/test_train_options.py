"""`dreamfleet train` with what a person may add to it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT, glossary
from event_files import events
from fleet_parts import rows

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.cli import main


def test_a_serial_run_ends_at_its_target_and_tells_its_evaluation(tmp_path: Path) -> None:
    # An episode of the dummy takes 100 steps and scores 10; only the target ends this run.
    command = [str(Path(sys.executable).with_name("dreamfleet")), "train"]
    command += ["--launcher", "serial", "--task", "bundled:dummy", "--agent", "random"]
    command += ["--steps", "0", "--target-score", "10", "--eval-episodes", "2", "--envs", "2"]
    command += ["--logdir", str(tmp_path), "--log-every", "0.2", "--env-options", "size=[8,8]"]
    command += ["--outputs", "jsonl", "tensorboard"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Evaluation: mean score 10 ± 0 (standard error, 2 episodes)" in done.stdout
    assert f"Results: {tmp_path}" in done.stdout.replace("\n", "")
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["serial.log"]
    assert not (tmp_path / "media").exists()
    snapshot = Checkpoint(tmp_path / "ckpt" / "agent").load()
    assert snapshot.step >= 20 * 100
    tags = events(tmp_path / "tensorboard")
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= tags.keys()
    tags = {tag: value for tag, value in tags.items() if not tag.startswith("_hparams_/")}
    assert [value.simple_value for _, value in tags["eval/score"]] == [10.0]  # the final one
    assert {"episode/score", "episode/video/image", "replay/items", "learner/start"} <= tags.keys()
    assert [value.simple_value for _, value in tags["episode/score"]] == [10.0] * len(
        tags["episode/score"]
    )
    known = glossary()
    assert [tag for tag in tags if not any(re.fullmatch(name, tag) for name in known)] == []
    page = (ROOT / "docs" / "metrics.md").read_text()
    (words,) = re.findall(r"`scores\.jsonl` holds (.*?)\n\n", page, re.DOTALL)
    assert set(re.findall(r"`([\w/]+)`", words)) == set(rows(tmp_path / "scores.jsonl")[0])


def test_an_output_that_is_not_installed_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name)
    )
    logdir = tmp_path / "run"
    code = main(["train", "--task", "bundled:dummy", "--logdir", str(logdir), "--outputs", "wandb"])
    assert code == 2
    assert "pip install 'dreamfleet[wandb]'" in capsys.readouterr().err.replace("\n", " ")
    assert not logdir.exists()
