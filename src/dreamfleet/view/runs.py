"""The runs of a folder, and what each of them is doing.

One thread looks at the files and asks the loggers, whatever the number of open pages, and only
while a page is open. Pages show what it has found.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import msgspec

from dreamfleet.config import CONFIG_FILE, RunConfig, read_config
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.record import EVENTS_FILE, FILE_NAME, read_record
from dreamfleet.fleet.status import RunStatus, Watcher, run_state
from dreamfleet.metrics.evaluations import FILE_NAME as EVALUATIONS_FILE
from dreamfleet.metrics.outputs.jsonl import last_rows
from dreamfleet.presets import PRESETS
from dreamfleet.roles.logger import RECENT_EPISODES
from dreamfleet.view.reading import MetricsFile, ScoreFile, Tail, decode_lines, finite, open_inside

log = logging.getLogger(__name__)

_SIGNS = (CONFIG_FILE, "metrics.jsonl", "scores.jsonl", "ckpt")
"""A directory that holds one of these is a run."""
_DEEPEST = 5
_MOST_FOLDERS = 20_000
_SCAN_SECONDS = 4.0
_LOOK_SECONDS = 1.0
_OTHERS_SECONDS = 3.0
_ATTENTION_SECONDS = 6.0
_FORGET_SECONDS = 300.0
_TAIL_BYTES = 1 << 14
_SAMPLES = 900
_EVENTS = 500
_HURT_LOOKS = 6
_TRAFFIC = {
    "env": ("actor/server/bytes_in", "actor/server/bytes_out"),
    "replay": ("actor/replay_client/bytes_in", "actor/replay_client/bytes_out"),
    "logger": ("actor/logger_client/bytes_in", "actor/logger_client/bytes_out"),
}
"""Counts of the bytes between the agent and others."""


@dataclass(frozen=True)
class Row:
    """A run in the table."""

    name: str
    task: str = ""
    preset: str = ""
    seed: int | None = None
    state: str = "broken"
    """Of `RunStatus`, or `broken`."""
    step: int = 0
    steps: int = 0
    score: float | None = None
    rate: float | None = None
    hours: float | None = None
    machine: str = ""
    problem: str = ""
    """Why it is broken."""
    changed: float = 0.0
    """Unix time of the last sign of life."""

    @property
    def running(self) -> bool:
        return self.state in ("running", "ending", "evaluating")


@dataclass(frozen=True)
class Sample:
    """What a run used at one time."""

    time: float
    cpu: float
    """Cores, of all its processes."""
    memory: float
    """Bytes, of all its processes."""
    disk: float
    """Bytes of the replay."""
    traffic: dict[str, float]
    """Bytes so far between the agent and a role."""


class Happening(msgspec.Struct, frozen=True):
    """A worker that failed, or was started again."""

    time: float
    worker: str
    event: str
    error: str = ""


_HAPPENINGS = msgspec.json.Decoder(Happening)


class Run:
    """One run: its row in the table, and what an open page needs beyond that."""

    def __init__(self, name: str, path: Path, *, trust: bool = False) -> None:
        self.name, self.path, self.trust = name, path, trust
        self.row = Row(name)
        self.config: RunConfig | None = None
        self.status: RunStatus | None = None
        self.samples: deque[Sample] = deque(maxlen=_SAMPLES)
        self.happenings: deque[Happening] = deque(maxlen=_EVENTS)
        self.lock = threading.Lock()
        """Held while files are read."""
        self._signature: object = None
        self._config_written = 0
        self._watcher: Watcher | None = None
        self.hurt: dict[str, int] = {}
        """Workers that have failed a moment ago, and how many more looks that is shown: many are
        back before anybody has looked."""
        self._since = time.time()
        self._used = 0.0
        self._open_files()

    def _open_files(self) -> None:
        self.scores, self.metrics = ScoreFile(self.path), MetricsFile(self.path)
        self._events = Tail(self.path, EVENTS_FILE)
        self.happenings.clear()

    def refresh(self) -> None:
        """Find out its row, if a file has changed or there was more to read."""
        files = (CONFIG_FILE, FILE_NAME, "scores.jsonl", "metrics.jsonl")
        written = tuple(_written(self.path / name) for name in files)
        self.read(metrics=False)
        signature = (*written, len(self.scores))
        if signature == self._signature and not self.row.running:
            return
        if written[0] != self._config_written:
            self.config = None
            self._config_written = written[0]
        self._signature = signature
        try:
            if self.config is None:
                if (self.path / CONFIG_FILE).is_symlink():
                    raise ConfigError(f"{CONFIG_FILE} is a link, which is not followed.")
                self.config = read_config(self.path)
            self.row = _row(self.name, self.path, self.config, self.scores, max(written))
            if self._watcher is not None and self.status is not None:
                self.row = _with_status(self.row, self.status)
        except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
            self.row = Row(self.name, problem=str(error), changed=max(written) / 1e9)

    def look(self, patience: float) -> None:
        """Ask what it is doing."""
        if self.config is None:
            return
        if self._watcher is None:
            self._watcher = Watcher(self.path)
        self._used = time.monotonic()
        try:
            status = self._watcher.look(patience)
        except Exception as error:  # one run must not hide the others
            log.debug("%s cannot be looked at: %s", self.path, error)
            return
        if status is None:
            return
        self.status = status
        self.row = _with_status(self.row, status)
        self._note(status)

    @property
    def drawn(self) -> object:
        """Changes when its curves do."""
        return len(self.scores), _written(self.path / EVALUATIONS_FILE), self.row.state

    def read(self, *, metrics: bool) -> bool:
        """Read what is new in its files; returns whether there is more."""
        self._used = time.monotonic()
        with self.lock:
            self.scores.read()
            if metrics:
                self.metrics.read()
                self._read_events()
            return self.scores.behind or (metrics and self.metrics.behind)

    def _read_events(self) -> None:
        self.hurt = {name: left - 1 for name, left in self.hurt.items() if left > 1}
        new = decode_lines(_HAPPENINGS, self._events.read())
        self.happenings.extend(new)
        recent = (each for each in new if each.event == "failed" and each.time > self._since)
        self.hurt |= {each.worker: _HURT_LOOKS for each in recent}

    def forget(self) -> None:
        """Nobody looks at it any more: give back what it takes."""
        if self._watcher is not None:
            self._watcher.__exit__()
            self._watcher = None
        with self.lock:
            self._open_files()
        self._used = 0.0

    @property
    def unused(self) -> bool:
        """Whether it holds something that nobody has looked at for a while."""
        return 0 < self._used < time.monotonic() - _FORGET_SECONDS

    def _note(self, status: RunStatus) -> None:
        """Remember what is used."""
        now = time.time()
        if status.running:
            usages = [worker.usage for worker in status.workers if worker.usage is not None]
            usages += [status.supervisor] if status.supervisor is not None else []
            self.samples.append(
                Sample(
                    now,
                    sum(usage.cpu for usage in usages),
                    float(sum(usage.memory for usage in usages)),
                    float(status.metrics.get("replay/disk_bytes") or 0.0),
                    {
                        role: sum(float(status.metrics.get(key) or 0.0) for key in keys)
                        for role, keys in _TRAFFIC.items()
                    },
                )
            )


class Runs:
    """All runs below a folder, or the one run that it is."""

    def __init__(self, root: Path, *, trust: bool = False) -> None:
        self.root, self._trust = root.resolve(), trust
        self._runs: dict[str, Run] = {}
        self._lock = threading.Lock()
        """Of what pages have asked for."""
        self._attention: dict[str, float] = {}
        self._drawn: dict[str, float] = {}
        self._scanned = self._others = 0.0
        self._wanted, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="view", daemon=True)
        self.version = 0
        """Changes when a row does."""

    def __enter__(self) -> Self:
        self._scan()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._wanted.set()
        self._thread.join()
        for run in self._runs.values():
            run.forget()

    @property
    def alone(self) -> bool:
        """Whether the folder is a run itself."""
        return any(run.path == self.root for run in self._runs.values())

    def all(self) -> list[Run]:
        """In order: those that last gave a sign of life first."""
        return sorted(self._runs.values(), key=lambda run: -run.row.changed)

    def find(self, name: str) -> Run | None:
        """The run of this name, which is its path below the folder; None if there is none."""
        return self._runs.get(name)

    def attend(self, name: str = "", *, drawn: Sequence[str] = ()) -> None:
        """A page is open: that of a run, or the table, which draws the scores of some runs."""
        now = time.monotonic()
        with self._lock:
            new = name not in self._attention or any(each not in self._drawn for each in drawn)
            self._attention[name] = now
            self._drawn.update(dict.fromkeys(drawn, now))
        if new:
            self._wanted.set()

    def _follow(self) -> None:
        while not self._ended.is_set():
            self._wanted.clear()
            try:
                seconds = self._turn()
            except Exception:  # what cannot be read must not end the server
                log.exception("The runs cannot be looked at")
                seconds = _LOOK_SECONDS
            self._wanted.wait(seconds)

    def _turn(self) -> float:
        """Look at everything that pages show; returns the seconds until the next look."""
        start = time.monotonic()
        for each in self._runs.values():
            if each.unused:
                each.forget()
        with self._lock:
            for seen in (self._attention, self._drawn):
                for name in [each for each, at in seen.items() if start - at > _ATTENTION_SECONDS]:
                    del seen[name]
            recent, drawn = list(self._attention), list(self._drawn)
        if not recent:
            return _FORGET_SECONDS / 5
        if start - self._scanned > _SCAN_SECONDS:
            self._scan()
        watched = [run for name in recent if (run := self._runs.get(name)) is not None]
        more = False
        for run in watched:
            run.refresh()
            run.look(0.3)
            more |= run.read(metrics=True)
        for name in drawn:
            found = self._runs.get(name)
            if found is not None and found not in watched:
                more |= found.read(metrics=False)
        if "" in recent and start - self._others > _OTHERS_SECONDS:
            before = [run.row for run in self._runs.values()]
            for run in self._runs.values():
                run.refresh()
                if run.row.running and run not in watched:
                    run.look(0.02)
            self.version += [run.row for run in self._runs.values()] != before
            behind = any(run.scores.behind for run in self._runs.values())
            self._others, more = (0.0 if behind else start), more or behind
        return 0.0 if more else max(0.05, _LOOK_SECONDS - (time.monotonic() - start))

    def _scan(self) -> None:
        self._scanned = time.monotonic()
        found = dict(_find(self.root))
        runs = {name: run for name, run in self._runs.items() if name in found}
        gone = [run for name, run in self._runs.items() if name not in found]
        new = [
            Run(name, path, trust=self._trust) for name, path in found.items() if name not in runs
        ]
        for run in new:
            run.refresh()
        # Another dict: pages go through the one before in their own thread.
        self._runs = {**runs, **{run.name: run for run in new}}
        for run in gone:
            run.forget()
        self.version += len(gone) + len(new)


def _is_run(path: Path) -> bool:
    return any((path / sign).exists() for sign in _SIGNS)


def _find(root: Path) -> Iterator[tuple[str, Path]]:
    """Names and paths of runs; no link is followed, and runs inside of runs are none."""
    if _is_run(root):
        yield root.name, root
        return
    folders, seen = [(root, 0)], 0
    while folders and seen < _MOST_FOLDERS:
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
            if _is_run(path):
                yield _text(str(path.relative_to(root))), path
            elif depth < _DEEPEST:
                folders.append((path, depth + 1))


def _text(name: str) -> str:
    """A file name, which may be no UTF-8, as text."""
    return name.encode("utf-8", "replace").decode()


def _written(path: Path) -> int:
    """When a file was last changed, in nanoseconds; 0 if there is none."""
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def _row(name: str, path: Path, config: RunConfig, scores: ScoreFile, changed: int) -> Row:
    record = read_record(path)
    last, metrics = _last_rows(path, "scores.jsonl"), _last_rows(path, "metrics.jsonl")
    step = int(max([0.0, *_values([*last[-1:], *metrics[-1:]], "step")]))
    recent = _values(last, "episode/score")[-RECENT_EPISODES:]
    trained = None if scores.behind else scores.hours
    hours = float(trained[-1]) if trained is not None and trained.any() else None
    return Row(
        name=name,
        task=config.task,
        preset=closest_preset(config),
        seed=config.seed,
        state=run_state(record),
        step=step,
        steps=config.steps,
        score=sum(recent) / len(recent) if recent else None,
        rate=step / (3600 * hours) if hours else None,
        hours=hours,
        machine=record.host if record else "",
        changed=changed / 1e9,
    )


def _with_status(row: Row, status: RunStatus) -> Row:
    if not status.running:
        return replace(row, state=status.state)
    return replace(
        row,
        state=status.state,
        step=max(status.step, 0),
        score=status.score if status.score is not None else row.score,
        rate=status.steps_per_second,
    )


def _last_rows(path: Path, name: str) -> list[dict[str, Any]]:
    """The last complete rows of a file."""
    try:
        with open_inside(path, name) as file:
            return last_rows(file, _TAIL_BYTES)
    except OSError:
        return []


def _values(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    """The numbers under a key; rows may hold anything."""
    return [number for row in rows if (number := finite(row.get(key))) is not None]


def closest_preset(config: RunConfig) -> str:
    """The preset that the settings are nearest to, and how many of them differ: `default +2`. Of
    equally near ones that of the same suite."""
    mine, suite = _setting(config), config.task.partition(":")[0]
    found = ((_distance(mine, theirs), suite != of, name) for name, of, theirs in _presets())
    count, _, name = min(found, key=lambda each: each[:2])
    return f"{name} +{count}" if count else name


def _distance(mine: dict[str, Any], theirs: dict[str, Any]) -> int:
    """Settings that differ, of those that both have: another agent has other ones."""
    return sum(mine[key] != value for key, value in theirs.items() if key in mine)


def _setting(config: RunConfig) -> dict[str, Any]:
    other = ("task", "env_options")
    return {key: v for key, v in config.experiment().items() if key.split(".")[0] not in other}


@cache
def _presets() -> list[tuple[str, str, dict[str, Any]]]:
    """Names, suites and settings."""
    return [(name, p.task.partition(":")[0], _setting(p)) for name, p in PRESETS.items()]
