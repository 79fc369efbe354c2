"""What others have published about a task, to compare with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PublishedCurve:
    """Mean and deviation over seeds of the episode return, at so many environment frames."""

    suite: str
    seeds: int
    frames: NDArray[np.float64]
    mean: NDArray[np.float64]
    std: NDArray[np.float64]

    def at(self, frames: float) -> tuple[float, float] | None:
        """Mean and deviation at a number of frames; None outside of what is published."""
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


def published_tasks() -> list[str]:
    """Every task there is a curve for."""
    suites = _table()["suites"]
    return [f"{prefix}:{name}" for prefix, suite in suites.items() for name in suite["tasks"]]


@cache
def _table() -> dict[str, Any]:
    file = resources.files("dreamfleet.metrics") / "published.json"
    table: dict[str, Any] = json.loads(file.read_text())
    return table
