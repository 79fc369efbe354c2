"""What an evaluation found, and the file of a run that keeps it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from dreamfleet.metrics.aggregate import Aggregate
from dreamfleet.metrics.episodes import Episode
from dreamfleet.metrics.outputs.jsonl import append_row, last_rows

FILE_NAME = "evaluations.jsonl"
_NEWEST_BYTES = 1 << 20
PREFIX = "eval"
"""Names of metrics of evaluation episodes start with it."""


@dataclass(frozen=True)
class Played:
    """An episode of an evaluation: what it scored, or why it failed."""

    episode: Episode | None = None
    cut_short: bool = False
    """Whether it was ended because it had too many steps."""
    error: str = ""
    """Why it failed; the last line says most."""


@dataclass(frozen=True)
class Evaluation:
    """The result. `returns` and `lengths` have an entry for each episode that did not fail."""

    task: str
    step: int
    protocol: str
    seed: int
    returns: list[float]
    lengths: list[int]
    cut_short: int = 0
    """Episodes that were ended after `max_steps`; their score so far counts."""
    max_steps: int = 0
    failed: int = 0
    """Episodes that were lost because their environment failed; they do not count."""
    error: str = ""
    """The first failure, in one line."""
    video_error: str = ""
    """Why there is no video, if one was asked for; it costs no score."""
    partial: bool = False
    """Whether it was interrupted before all its episodes had ended."""
    played: Sequence[Played] = field(default=(), repr=False, compare=False)
    """The episodes, also those that failed."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def standard_error(self) -> float | None:
        """Of the mean; None for a single return, which has no spread."""
        if len(self.returns) < 2:
            return None
        return float(np.std(self.returns, ddof=1) / np.sqrt(len(self.returns)))

    def record(self) -> dict[str, Any]:
        """The numbers, for a file; whether there is a video is none of its business."""
        names = [each.name for each in fields(self) if each.name not in ("video_error", "played")]
        error = self.standard_error
        means = {"episodes": len(self.returns), "mean": self.mean, "standard_error": error}
        return {**{name: getattr(self, name) for name in names}, **means}

    def summary(self) -> str:
        """The mean, in words."""
        error, count = self.standard_error, len(self.returns)
        spread = f" ± {error:.2g} (standard error, {count} episodes)" if error is not None else ""
        return f"{self.mean:.4g}{spread}"

    def notes(self) -> list[str]:
        """What a reader should know about the mean, a sentence each."""
        found = []
        total = len(self.returns) + self.failed
        if self.cut_short:
            found.append(
                f"{self.cut_short} of {total} episodes did not end within {self.max_steps:,} "
                "steps (eval_max_steps, or what the run has trained) and were cut short; their "
                "scores so far count."
            )
        if self.failed:
            found.append(f"{self.failed} of {total} episodes failed: {self.error}")
        return found


def evaluation_of(played: Sequence[Played], **about: Any) -> Evaluation | None:
    """The result of some episodes; None if all of them failed."""
    finished = [each.episode for each in played if each.episode is not None]
    if not finished:
        return None
    failures = [each for each in played if each.episode is None]
    return Evaluation(
        returns=[episode.score for episode in finished],
        lengths=[episode.length for episode in finished],
        cut_short=sum(each.cut_short for each in played),
        failed=len(failures),
        error=last_line(failures[0].error) if failures else "",
        played=played,
        **about,
    )


def evaluation_metrics(played: Sequence[Played], step: int) -> dict[str, float]:
    """One point of the curve of evaluations: means over the episodes, and how many there were.

    `eval/step` is the step that the point belongs to, for outputs whose steps may not fall.
    """
    means = Aggregate()
    for each in played:
        if each.episode is not None:
            means.add(each.episode.metrics(), prefix=PREFIX)
    return {
        **means.result(),
        f"{PREFIX}/step": float(step),
        f"{PREFIX}/episodes": float(sum(each.episode is not None for each in played)),
        f"{PREFIX}/cut_short": float(sum(each.cut_short for each in played)),
        f"{PREFIX}/failed": float(sum(each.episode is None for each in played)),
    }


def evaluation_from(row: Mapping[str, Any]) -> Evaluation:
    """What a line of the file says."""
    known = {each.name: row[each.name] for each in fields(Evaluation) if each.name in row}
    returns = [math.nan if score is None else score for score in row["returns"]]
    return Evaluation(**{**known, "returns": returns})


def append_evaluation(logdir: Path, result: Evaluation, **more: Any) -> None:
    """Add a line about a result to the run's `evaluations.jsonl`."""
    append_row(logdir / FILE_NAME, {**result.record(), **more})


def recorded_round(logdir: Path, step: int) -> dict[str, Any] | None:
    """The line about the round of evaluation with the checkpoint of this step; None if it has none
    yet."""
    try:
        with (logdir / FILE_NAME).open("rb") as file:
            rows = last_rows(file, _NEWEST_BYTES)
    except FileNotFoundError:
        return None
    found = [row for row in rows if (row.get("kind"), row.get("step")) == ("round", step)]
    return found[-1] if found else None


def last_line(text: str) -> str:
    """The line of an error that says most: the exception under a traceback."""
    lines = [line for line in text.splitlines() if line[:1].strip()]
    return lines[-1].strip() if lines else text.strip()
