"""The status of a run: one record, in the file `status.json` of its directory.

The supervisor replaces the file once a second. The terminal, `dreamfleet status` and the web page
read it; the claim (`dreamfleet.fleet.claim`) says whether it still holds.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import psutil

from dreamfleet.files import atomic_write, read_json
from dreamfleet.formatting import clock, readable

log = logging.getLogger(__name__)

FILE_NAME = "status.json"
MAX_EVENTS = 100

WorkerState = Literal["starting", "running", "restarting", "ended"]
MachineState = Literal["joined", "away", "left"]
RunState = Literal["running", "ending", "evaluating", "ended", "failed", "killed", "unknown"]
EventKind = Literal["failed", "started", "environment failed"]
UNDER_WAY = ("running", "ending", "evaluating")


@dataclass(frozen=True)
class ProcessUsage:
    """Cores that a process kept busy since the last sample, and bytes of memory."""

    cpu: float
    memory: int


@dataclass(frozen=True)
class WorkerStatus:
    """One worker of a run."""

    name: str
    role: str
    state: WorkerState
    """A worker that failed is restarting until it is started again."""
    pid: int | None
    """The supervisor's own, if the worker is a thread of it; None if it does not run."""
    host: str
    started: float
    """Unix time of its last start."""
    restarts: int = 0
    error: str = ""
    """One line: why it last failed."""
    usage: ProcessUsage | None = None
    """None if it has no process of its own on the supervisor's machine."""
    seconds: float = 0.0
    """Since its last start."""
    waiting: str = ""
    """What it waits for; empty if it does not."""


@dataclass(frozen=True)
class MachineStatus:
    """One machine that has joined."""

    name: str
    state: MachineState
    envs: int
    eval_envs: int
    seconds: float
    """Since it joined; of one that has left, since it left."""
    silence: float
    """Seconds since it was last heard of."""
    steps: int
    steps_per_second: float
    failures: int
    error: str
    """Why it last failed, why it makes no steps, or why it left."""


@dataclass(frozen=True)
class Event:
    """A failure, or the start that followed it, at a Unix time."""

    time: float
    worker: str
    event: EventKind
    error: str = ""


@dataclass(frozen=True)
class Scores:
    """The training episodes of a run in a bounded number of values."""

    count: int = 0
    best: float | None = None
    recent: tuple[float, ...] = ()
    """Of the last episodes, in order."""
    curve: tuple[float, ...] = ()
    """Means of equally many episodes each, in order."""


