"""Learning curves: episode scores over time, several seeds of one setting as one curve, and the
published curves to compare with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.errors import MetricsError
from dreamfleet.metrics.outputs.jsonl import read_jsonl

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """The episodes of one run: when each ended, and what it scored."""

    at: Floats
    score: Floats

    def __len__(self) -> int:
        return len(self.at)


@dataclass(frozen=True)
class Curve:
    """Several runs as one: the mean of the runs' curves, and the lowest and highest of them."""

    at: Floats
    mean: Floats
    low: Floats
    high: Floats
    runs: int


def read_scores(logdir: Path, frames_per_step: int = 1) -> Scores:
    """The scores of a run, in order.

    A run that was resumed from an older checkpoint may hold some steps twice; all of them happened.
    """
    path = logdir / "scores.jsonl"
    if not path.is_file():
        raise MetricsError(f"{logdir} holds no scores: there is no {path}.")
    rows = [
        (row["step"], row["episode/score"])
        for row in read_jsonl(path)
        if row.get("episode/score") is not None and "step" in row
    ]
    if not rows:
        raise MetricsError(f"{path} is empty: no episode has ended yet.")
    table = np.array(rows, np.float64)
    table = table[np.argsort(table[:, 0], kind="stable")]
    return Scores(table[:, 0] * frames_per_step, table[:, 1])


def read_evaluations(logdir: Path, frames_per_step: int = 1) -> Scores:
    """The means of a run's evaluations, in order: of rounds while it trained, and at its ends."""
    path = logdir / "evaluations.jsonl"
    if not path.is_file():
        raise MetricsError(f"{logdir} holds no evaluations: there is no {path}.")
    # A round that was interrupted at its end may be there twice: the last one counts.
    found = {row["step"]: row["mean"] for row in read_jsonl(path) if row.get("mean") is not None}
    if not found:
        raise MetricsError(f"{path} is empty: no evaluation has ended yet.")
    table = np.array(sorted(found.items()), np.float64)
    return Scores(table[:, 0] * frames_per_step, table[:, 1])


def bin_width(longest: float, most: int = 50) -> float:
    """A round width that cuts so many frames into at most `most` bins: 1, 2 or 5 times ten to a
    power."""
    least = max(longest, 1.0) / most
    power = 10.0 ** math.floor(math.log10(least))
    return next(width for f in (1, 2, 5, 10) if (width := f * power) >= least * (1 - 1e-9))


def combine(runs: Sequence[Scores], width: float) -> Curve:
    """One curve of several runs, with a point at the end of each bin of this width.

    In each bin a run is the mean of its episodes there. A bin in which none ended (episodes may be
    longer) holds the value of the bin before; before its first and after its last episode a run
    adds nothing.
    """
    last = max(float(run.at[-1]) for run in runs)
    ends: Floats = width * np.arange(1, math.ceil(last / width - 1e-9) + 1, dtype=np.float64)
    table = np.stack([_binned(run, ends, width) for run in runs])
    there = ~np.isnan(table)
    some = there.any(0)
    table, ends, there = table[:, some], ends[some], there[:, some]
    mean = np.where(there, table, 0).sum(0) / there.sum(0)
    low, high = np.nanmin(table, 0), np.nanmax(table, 0)
    return Curve(np.minimum(ends, last), mean, low, high, len(runs))


def final_score(run: Scores, share: float = 0.1) -> float:
    """The mean of the episodes in the last part of a run, and of the last one at least."""
    late = run.at > run.at[-1] * (1 - share)
    return float(run.score[late].mean())


def _binned(run: Scores, ends: Floats, width: float) -> Floats:
    index = np.clip(np.ceil(run.at / width - 1e-9).astype(int) - 1, 0, len(ends) - 1)
    sums = np.bincount(index, run.score, len(ends))
    counts = np.bincount(index, minlength=len(ends))
    result = np.full(len(ends), np.nan)
    held = np.nan
    for number in range(index[-1] + 1):
        if counts[number]:
            held = sums[number] / counts[number]
        result[number] = held
    return result


@dataclass(frozen=True)
class PublishedCurve:
    """Mean and standard deviation over seeds of the episode score, by environment frames."""

    suite: str
    seeds: int
    frames: Floats
    mean: Floats
    std: Floats

    def at(self, frames: float) -> tuple[float, float] | None:
        """Mean and standard deviation at a number of frames; None outside of the curve."""
        if not self.frames[0] <= frames <= self.frames[-1]:
            return None
        mean, std = (float(np.interp(frames, self.frames, y)) for y in (self.mean, self.std))
        return mean, std


def published_curve(task: str, options: Mapping[str, Any] | None = None) -> PublishedCurve | None:
    """The published curve of DreamerV3 for a task, if there is one.

    Args:
        task: Such as dmc:walker_walk.
        options: Those of the environment; pixels instead of states is another task.
    """
    if (options or {}).get("obs", "state") != "state" and task.startswith("dmc:"):
        return None
    prefix, _, name = task.partition(":")
    suite = _table()["suites"].get(prefix, {"tasks": {}})
    entry = suite["tasks"].get(name)
    if entry is None:
        return None
    every = _table()["every"]
    frames = entry["first"] + every * np.arange(len(entry["mean"]), dtype=np.float64)
    mean, std = (np.array(entry[key], np.float64) for key in ("mean", "std"))
    return PublishedCurve(suite["name"], entry["seeds"], frames, mean, std)


@cache
def _table() -> dict[str, Any]:
    file = resources.files("dreamfleet.metrics") / "published.json"
    table: dict[str, Any] = json.loads(file.read_text())
    return table
