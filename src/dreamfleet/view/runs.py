"""The runs of a folder, and what each is doing.

One thread reads files for all open pages, and only while a page is open.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import numpy as np

from dreamfleet.config import CONFIG_FILE, RunConfig, read_config
from dreamfleet.errors import ConfigError
from dreamfleet.files import atomic_write
from dreamfleet.fleet.record import (
    FILE_NAME,
    Event,
    FleetRecord,
    RunStatus,
    read_record,
    run_state,
)
from dreamfleet.fleet.status import Watcher
from dreamfleet.metrics.evaluations import FILE_NAME as EVALUATIONS_FILE
from dreamfleet.presets import PRESETS
from dreamfleet.roles.logger import RECENT_EPISODES
from dreamfleet.view.reading import (
    Floats,
    MetricsFile,
    ScoresFile,
    decode_lines,
    finite,
    read_tail,
)

log = logging.getLogger(__name__)

SCORE, EVALUATION = "episode/score", "evaluation"
"""Metrics of `scores.jsonl` and `evaluations.jsonl`; all others are of `metrics.jsonl`."""
ANNOTATIONS_FILE = "annotations.json"
_RUN_FILES = (CONFIG_FILE, "metrics.jsonl", "scores.jsonl", "ckpt")
"""A directory that holds one of these is a run."""
_MAX_DEPTH = 5
_MAX_FOLDERS = 20_000
_SCAN_SECONDS = 4.0
_POLL_SECONDS = 1.0
_TABLE_SECONDS = 3.0
_ATTENTION_SECONDS = 6.0
_FORGET_SECONDS = 300.0
_RECENT_SECONDS = 6.0
_FIRST_PATIENCE = 0.5
_TAIL_BYTES = 1 << 14
_MAX_SAMPLES, _MAX_EVENTS, _MAX_EVALUATIONS_BYTES = 40, 500, 1 << 20
_TRAFFIC = {
    "env": ("actor/server/bytes_in", "actor/server/bytes_out"),
    "replay": ("actor/replay_client/bytes_in", "actor/replay_client/bytes_out"),
    "logger": ("actor/logger_client/bytes_in", "actor/logger_client/bytes_out"),
}
"""Byte counters between the agent and other roles."""
_LOSS = re.compile(r"train/loss(/.+)?")
_JSON = msgspec.json.Decoder(dict[str, Any])

Level = Literal["table", "scores", "metrics", "live"]
"""What an open page needs: rows of the table, or of a run its scores, its metrics, or all of it."""


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
        return self.state in ("running", "ending", "evaluating")

    def to_dict(self) -> dict[str, Any]:
        """For a table in a browser."""
        fields = asdict(self).items()
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in fields if k != "changed"}


class Run:
    """One run: its row in the table, and what its pages show."""

    def __init__(self, name: str, path: Path, *, trust: bool = False) -> None:
        self.name, self.path, self.trust = name, path, trust
        self._row = Row(name)
        self.config: RunConfig | None = None
        self.status: RunStatus | None = None
        self.traffic: deque[tuple[float, dict[str, float]]] = deque(maxlen=_MAX_SAMPLES)
        """Unix time, and bytes so far between the agent and each role."""
        self.events: tuple[Event, ...] = ()
        self.lock = threading.Lock()
        """Held while files are read."""
        self._signature: object = None
        self._config_written = 0
        self._watcher: Watcher | None = None
        self._recent: dict[str, float] = {}
        self._since = time.time()
        self._used = 0.0
        self._open_files()

    def _open_files(self) -> None:
        self.scores, self.metrics = ScoresFile(self.path), MetricsFile(self.path)
        self.events = ()

    @property
    def row(self) -> Row:
        """What its files say, and what it is doing."""
        return _with_status(self._row, self.status) if self.status else self._row

    def refresh(self) -> None:
        """Read what has changed in its files."""
        files = (CONFIG_FILE, FILE_NAME, "scores.jsonl", "metrics.jsonl", ANNOTATIONS_FILE)
        written = tuple(_written(self.path / name) for name in files)
        self.read(metrics=False)
        signature = (*written, self.scores.rows)
        if signature == self._signature and not self._row.running:
            return
        if written[0] != self._config_written:
            self.config = None
            self._config_written = written[0]
        self._signature = signature
        try:
            if self.config is None:
                if (self.path / CONFIG_FILE).is_symlink():
                    raise ConfigError(f"{CONFIG_FILE} is a link, and links are not followed.")
                self.config = read_config(self.path)
            self._row = self._make_row(self.config, max(written) / 1e9)
        except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
            self._row = Row(self.name, alert=str(error), changed=max(written) / 1e9)

    def _make_row(self, config: RunConfig, changed: float) -> Row:
        record, annotations = read_record(self.path), self.annotations()
        scores, metrics = (
            decode_lines(_JSON, read_tail(self.path, name, max_bytes=_TAIL_BYTES)[0])
            for name in ("scores.jsonl", "metrics.jsonl")
        )
        step = int(max([0.0, *_numbers([*scores[-1:], *metrics[-1:]], "step")]))
        recent = _numbers(scores, SCORE)[-RECENT_EPISODES:]
        trained = None if self.scores.behind else self.scores.hours
        hours = float(trained[-1, 1]) if trained is not None and trained[:, 1].any() else None
        return Row(
            name=self.name,
            task=config.task,
            preset=closest_preset(config),
            seed=config.seed,
            state=run_state(record),
            alert=_alert(record, metrics),
            step=step,
            steps=config.steps,
            score=sum(recent) / len(recent) if recent else None,
            rate=step / (3600 * hours) if hours else None,
            hours=hours,
            machine=record.host if record else "",
            tags=", ".join(annotations.tags),
            note=annotations.note,
            changed=changed,
        )

    def annotations(self) -> Annotations:
        """The note and tags; empty if there are none, or the file is damaged."""
        content, _ = read_tail(self.path, ANNOTATIONS_FILE, max_bytes=_TAIL_BYTES)
        try:
            return msgspec.json.decode(content, type=Annotations)
        except (msgspec.MsgspecError, ValueError, RecursionError):
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

    def poll(self, patience: float) -> None:
        """Ask the run what it is doing, for `patience` seconds at most; longer the first time, so
        that no run seems to stall before it could answer."""
        if self.config is None:
            return
        if self._watcher is None:
            self._watcher, patience = Watcher(self.path), max(patience, _FIRST_PATIENCE)
        self._used = time.monotonic()
        try:
            status = self._watcher.look(patience)
        except Exception as error:  # one run must not hide the others
            log.debug("Cannot read %s: %s", self.path, error)
            return
        self.status = status
        if status is not None and status.running:
            counts = {
                role: sum(finite(status.metrics.get(key)) or 0.0 for key in keys)
                for role, keys in _TRAFFIC.items()
            }
            self.traffic.append((time.time(), counts))

    def read(self, *, metrics: bool) -> bool:
        """Read what is new in its files; returns whether there is more."""
        self._used = time.monotonic()
        with self.lock:
            self.scores.read()
            if metrics:
                self.metrics.read()
                record = read_record(self.path)
                self.events = record.events if record else ()
                for event in self.events:
                    if event.event == "failed" and event.time > self._since:
                        self._recent[event.worker] = self._used + _RECENT_SECONDS
                        self._since = event.time
            return self.scores.behind or (metrics and self.metrics.behind)

    @property
    def recently_failed(self) -> set[str]:
        """Workers that failed seconds ago: most are back before a page polls."""
        now = time.monotonic()
        return {name for name, until in self._recent.items() if until > now}

    def points(self, metric: str) -> Floats | None:
        """Step, mean, minimum and maximum of a metric; None if the run has not logged it."""
        if metric == EVALUATION:
            return self._evaluation_points()
        with self.lock:
            file = self.scores if metric == SCORE else self.metrics
            column = file.columns.get(metric)
            return column.points if column else None

    def evaluations(self) -> list[dict[str, Any]]:
        """Rows of its evaluations, in order."""
        limit = _MAX_EVALUATIONS_BYTES
        return decode_lines(_JSON, read_tail(self.path, EVALUATIONS_FILE, max_bytes=limit)[0])

    def _evaluation_points(self) -> Floats | None:
        """At each step the evaluation with the most episodes counts, as in `dreamfleet plot`."""
        best: dict[float, tuple[float, float]] = {}
        for row in self.evaluations():
            step, mean = finite(row.get("step")), finite(row.get("mean"))
            episodes = finite(row.get("episodes")) or 0.0
            if step is not None and mean is not None and episodes >= best.get(step, (0.0,))[0]:
                best[step] = episodes, mean
        rows = [(step, mean, mean, mean) for step, (_, mean) in sorted(best.items())]
        return np.array(rows) if rows else None

    def version(self, metric: str) -> object:
        """Changes when the points of a metric may have changed."""
        if metric == EVALUATION:
            return _written(self.path / EVALUATIONS_FILE)
        return self.scores.rows if metric == SCORE else self.metrics.rows

    def newest(self, metric: str) -> float | None:
        """The newest value: what the logger reports, or else what the file holds."""
        value = self.status.metrics.get(metric) if self.status else None
        value = self.metrics.newest.get(metric) if value is None else value
        return finite(value)

    def forget(self) -> None:
        """Free the memory of a run that no page shows."""
        self._watcher = self.status = None
        with self.lock:
            self._open_files()
        self._used = 0.0

    @property
    def unused(self) -> bool:
        """Whether it holds memory that no page has used for a while."""
        return 0 < self._used < time.monotonic() - _FORGET_SECONDS


class Runs:
    """All runs below a folder, or the one run that it is."""

    def __init__(self, root: Path, *, trust: bool = False) -> None:
        self.root, self._trust = root.resolve(), trust
        self._runs: dict[str, Run] = {}
        self._lock = threading.Lock()
        self._attended: dict[tuple[Level, str], float] = {}
        self._scanned = self._refreshed = 0.0
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._loop, name="view", daemon=True)
        self.version = 0
        """Changes when a row does."""

    def __enter__(self) -> Self:
        self._scan()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._wake.set()
        self._thread.join()
        for run in self._runs.values():
            run.forget()

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

    def attend(self, level: Level, *names: str) -> None:
        """An open page shows this; it is kept fresh for some seconds."""
        now = time.monotonic()
        with self._lock:
            new = any((level, name) not in self._attended for name in names)
            self._attended.update({(level, name): now for name in names})
        if new:
            self._wake.set()

    def _loop(self) -> None:
        while not self._ended.is_set():
            self._wake.clear()
            try:
                seconds = self._turn()
            except Exception:  # what cannot be read must not end the server
                log.exception("Reading the runs failed")
                seconds = _POLL_SECONDS
            self._wake.wait(seconds)

    def _turn(self) -> float:
        """Read everything that open pages show; returns the seconds until the next turn."""
        start = time.monotonic()
        for run in self._runs.values():
            if run.unused:
                run.forget()
        with self._lock:
            recent = {k: at for k, at in self._attended.items() if start - at < _ATTENTION_SECONDS}
            self._attended = recent
            levels: dict[Level, list[Run]] = {"table": [], "scores": [], "metrics": [], "live": []}
            for level, name in recent:
                levels[level] += [self._runs[name]] if name in self._runs else []
        if not recent:
            return _FORGET_SECONDS / 5
        if start - self._scanned > _SCAN_SECONDS:
            self._scan()
        behind = False
        for run in levels["live"]:
            run.refresh()
            run.poll(0.3)
            behind |= run.read(metrics=True)
        for run in levels["metrics"]:
            behind |= run.read(metrics=True)
        for run in levels["scores"]:
            behind |= run.read(metrics=False)
        if ("table", "") in recent and start - self._refreshed > _TABLE_SECONDS:
            before = [run.row for run in self._runs.values()]
            for run in self._runs.values():
                run.refresh()
                if run.row.running and run not in levels["live"]:
                    run.poll(0.02)
            self.version += [run.row for run in self._runs.values()] != before
            more = any(run.scores.behind for run in self._runs.values())
            self._refreshed, behind = (0.0 if more else start), behind or more
        return 0.0 if behind else max(0.05, _POLL_SECONDS - (time.monotonic() - start))

    def _scan(self) -> None:
        self._scanned = time.monotonic()
        found = dict(_find(self.root))
        kept = {name: run for name, run in self._runs.items() if name in found}
        gone = [run for name, run in self._runs.items() if name not in found]
        new = [Run(n, path, trust=self._trust) for n, path in found.items() if n not in kept]
        for run in new:
            run.refresh()
        # A new dict: pages iterate over the old one in their own thread.
        self._runs = {**kept, **{run.name: run for run in new}}
        for run in gone:
            run.forget()
        self.version += len(gone) + len(new)


def _find(root: Path) -> Iterator[tuple[str, Path]]:
    """Names and paths of runs. Links are not followed, and runs inside of runs do not count."""
    if _is_run(root):
        yield root.name, root
        return
    folders, seen = [(root, 0)], 0
    while folders and seen < _MAX_FOLDERS:
        folder, depth = folders.pop()
        seen += 1
        try:
            with os.scandir(folder) as entries:
                inner = [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        for path in inner:
            if path.name.startswith("."):
                continue
            if _is_run(path):  # its name may not be valid UTF-8
                yield str(path.relative_to(root)).encode("utf-8", "replace").decode(), path
            elif depth < _MAX_DEPTH:
                folders.append((path, depth + 1))


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in _RUN_FILES)


def _written(path: Path) -> int:
    """When a file was last changed, in nanoseconds; 0 if there is none."""
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def _alert(record: FleetRecord | None, metrics: Sequence[dict[str, Any]]) -> str:
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


def _with_status(row: Row, status: RunStatus) -> Row:
    if not status.running:
        return replace(row, state=status.state)
    alert = row.alert or (status.message if status.waiting or status.hanging else "")
    score = row.score if status.score is None else status.score
    rate = status.steps_per_second if status.responding else row.rate
    return replace(row, state=status.state, alert=alert, step=status.step, score=score, rate=rate)


def _numbers(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [number for row in rows if (number := finite(row.get(key))) is not None]


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