@dataclass(frozen=True)
class RunStatus:
    """A supervisor, its workers, and how their run is doing: everything that displays show."""

    pid: int
    created: float
    """Unix time at which the supervisor's process was created: with `pid` it names one process,
    because pids are reused."""
    host: str
    started: float
    """Unix time at which the run was started or resumed."""
    workers: tuple[WorkerStatus, ...] = ()
    state: RunState = "running"
    """Readers only: `killed` if the supervisor is gone and could not say so, `unknown` if it is on
    another machine and there is no sign of life."""
    events: tuple[Event, ...] = ()
    """The newest failures and restarts of the run, in order."""
    machines: tuple[MachineStatus, ...] = ()
    """Those that have joined, then those that have left."""
    # What follows is not known before the run's directory was looked at.
    written: float = 0.0
    """Unix time; 0 as long as the supervisor knows nothing but its workers."""
    task: str = ""
    logdir: str = ""
    steps: int = 0
    """All that the run makes; 0 for no end."""
    duration: float = 0.0
    """Seconds after which it ends; 0 for no end."""
    train_ratio: float = 0.0
    responding: bool = False
    """Whether the logger responds."""
    step: int = 0
    scores: Scores = field(default_factory=Scores)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The newest of every key."""
    steps_per_second: float = 0.0
    seconds: float = 0.0
    """Since the run was started or resumed; 0 if it is not running."""
    waiting: str = ""
    """Why the run stands still, one sentence without a period; empty if it does not."""
    hanging: str = ""
    """Environments that take long right now, and joined machines that make no steps, while others
    may go on; empty if there are none."""
    supervisor: ProcessUsage | None = None
    """What the supervisor's process uses, with the workers that are its threads."""
    checkpoint_age: float | None = None
    """Seconds since the last checkpoint of the agent; None if there is none."""

    @classmethod
    def of_this_process(cls, logdir: Path | None = None) -> Self:
        """What a supervisor in this process begins with: the events of its run so far."""
        me, now = psutil.Process(), time.time()
        before = read_record(logdir) if logdir else None
        events = before.events if before else ()
        return cls(me.pid, me.create_time(), socket.gethostname(), now, events=events)

    @property
    def running(self) -> bool:
        return self.state in UNDER_WAY

    @property
    def complete(self) -> bool:
        """Whether all steps are made."""
        return 0 < self.steps <= self.step

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
        """How often environments have failed, the run's own and those of machines."""
        own = self._number("env/failures") or 0
        return int(own) + sum(each.failures for each in self.machines)

    @property
    def start(self) -> str:
        """What the agent started from; empty as long as it is not known."""
        return str(self.metrics.get("learner/start", ""))

    @property
    def share(self) -> float | None:
        """How much of the run is done, from 0 to 1; None if it has no end."""
        shares = [self.step / self.steps] if self.steps else []
        if self.duration and self.running:
            shares.append(self.seconds / self.duration)
        return min(1.0, max(shares)) if shares else None

    @property
    def seconds_left(self) -> float | None:
        """Until what ends the run first; None if that is not known."""
        if not self.running or self.complete:  # the time of the last updates is unknown
            return None
        ends = [self.duration - self.seconds] if self.duration else []
        if self.steps and self.steps_per_second > 0:
            ends.append((self.steps - self.step) / self.steps_per_second)
        return max(0.0, min(ends)) if ends else None

    @property
    def message(self) -> str:
        """What matters beyond numbers; empty if all is well."""
        if self.state == "evaluating":
            return "Training is over, and the agent is being evaluated."
        if self.running:
            text = "; ".join(filter(None, (self.hanging, self.waiting)))
            return f"{'Waiting: ' if self.waiting else ''}{text}." if text else ""
        if self.complete and self.state == "ended":
            return "The run has ended: it has made all its steps."
        if self.state == "unknown":
            return "The run is on another machine, and there is no sign of life."
        how = "The run was killed" if self.state == "killed" else "The run is not under way"
        if self.state == "failed":
            errors = [f" ({each.name}: {each.error})" for each in self.workers if each.error]
            how = f"The run has failed{errors[0] if errors else ''}"
        return f"{how}. The same command resumes it."

    def line(self) -> str:
        """The numbers in one line."""
        goal = f" of {readable(self.steps)}" if self.steps else ""
        numbers = (
            ("score {}", self.score),
            ("evaluation {}", self.eval_score),
            ("updates {}", self.updates),
            ("{} updates/s", self.updates_per_second),
            ("{} steps/s", self.steps_per_second),
            ("replay ratio {}", self.replay_ratio),
        )
        parts = [f"step {readable(self.step)}{goal}"]
        parts += [text.format(readable(each)) for text, each in numbers if each is not None]
        if there := [each for each in self.machines if each.state == "joined"]:
            envs = sum(each.envs + each.eval_envs for each in there)
            parts.append(f"{_count(len(there), 'machine')} joined ({_count(envs, 'environment')})")
        if away := sum(each.state == "away" for each in self.machines):
            parts.append(f"{_count(away, 'machine')} away")
        if self.env_failures:
            rate = readable(self._number("env/failures_per_1000_steps") or 0.0)
            parts.append(f"{self.env_failures} failures of environments ({rate} in 1,000 steps)")
        if self.checkpoint_age is not None:
            parts.append(f"saved {clock(self.checkpoint_age)} ago")
        if self.seconds_left is not None:
            parts.append(f"{clock(self.seconds_left)} left")
        return "  ".join(parts)

    def to_json(self) -> str:
        """One JSON object, which `status.json` holds; numbers that are not finite are null."""
        derived = [name for name, each in vars(RunStatus).items() if isinstance(each, property)]
        plain = {**vars(self), **{name: getattr(self, name) for name in derived}}
        plain |= {"best_score": self.scores.best, "episodes": self.scores.count}
        return msgspec.json.encode(plain, enc_hook=float).decode()

    def _number(self, key: str) -> float | None:
        value = self.metrics.get(key)
        return float(value) if isinstance(value, int | float) else None


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def write_record(logdir: Path, record: RunStatus) -> None:
    """Replace `status.json`."""
    atomic_write(logdir / FILE_NAME, record.to_json())


def read_record(logdir: Path) -> RunStatus | None:
    """What the supervisor wrote last; None if there is no such file, or if it is damaged."""
    return read_json(logdir / FILE_NAME, RunStatus)


def record_state(logdir: Path, state: RunState, unless: tuple[RunState, ...] = ()) -> None:
    """Record that a run goes on or has ended without its supervisor."""
    try:
        record = read_record(logdir)
        if record is not None and record.state not in unless:
            write_record(logdir, replace(record, state=state, written=0.0))
    except OSError as error:  # a full disk must not hide how the run ends
        log.warning("The status of the run cannot be written: %s", error)


def supervisor_process(record: RunStatus) -> psutil.Process | None:
    """The supervisor's process, if it is alive and on this machine."""
    if record.host != socket.gethostname():
        return None
    try:
        process = psutil.Process(record.pid)
        alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return process if alive and abs(process.create_time() - record.created) < 1 else None
    except (psutil.Error, ValueError, OverflowError):
        return None


def run_state(record: RunStatus | None) -> RunState:
    """What a record says of a run, and whether its supervisor is alive."""
    if record is None:
        return "ended"
    if record.state in ("ended", "failed") or supervisor_process(record) is not None:
        return record.state
    return "killed" if record.host == socket.gethostname() else "unknown"
