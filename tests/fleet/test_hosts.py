"""Hosts that run a fleet each and learn together, started as a person starts them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fleet_parts import rows

from dreamfleet.checkpoint import Checkpoint

SETTINGS = [
    "train", "--task", "bundled:dummy", "--env-options", "length=25", "size=[8,8]", "--agent",
    "random", "--envs", "2", "--batch-size", "4", "--batch-length", "4", "--report-length", "4",
    "--train-ratio", "1", "--log-every", "0.5", "--save-every", "1", "--eval-episodes", "1",
    "--logdir", "run",
]  # fmt: skip
ENOUGH = 300.0


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dreamfleet.cli", *SETTINGS, *more],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "COLUMNS": "200"}, start_new_session=True,
    )  # fmt: skip


def wait_until(condition: Callable[[], object], *running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + ENOUGH
    while not condition():
        for process in running:
            assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def updates(run: Path) -> list[float]:
    found = rows(run / "metrics.jsonl")
    return [row["learner/updates"] for row in found if "learner/updates" in row]


def test_two_hosts_lose_one_and_one_goes_on_alone(tmp_path: Path) -> None:
    together = ["--hosts", "2", "--steps", "0"]
    first, second = (start(tmp_path, *together, "--host-index", str(n)) for n in range(2))
    run, other = tmp_path / "run", tmp_path / "run" / "hosts" / "1"
    checkpoints = Checkpoint(run / "ckpt" / "agent")
    try:
        wait_until(checkpoints.all, first, second)
        wait_until(lambda: len(updates(run)) > 2 and len(updates(other)) > 2, first, second)
        # All log at the same steps of learning.
        before = [set(updates(each)) for each in (run, other)]
        assert len(before[0] & before[1]) >= 2
        os.killpg(second.pid, signal.SIGKILL)
        text = first.communicate(timeout=ENOUGH)[0]
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    assert first.returncode == 1, text
    assert re.search(r"Host 1 \(\S+\) was lost: it has been silent for 15 s", text), text
    assert "--hosts 1" in text
    newest = checkpoints.load()
    assert newest.step > 0
    files = {path.name for path in newest.path.iterdir()}
    assert {"agent.safetensors", "agent-1.safetensors"} <= files
    assert json.loads((run / "config.json").read_text())["hosts"] == 2
    steps = newest.step + 200
    alone = start(tmp_path, "--hosts", "1", "--steps", str(steps))
    text = alone.communicate(timeout=ENOUGH)[0]
    assert alone.returncode == 0, text
    assert f"Resuming at step {newest.step:,}" in text
    assert "Evaluation: mean score" in text
    last = checkpoints.load()
    assert last.step >= steps
