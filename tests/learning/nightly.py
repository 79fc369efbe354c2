"""Whole runs to their scores: half an hour on two cores, by `make test-learning` only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [200, 201])
@pytest.mark.parametrize(
    ("flags", "goal"),
    [(("--task", "gym:CartPole-v1"), 475.0), (("--preset", "pixels"), 0.9)],
    ids=["cartpole", "catch"],
)
def test_a_run_reaches_its_score(
    tmp_path: Path, flags: tuple[str, ...], goal: float, seed: int
) -> None:
    command = [sys.executable, "-m", "dreamfleet.cli", "train", *flags]
    subprocess.run([*command, "--seed", str(seed), "--logdir", str(tmp_path)], check=True)
    rows = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["mean"] >= goal
