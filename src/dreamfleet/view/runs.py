"""The runs of a folder, and what each is doing.

Open pages have them read, in threads. Each part of a file is read once for all pages.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dreamfleet.config import CONFIG_FILE, RunConfig, read_config
from dreamfleet.errors import ConfigError
from dreamfleet.files import atomic_write
from dreamfleet.fleet.record import (
    FILE_NAME,
    UNDER_WAY,
    RunStatus,
    read_record,
    run_state,
)
from dreamfleet.fleet.status import Watcher
from dreamfleet.metrics.evaluations import FILE_NAME as EVALUATIONS_FILE
from dreamfleet.metrics.outputs.jsonl import DAMAGED, decode_rows
from dreamfleet.plotting import evaluation_means
from dreamfleet.presets import PRESETS
from dreamfleet.statistics import Floats
from dreamfleet.view.reading import MetricsFile, finite, read_tail

log = logging.getLogger(__name__)

SCORE, EVALUATION = "episode/score", "evaluation"
"""Metrics of `scores.jsonl` and `evaluations.jsonl`; all others are of `metrics.jsonl`."""
ANNOTATIONS_FILE = "annotations.json"
_RUN_FILES = (CONFIG_FILE, "metrics.jsonl", "scores.jsonl", "ckpt")
"""A directory that holds one of these is a run."""
_MAX_DEPTH, _MAX_FOLDERS = 6, 20_000
_LOOK_SECONDS, _TABLE_SECONDS = 0.8, 3.0
_UPDATE_SECONDS = 1.0
"""After which the next update reads on."""
_SHOWN_SECONDS = 10.0
_RECENT_SECONDS = 10.0
_FIRST_PATIENCE, _PATIENCE = 0.5, 0.05
_TAIL_BYTES, _MAX_EVALUATIONS_BYTES = 1 << 14, 1 << 20
_LOSS = re.compile(r"train/loss(/.+)?")


class Annotations(msgspec.Struct, frozen=True):
    """What users wrote about a run."""

    note: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """A run in the table."""

    name: str
    task: str = ""
    preset: str = ""
    seed: int | None = None
    state: str = "broken"
    """Of `RunStatus`, or `broken`."""
    alert: str = ""
    """A failure, a loss that is not finite, or a stall."""
    step: int = 0
    steps: int = 0
    score: float | None = None
    rate: float | None = None
    hours: float | None = None
    machine: str = ""
    tags: str = ""
    note: str = ""
    changed: float = 0.0
    """Unix time of the last change."""

    @property
    def running(self) -> bool:
        return self.state in UNDER_WAY

    def to_dict(self) -> dict[str, Any]:
        """For a table in a browser."""
        fields = vars(self).items()
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in fields if k != "changed"}


class Run:
    """One run: its row in the table, and what its pages show."""

    def __init__(self, name: str, path: Path, *, trust: bool = False) -> None:
        self.name, self.path, self.trust = name, path, trust
        self.row = Row(name)
        self.config: RunConfig | None = None
        self.status: RunStatus | None = None
        """What it is doing; None of a run that has ended and has no open page."""
        self.lock = threading.Lock()
        """Held while files are read."""
        self._refreshing = threading.Lock()
        self.shown = self._looked = -math.inf
        """When a page last showed more of it than its row."""
        self._signature: tuple[int, ...] = ()
        self._evaluations: tuple[int, list[dict[str, Any]]] = 0, []
        self._watcher: Watcher | None = None
        self.scores = MetricsFile(path, "scores.jsonl", SCORE)
        self.metrics = MetricsFile(path, "metrics.jsonl")

    def refresh(self, *, live: bool = False) -> None:
        """Read what has changed in its files; of a live run also what it is doing."""
        files = (CONFIG_FILE, FILE_NAME, "scores.jsonl", "metrics.jsonl", ANNOTATIONS_FILE)
        with self._refreshing:
            if live and time.monotonic() - self._looked < _LOOK_SECONDS:
                return  # another page had it read
            written = tuple(changed_at(self.path / name) for name in files)
            self.read(metrics=False)
            before, self._signature = self._signature, (*written, self.scores.rows)
            if self._signature == before and not live and not self.row.running:
                return
            changed = max(written) / 1e9
            try:
                if self.config is None or before[:1] != written[:1]:
                    if (self.path / CONFIG_FILE).is_symlink():
                        raise ConfigError(f"{CONFIG_FILE} is a link, and links are not followed.")
                    self.config = read_config(self.path)
                self.row = self._make_row(self.config, changed, live)
            except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
                self.config = None
                self.row = Row(self.name, alert=str(error), changed=changed)

    def _make_row(self, config: RunConfig, changed: float, live: bool) -> Row:
        record, annotations, scores = read_record(self.path), self.annotations(), self.scores
        metrics = self._tail("metrics.jsonl")
        state, alert = run_state(record), _alert(record, metrics)
        logged = [finite(row.get("step")) or 0.0 for row in metrics[-1:]]
        step = int(max(scores.step, *logged, 0.0))
        score = float(np.mean(scores.recent)) if scores.recent else None
        trained = None if scores.behind else scores.hours
        hours = float(trained[-1, 1]) if trained is not None and trained[:, 1].any() else None
        rate = step / (3600 * hours) if hours else None
        if live or state in UNDER_WAY or self.status is not None:
            self._look()
        if (status := self.status) is not None:
            state = status.state
        if status is not None and status.running:
            alert = alert or (status.message if status.waiting or status.hanging else "")
            step, score = status.step, score if status.score is None else status.score
            rate = status.steps_per_second if status.responding else rate
        return Row(
            name=self.name,
            task=config.task,
            preset=closest_preset(config),
            seed=config.seed,
            state=state,
            alert=alert,
            step=step,
            steps=config.steps,
            score=score,
            rate=rate,
            hours=hours,
            machine=record.host if record else "",
            tags=", ".join(annotations.tags),
            note=annotations.note,
            changed=changed,
        )

    def _look(self) -> None:
        """See what the run is doing. One on another machine has longer to give a sign of life the
        first time, so that no run seems to stall before it could."""
        patience = _PATIENCE if self._watcher else _FIRST_PATIENCE
        self._watcher = self._watcher or Watcher(self.path)
        self._looked = time.monotonic()
        try:
            self.status = self._watcher.look(patience)
        except Exception as error:  # its files still say much
            log.debug("Cannot look at %s: %s", self.path, error)

    def _tail(self, name: str, max_bytes: int = _TAIL_BYTES) -> list[dict[str, Any]]:
        return decode_rows(read_tail(self.path, name, max_bytes=max_bytes))

    def annotations(self) -> Annotations:
        """The note and tags; empty if there are none, or the file is damaged."""
        content = read_tail(self.path, ANNOTATIONS_FILE, max_bytes=_TAIL_BYTES)
        try:
            return msgspec.json.decode(content, type=Annotations)
        except DAMAGED:
            return Annotations()

    def annotate(self, note: str, tags: Sequence[str]) -> None:
        """Replace the note and the tags.

        Raises:
            OSError: The run's directory cannot be written.
        """
        unique = tuple(dict.fromkeys(tag.strip()[:40] for tag in tags if tag.strip()))[:20]
        content = msgspec.json.encode(Annotations(note.strip()[:2000], unique))
        atomic_write(self.path / ANNOTATIONS_FILE, content)
        self.refresh()

    def read(self, *, metrics: bool) -> bool:
        """Read what is new in its files; returns whether there is more."""
        files = [self.scores, self.metrics] if metrics else [self.scores]
        with self.lock:
            for file in files:
                file.read()
            return any(file.behind for file in files)

    @property
    def recently_failed(self) -> set[str]:
        """Workers that failed seconds ago: most are back before a page polls."""
        since = time.time() - _RECENT_SECONDS
        events = self.status.events if self.status else ()
        return {each.worker for each in events if each.event == "failed" and each.time > since}

    def points(self, metric: str) -> Floats | None:
        """Step, mean, minimum and maximum of a metric; None if the run has not logged it."""
        if metric == EVALUATION:
            means = evaluation_means(self.evaluations())
            return means[:, [0, 1, 1, 1]] if len(means) else None
        with self.lock:
            file = self.scores if metric == SCORE else self.metrics
            column = file.columns.get(metric)
            return column.points if column else None

    def evaluations(self) -> list[dict[str, Any]]:
        """Its evaluations that have a step and a mean, in order."""
        if (written := self.version[-1]) != self._evaluations[0]:
            rows = self._tail(EVALUATIONS_FILE, _MAX_EVALUATIONS_BYTES)
            numbers = ("step", "mean", "standard_error", "episodes")
            found = [row | {name: finite(row.get(name)) for name in numbers} for row in rows]
            kept = [row for row in found if None not in (row["step"], row["mean"])]
            self._evaluations = written, kept
        return self._evaluations[1]

    @property
    def version(self) -> tuple[int, ...]:
        """Changes when the points of a metric may have changed."""
        return self.scores.rows, self.metrics.rows, changed_at(self.path / EVALUATIONS_FILE)

    def newest(self, metric: str) -> float | None:
        """The newest value: what the logger reports, or else what the file holds."""
        value = self.status.metrics.get(metric) if self.status else None
        return finite(self.metrics.newest.get(metric) if value is None else value)

    def forget(self) -> None:
        """Free the memory of a run that no page shows."""
        with self._refreshing, self.lock:
            self._watcher = self.status = None
            self.shown = self._looked = -math.inf
            self.metrics = MetricsFile(self.path, "metrics.jsonl")


class Runs:
    """All runs below a folder, or the one run that it is."""

    def __init__(self, root: Path, *, trust: bool = False) -> None:
        self.root, self._trust = root.resolve(), trust
        self._runs: dict[str, Run] = {}
        self._lock = threading.Lock()
        self._scanned = -math.inf
        self.update()

    @property
    def single(self) -> bool:
        """Whether the folder is a run itself."""
        return any(run.path == self.root for run in self._runs.values())

    def all(self) -> list[Run]:
        """The runs that changed last come first."""
        return sorted(self._runs.values(), key=lambda run: -run.row.changed)

    def find(self, name: str) -> Run | None:
        """The run of this name, which is its path below the folder."""
        return self._runs.get(name)

    def update(self, *shown: Run, metrics: bool = False, live: bool = False) -> None:
        """Read what an open page shows, from any thread: the table, scores of some runs, and
        perhaps their metrics and what they are doing."""
        start = time.monotonic()
        for run in shown:
            run.shown = start
        with self._lock:
            if start - self._scanned > _TABLE_SECONDS:
                self._scan()
                self._scanned = start
        for run in shown:
            if live:
                run.refresh(live=True)
            while run.read(metrics=metrics) and time.monotonic() - start < _UPDATE_SECONDS:
                pass

    def forget(self) -> None:
        """Free the memory of runs that no page shows any more."""
        for run in self._runs.values():
            if 0 < run.shown < time.monotonic() - _SHOWN_SECONDS:
                run.forget()

    def _scan(self) -> None:
        found = {}
        for name, path in _find(self.root):
            run = found[name] = self._runs.get(name) or Run(name, path, trust=self._trust)
            try:
                run.refresh()
            except Exception:  # a run that cannot be read must not hide the others
                log.exception("Cannot read %s", path)
        self._runs = found  # a new dict: pages iterate over the old one in their own thread


def _find(root: Path) -> Iterator[tuple[str, Path]]:
    """Names and paths of runs. Links are not followed, and runs inside of runs do not count."""
    for folder, inner, _ in islice(os.walk(root), _MAX_FOLDERS):
        path = Path(folder)
        within = path.relative_to(root)
        if any((path / name).exists() for name in _RUN_FILES):  # its name may not be valid UTF-8
            name = root.name if path == root else str(within)
            yield name.encode("utf-8", "replace").decode(), path
            inner.clear()
        if len(within.parts) == _MAX_DEPTH:
            inner.clear()
        inner[:] = [name for name in inner if not name.startswith(".")]


def changed_at(path: Path) -> int:
    """When a file was last changed, in nanoseconds; 0 if there is none."""
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def _alert(record: RunStatus | None, metrics: Sequence[dict[str, Any]]) -> str:
    """What is wrong, from the files alone."""
    workers = record.workers if record else ()
    failed = record is not None and record.state == "failed"
    for worker in workers:
        if worker.state == "restarting" or (failed and worker.error):
            return f"{worker.name} failed: {worker.error or 'no error was recorded'}"
    newest = {key: value for row in metrics for key, value in row.items()}
    for key, value in newest.items():
        if _LOSS.fullmatch(key) and not isinstance(value, str) and finite(value) is None:
            return f"{key} is not finite"
    return ""


def closest_preset(config: RunConfig) -> str:
    """The preset with the fewest differing settings, and their number: `default +2`. A preset of
    the same suite wins a tie."""
    mine, suite = _settings(config), config.task.partition(":")[0]
    distances = (
        (sum(mine[key] != value for key, value in theirs.items() if key in mine), suite != of, name)
        for name, of, theirs in _presets()
    )
    count, _, name = min(distances, key=lambda each: each[:2])
    return f"{name} +{count}" if count else name


def _settings(config: RunConfig) -> dict[str, Any]:
    skipped = ("task", "env_options")
    return {key: v for key, v in config.experiment().items() if key.split(".")[0] not in skipped}


@cache
def _presets() -> list[tuple[str, str, dict[str, Any]]]:
    """Names, suites and settings."""
    return [(name, p.task.partition(":")[0], _settings(p)) for name, p in PRESETS.items()]
