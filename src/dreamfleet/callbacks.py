"""Functions of the user's that are called while a run trains.

They run in the process that called `train`, so they may use anything of the program: append to a
list, draw in a notebook, raise. What happened is read from the files that the run writes anyway, so
callbacks cost the fleet nothing, and a logger that is restarted neither repeats nor loses a call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dreamfleet.checkpoint import Checkpoint, step_of
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError


class StopTraining(Exception):
    """Raise it in a callback to end a run as if its steps were over, with its evaluation."""


@dataclass(frozen=True)
class Callbacks:
    """What is called when; None for nothing.

    Calls are made every `log_every` seconds and once more at the end, in the order of the files. An
    exception ends the run in order, with a checkpoint, and is raised by `train`.
    """

    on_log: Callable[[int, dict[str, Any]], object] | None = None
    """Called with the step and the metrics of each entry of `metrics.jsonl`: numbers and text."""
    on_episode: Callable[[int, float, int], object] | None = None
    """Called with the step, the score and the length of each training episode that has ended."""
    on_checkpoint: Callable[[int, Path], object] | None = None
    """Called with the step and the directory of the newest checkpoint."""

    def check(self, config: RunConfig) -> None:
        """Refuse what would never be called.

        Raises:
            ConfigError: The run does not write what a callback is made from.
        """
        if self.on_log and "jsonl" not in config.outputs:
            raise ConfigError("on_log is made from the output jsonl: add it to outputs.")


class Follower:
    """Calls callbacks for what a run writes from now on."""

    def __init__(self, callbacks: Callbacks, logdir: Path) -> None:
        self._callbacks = callbacks
        self._metrics = _Tail(logdir / "metrics.jsonl")
        self._scores = _Tail(logdir / "scores.jsonl")
        self._checkpoints = Checkpoint(logdir / "ckpt" / "agent")
        self._newest = self._checkpoints.latest()

    def look(self) -> None:
        """Make the calls for everything that is new."""
        calls = self._callbacks
        if calls.on_log:
            for row in self._metrics.rows():
                step = row.pop("step")
                calls.on_log(step, row)
        if calls.on_episode:
            for row in self._scores.rows():
                calls.on_episode(row["step"], row["episode/score"], row.get("episode/length", 0))
        if calls.on_checkpoint:
            newest = self._checkpoints.latest()
            if newest is not None and newest != self._newest:
                self._newest = newest
                calls.on_checkpoint(step_of(newest), newest)


class _Tail:
    """What is appended to a file of JSON lines from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """The lines that are complete and were not read before."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                yield json.loads(line)
