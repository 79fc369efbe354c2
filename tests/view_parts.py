"""Runs that were made up, for the pages of `dreamfleet view`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dreamfleet.config import RunConfig
from dreamfleet.fleet.record import FleetRecord, WorkerRecord, write_record


def made_up_run(
    logdir: Path, *, episodes: int = 30, rows: int = 20, host: str = "there", **settings: Any
) -> Path:
    """The directory of a run that has ended."""
    logdir.mkdir(parents=True)
    config = RunConfig(logdir=logdir, **settings)
    (logdir / "config.json").write_text(config.to_json())
    worker = WorkerRecord("agent", "agent", "ended", None, "", 1000.0)
    write_record(logdir, FleetRecord(1, 1.0, host, "local", 1000.0, (worker,), "ended"))
    with (logdir / "scores.jsonl").open("w") as file:
        for number in range(episodes):
            row = {"step": 10 * (number + 1), "episode/score": float(number), "time": 5.0 * number}
            file.write(json.dumps(row) + "\n")
    with (logdir / "metrics.jsonl").open("w") as file:
        for number in range(rows):
            loss = 1 + math.cos(number / 7)
            row = {"step": 15 * (number + 1), "train/loss/value": loss, "learner/state": "training"}
            file.write(json.dumps(row) + "\n")
    return logdir
