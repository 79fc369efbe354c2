"""What a run is doing, for every display: what its supervisor wrote to `status.json`, or, of a run
by hand, of an older version, or that has ended, what the files of its directory say."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.config import RunConfig, read_config
from dreamfleet.errors import ConfigError
from dreamfleet.files import read_json
from dreamfleet.fleet.claim import BeatWatch
from dreamfleet.fleet.record import (
    UNDER_WAY,
    RunState,
    RunStatus,
    Scores,
    read_record,
    run_state,
)
from dreamfleet.metrics.outputs.jsonl import JsonlTail, last_rows
from dreamfleet.roles.logger import RECENT_EPISODES, RECORD

log = logging.getLogger(__name__)

_STALE_SECONDS = 10.0  # after which a supervisor that does not write counts as stuck
_BEAT_SECONDS = 0.5
_METRICS_BYTES = 1 << 17  # the last line of metrics is shorter
_SCORE_BYTES = 1 << 22
_CURVE_POINTS = 64


class StatusLines:
    """Says what a run is doing, as plain lines; those that no display shows to `tell`."""

    def __init__(
        self,
        look: Callable[[], RunStatus | None],
        say: Callable[[str], None],
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._look, self._say, self._tell = look, say, tell or say
        self._start = self._memory = ""

    def show(self, *, ended: bool = False) -> None:
        """Look once, and say it. At the end, numbers from files are the newest ones."""
        try:
            status = self._look()
        except OSError as error:  # what cannot be shown must not end the run
            log.warning("The status of the run cannot be read: %s", error)
            return
        if status is None:
            return
        if status.start and status.start != self._start:
            self._start = status.start
            self._say(f"Agent: {status.start}")
        memory = str(status.metrics.get("learner/memory", ""))
        if memory and memory != self._memory:
            self._memory = memory
            self._tell(f"Memory for training: {memory}")
        if status.responding or ended:  # numbers from files are old
            self._say(status.line())
        if status.message:
            self._say(status.message)


class Watcher:
    """Looks at a run again and again. A look reads `score_bytes` of `scores.jsonl`, the next one
    reads on."""

    def __init__(self, logdir: Path, score_bytes: float = _SCORE_BYTES) -> None:
        self._logdir = logdir
        self._scores = _ScoresReader(logdir / "scores.jsonl", score_bytes)
        self._beat = BeatWatch(logdir)
        self.config: RunConfig | None = None
        """As it was read last."""
        self._config_written = 0

    def look(self, patience: float = _BEAT_SECONDS) -> RunStatus | None:
        """What the run is doing; None as long as there is no configuration in its directory. Waits
        so many seconds for a sign of life from another machine."""
        record = read_record(self._logdir)
        state, age = run_state(record), 0.0  # the clock of another machine may differ
        if record is not None and state != "unknown":
            age = abs(time.time() - record.written)
        elif record is not None and self._beat.beats(patience):
            state = record.state
        known = record is not None and record.written and record.task  # an older version has none
        if record is None or state not in UNDER_WAY or not known:
            return self.derive(record, state)
        record = replace(record, logdir=str(self._logdir))
        if age <= _STALE_SECONDS:
            return record
        late = f"the supervisor has not written its status for {age:.0f} s"
        return replace(record, waiting=late, hanging="", responding=False, steps_per_second=0.0)

    def derive(self, record: RunStatus | None, state: RunState) -> RunStatus | None:
        """What the files of the directory say; None as long as there is no configuration."""
        if (config := self._read_config()) is None:
            return None
        now, running = time.time(), state in UNDER_WAY
        known = record or RunStatus(0, 0.0, "", now)
        workers, machines = known.workers, known.machines
        if not running:
            over: dict[str, Any] = {"usage": None, "seconds": 0.0, "waiting": ""}
            workers = tuple(replace(each, state="ended", pid=None, **over) for each in workers)
            machines = tuple(replace(e, state="left", steps_per_second=0.0) for e in machines)
        scores, metrics = self._scores.read(), newest_metrics(self._logdir, logged=not running)
        step = metrics.get("step", 0)
        saved = Checkpoint(config.checkpoints).saved_at() if running else None
        return RunStatus(
            *(known.pid, known.created, known.host, known.started),
            *(workers, state, known.events, machines),
            task=config.task,
            logdir=str(self._logdir),
            steps=config.steps,
            duration=config.duration,
            train_ratio=config.train_ratio,
            step=max(self._scores.last_step, int(step) if isinstance(step, int | float) else 0),
            scores=scores,
            metrics=metrics,
            seconds=now - known.started if running else 0.0,
            checkpoint_age=None if saved is None else max(0.0, now - saved),
        )

    def _read_config(self) -> RunConfig | None:
        """Read again when it has changed."""
        with suppress(OSError, ConfigError):
            written = (self._logdir / "config.json").stat().st_mtime_ns
            if written != self._config_written:
                self.config, self._config_written = read_config(self._logdir), written
        return self.config


class _ScoreRow(msgspec.Struct):
    step: float
    score: float | None = msgspec.field(name="episode/score", default=None)


class _ScoresReader:
    """The scores of a file that grows. Each is read once, and none is kept."""

    def __init__(self, path: Path, most: float) -> None:
        self._tail, self._most = JsonlTail(path), most
        self._decode = msgspec.json.Decoder(_ScoreRow).decode
        self._clear()

    def _clear(self) -> None:
        self._count = 0
        self._best: float | None = None
        self._recent: deque[float] = deque(maxlen=RECENT_EPISODES)
        self._sums: list[float] = []  # of the episodes of each point of the curve
        self._width = 1  # how many those are; the last point may have fewer
        self.last_step = 0

    def read(self) -> Scores:
        """What is known with the next lines."""
        lines = self._tail.lines(self._most)
        if self._tail.replaced:  # a run that was started anew
            self._clear()
        for line in lines:
            with suppress(msgspec.MsgspecError, ValueError, RecursionError):
                row = self._decode(line)
                self.last_step = max(self.last_step, int(row.step))
                if row.score is not None:
                    self._add(row.score)
        counts = range(self._count, 0, -self._width)
        curve = (total / min(self._width, n) for total, n in zip(self._sums, counts, strict=True))
        return Scores(self._count, self._best, tuple(self._recent), tuple(curve))

    def _add(self, score: float) -> None:
        self._best = score if self._best is None else max(self._best, score)
        self._recent.append(score)
        if self._count % self._width == 0:
            self._sums.append(0.0)
        self._sums[-1] += score
        self._count += 1
        if self._count == _CURVE_POINTS * self._width:
            self._sums = [sum(pair) for pair in zip(self._sums[::2], self._sums[1::2], strict=True)]
            self._width *= 2


def newest_metrics(logdir: Path, *, logged: bool = True) -> dict[str, Any]:
    """The newest text or finite number of every key, as the logger recorded them; without a record,
    as in a run of an older version, those in the last lines of `metrics.jsonl` if `logged`."""
    newest = read_json(logdir / "workers" / RECORD, dict[str, Any])
    if newest is None:
        newest = {}
        if logged:
            with suppress(FileNotFoundError), (logdir / "metrics.jsonl").open("rb") as file:
                for row in last_rows(file, _METRICS_BYTES):
                    newest |= row
    return {key: value for key, value in newest.items() if isinstance(value, str) or _finite(value)}


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max
