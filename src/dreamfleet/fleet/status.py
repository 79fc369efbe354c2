"""What a run is doing: one description, which every display draws.

The lines of a run without a terminal, its live display, `dreamfleet status`, `status --json` and
the web page show a `RunStatus`. While the run is under way it is what its supervisor wrote to
`status.json` (`dreamfleet.fleet.status_writer`). Of a run by hand, of an older version, or that has
ended, it is derived from the files of the run's directory.
"""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.config import RunConfig, read_config
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.claim import BeatWatch
from dreamfleet.fleet.record import (
    Event,
    FleetRecord,
    MachineStatus,
    RunNumbers,
    Scores,
    WorkerStatus,
    read_record,
    supervisor_process,
)
from dreamfleet.fleet.stall import hanging
from dreamfleet.formatting import clock, readable
from dreamfleet.metrics.outputs.jsonl import JsonlTail, last_rows
from dreamfleet.roles.health import read_health
from dreamfleet.roles.logger import RECENT_EPISODES

log = logging.getLogger(__name__)

RunState = Literal["running", "ending", "evaluating", "ended", "failed", "killed", "unknown"]

_UNDER_WAY = ("running", "ending", "evaluating")
_SAME_IN_JSON = (
    *("state", "responding", "message", "waiting", "hanging", "env_failures", "start", "step"),
    *("share", "seconds", "seconds_left", "score", "eval_score", "steps_per_second", "updates"),
    *("updates_per_second", "replay_ratio", "checkpoint_age", "supervisor"),
)
_STALE_SECONDS = 10.0  # after which a supervisor that does not write counts as stuck
_BEAT_SECONDS = 0.5
_TAIL_BYTES = 1 << 17  # the last line of metrics is shorter
_CURVE_POINTS = 64


@dataclass(frozen=True, kw_only=True)
class RunStatus(RunNumbers):
    """Everything that displays show of a run."""

    config: RunConfig
    state: RunState
    """`killed`: the supervisor is gone and could not say so. `unknown`: it is on another machine,
    and there is no sign of life."""
    workers: tuple[WorkerStatus, ...]
    events: tuple[Event, ...] = ()
    """The newest failures and restarts, in order."""

    @property
    def running(self) -> bool:
        return self.state in _UNDER_WAY

    @property
    def complete(self) -> bool:
        """Whether it has made all its steps."""
        return 0 < self.config.steps <= self.step

    @property
    def score(self) -> float | None:
        """The mean of recent training episodes."""
        told, recent = self._number("score"), self.scores.recent
        return sum(recent) / len(recent) if told is None and recent else told

    @property
    def eval_score(self) -> float | None:
        """The mean of recent evaluation episodes."""
        return self._number("eval_score")

    @property
    def updates(self) -> float | None:
        return self._number("learner/updates")

    @property
    def updates_per_second(self) -> float | None:
        return self._number("learner/updates_per_second")

    @property
    def replay_ratio(self) -> float | None:
        return self._number("learner/replay_ratio")

    @property
    def env_failures(self) -> int:
        """How often environments have failed since the agent was started."""
        return int(self._number("env/failures") or 0)

    @property
    def start(self) -> str:
        """What the agent started from; empty as long as it is not known."""
        return str(self.metrics.get("learner/start", ""))

    @property
    def share(self) -> float | None:
        """How much of the run is done, from 0 to 1; None if it has no end."""
        shares = [self.step / self.config.steps] if self.config.steps else []
        if self.config.duration and self.running:
            shares.append(self.seconds / self.config.duration)
        return min(1.0, max(shares)) if shares else None

    @property
    def message(self) -> str:
        """What matters beyond numbers; empty if all is well."""
        if self.state == "evaluating":
            return "Training is over, and the agent is being evaluated."
        if self.running:
            reasons = [self.hanging, self.waiting] if self.waiting else [self.hanging]
            text = "; ".join(filter(None, reasons))
            begin = "Waiting: " if self.waiting else ""
            return f"{begin}{text}." if text else ""
        if self.complete:
            return "The run has ended: it has made all its steps."
        if self.state == "unknown":
            return "The run is on another machine, and there is no sign of life."
        how = "The run is not under way"
        if self.state == "failed":
            errors = [f"{worker.name}: {worker.error}" for worker in self.workers if worker.error]
            how = f"The run has failed{f' ({errors[0]})' if errors else ''}"
        elif self.state == "killed":
            how = "The run was killed"
        return f"{how}. The same command resumes it."

    def line(self) -> str:
        """The numbers in one line."""
        fields = [f"step {readable(self.step)}"]
        if self.config.steps:
            fields[0] += f" of {readable(self.config.steps)}"
        numbers = (
            ("score {}", self.score),
            ("evaluation {}", self.eval_score),
            ("updates {}", self.updates),
            ("{} updates/s", self.updates_per_second),
            ("{} steps/s", self.steps_per_second),
            ("replay ratio {}", self.replay_ratio),
        )
        fields += [text.format(readable(each)) for text, each in numbers if each is not None]
        if there := [each for each in self.machines if each.state == "joined"]:
            envs = sum(each.envs + each.eval_envs for each in there)
            fields.append(f"{_count(len(there), 'machine')} joined ({_count(envs, 'environment')})")
        if away := sum(each.state == "away" for each in self.machines):
            fields.append(f"{_count(away, 'machine')} away")
        if self.env_failures:
            rate = readable(self._number("env/failures_per_1000_steps") or 0.0)
            fields.append(f"{self.env_failures} failures of environments ({rate} in 1,000 steps)")
        if self.checkpoint_age is not None:
            fields.append(f"saved {clock(self.checkpoint_age)} ago")
        if self.seconds_left is not None:
            fields.append(f"{clock(self.seconds_left)} left")
        return "  ".join(fields)

    def to_json(self) -> str:
        """One JSON object; numbers that are not finite are null."""
        plain = {
            "task": self.config.task,
            "logdir": str(self.config.logdir),
            **{name: getattr(self, name) for name in _SAME_IN_JSON},
            "steps": self.config.steps,
            "best_score": self.scores.best,
            "episodes": self.scores.count,
            "workers": [asdict(worker) for worker in self.workers],
            "machines": [asdict(machine) for machine in self.machines],
            "events": [asdict(event) for event in self.events],
            "metrics": dict(self.metrics),
        }
        return msgspec.json.encode(plain, enc_hook=float).decode()

    def _number(self, key: str) -> float | None:
        value = self.metrics.get(key)
        return float(value) if isinstance(value, int | float) else None


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


class StatusLines:
    """Says what a run is doing, as plain lines.

    Args:
        look: Returns what it is doing.
        say: Takes the lines.
        tell: Takes those that come once, and that no display shows; None for `say`.
    """

    def __init__(
        self,
        look: Callable[[], RunStatus | None],
        say: Callable[[str], None],
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._look, self._say, self._tell = look, say, tell or say
        self._start = self._memory = ""

    def show(self) -> None:
        """Look once, and say it."""
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
        if status.responding:  # numbers from files are old
            self._say(status.line())
        if status.message:
            self._say(status.message)


class Watcher:
    """Looks at a run again and again.

    Args:
        logdir: The run's directory.
    """

    def __init__(self, logdir: Path) -> None:
        self._logdir = logdir
        self._files = RunFiles(logdir)
        self._beat = BeatWatch(logdir)

    def look(self, patience: float = _BEAT_SECONDS) -> RunStatus | None:
        """What the run is doing; None as long as there is no configuration in its directory.

        Args:
            patience: Seconds to wait for a sign of life from another machine.
        """
        config, record = self._files.config(), read_record(self._logdir)
        if config is None:
            return None
        state = run_state(record)
        if record is None or state not in (*_UNDER_WAY, "unknown"):
            return self._files.read(config, record, state)
        if state == "unknown":  # it is on another machine, whose clock may differ
            written = 0.0
            state = record.state if self._beat.beats(patience) else state
        else:
            written = abs(time.time() - record.written)
        if state == "unknown" or record.run is None or written > _STALE_SECONDS:
            status = self._files.read(config, record, state)
            late = state == "running" and written > _STALE_SECONDS
            why = f"the supervisor has not written its status for {written:.0f} s"
            return replace(status, waiting=why) if late else status
        return RunStatus(
            config=config,
            state=state,
            workers=record.workers,
            events=record.events,
            **vars(record.run),
        )


class RunFiles:
    """What the files of a run's directory say.

    Args:
        logdir: The run's directory.
    """

    def __init__(self, logdir: Path) -> None:
        self._logdir = logdir
        self._scores = _ScoresReader(logdir / "scores.jsonl")
        self._config: RunConfig | None = None
        self._config_written = 0

    def config(self) -> RunConfig | None:
        """The configuration, read again when it has changed; None as long as there is none."""
        with suppress(OSError, ConfigError):
            written = (self._logdir / "config.json").stat().st_mtime_ns
            if written != self._config_written:
                self._config, self._config_written = read_config(self._logdir), written
        return self._config

    def read(self, config: RunConfig, record: FleetRecord | None, state: RunState) -> RunStatus:
        """All that is known without the logger."""
        scores, metrics = self._scores.read(), _newest_metrics(self._logdir / "metrics.jsonl")
        step = metrics.get("step", 0)
        now, running = time.time(), state in _UNDER_WAY
        saved = Checkpoint(config.checkpoints).saved_at() if running else None
        workers = record.workers if record else ()
        if running:
            workers = tuple(
                replace(each, seconds=max(0.0, now - each.started) if each.pid else 0.0)
                for each in workers
            )
        else:
            ended: dict[str, Any] = {"state": "ended", "pid": None, "usage": None, "seconds": 0.0}
            workers = tuple(replace(each, **ended) for each in workers)
        folder = self._logdir / "workers"
        health = [read_health(folder / each.name) for each in workers if each.state == "running"]
        return RunStatus(
            config=config,
            state=state,
            responding=False,
            step=max(self._scores.last_step, int(step) if isinstance(step, int | float) else 0),
            scores=scores,
            metrics=metrics,
            steps_per_second=0.0,
            seconds=now - record.started if record and running else 0.0,
            seconds_left=None,
            waiting="",
            hanging=hanging(health, config.env_timeout, now) if state == "running" else "",
            checkpoint_age=None if saved is None else max(0.0, now - saved),
            workers=workers,
            supervisor=None,
            machines=_left(record),
            events=record.events if record else (),
        )


def _left(record: FleetRecord | None) -> tuple[MachineStatus, ...]:
    """The machines of a run whose supervisor does not answer for them any more."""
    known = record.run.machines if record and record.run else ()
    return tuple(replace(each, state="left", steps_per_second=0.0) for each in known)


def run_state(record: FleetRecord | None) -> RunState:
    """What a record says of a run, and whether its supervisor is alive."""
    if record is None:
        return "ended"
    if record.state in ("ended", "failed") or supervisor_process(record) is not None:
        return record.state
    return "killed" if record.host == socket.gethostname() else "unknown"


class _ScoreRow(msgspec.Struct):
    step: float
    score: float | None = msgspec.field(name="episode/score", default=None)


class _ScoresReader:
    """The scores of a file that grows. Each is read once, and none is kept."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonlTail(path).lines
        self._decode = msgspec.json.Decoder(_ScoreRow).decode
        self._count = 0
        self._best: float | None = None
        self._recent: deque[float] = deque(maxlen=RECENT_EPISODES)
        self._curve: list[float] = []
        self._width = 1  # episodes of a point of the curve
        self._sum, self._summed = 0.0, 0  # of the next point
        self.last_step = 0

    def read(self) -> Scores:
        """What is known with the next lines."""
        for line in self._lines():
            with suppress(msgspec.MsgspecError, ValueError, RecursionError):
                row = self._decode(line)
                self.last_step = max(self.last_step, int(row.step))
                if row.score is not None:
                    self._add(row.score)
        rest = [self._sum / self._summed] if self._summed else []
        return Scores(self._count, self._best, tuple(self._recent), (*self._curve, *rest))

    def _add(self, score: float) -> None:
        self._count += 1
        self._best = score if self._best is None else max(self._best, score)
        self._recent.append(score)
        self._sum, self._summed = self._sum + score, self._summed + 1
        if self._summed < self._width:
            return
        self._curve.append(self._sum / self._width)
        self._sum, self._summed = 0.0, 0
        if len(self._curve) == _CURVE_POINTS:
            pairs = zip(self._curve[::2], self._curve[1::2], strict=True)
            self._curve = [(first + second) / 2 for first, second in pairs]
            self._width *= 2


def _newest_metrics(path: Path) -> dict[str, Any]:
    """The newest text or finite number of every key in the last lines; empty if there is none."""
    try:
        with path.open("rb") as file:
            rows = last_rows(file, _TAIL_BYTES)
    except FileNotFoundError:
        return {}
    newest = {key: value for row in rows for key, value in row.items()}
    return {key: value for key, value in newest.items() if isinstance(value, str) or _finite(value)}


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max
