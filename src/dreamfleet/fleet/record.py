"""The file `status.json` of a run: the supervisor, its workers, and how the run is doing.

The supervisor replaces it once a second. The terminal, `dreamfleet status` and the web page read
it; the claim (`dreamfleet.fleet.claim`) says whether it still holds.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import psutil

from dreamfleet.files import atomic_write

log = logging.getLogger(__name__)

FILE_NAME = "status.json"
_OLD_FILE_NAME = "fleet.json"  # of the version before, with the same first fields
MAX_EVENTS = 100

WorkerState = Literal["starting", "running", "restarting", "ended"]
MachineState = Literal["joined", "away", "left"]
FleetState = Literal["running", "ending", "evaluating", "ended", "failed"]


@dataclass(frozen=True)
class ProcessUsage:
    """What a process uses."""

    cpu: float
    """Cores that it kept busy since the last sample."""
    memory: int
    """Bytes."""


@dataclass(frozen=True)
class WorkerStatus:
    """One worker of a fleet."""

    name: str
    """Such as env-3."""
    role: str
    """Such as env; several workers may have the same role."""
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


@dataclass(frozen=True)
class MachineStatus:
    """One machine that has joined."""

    name: str
    state: MachineState
    envs: int
    """Training environments."""
    eval_envs: int
    """Evaluation environments."""
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
    """A failure, or the start that followed it."""

    time: float
    """Unix time."""
    worker: str
    event: Literal["failed", "started", "environment failed"]
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


@dataclass(frozen=True, kw_only=True)
class RunNumbers:
    """How a run is doing."""

    responding: bool
    """Whether the logger responds."""
    step: int
    scores: Scores
    metrics: Mapping[str, Any]
    """The newest of every key."""
    steps_per_second: float
    seconds: float
    """Since the run was started or resumed; 0 if it is not running."""
    seconds_left: float | None
    waiting: str
    """Why the run stands still, one sentence without a period; empty if it does not."""
    supervisor: ProcessUsage | None
    """What the supervisor's process uses, with the workers that are its threads."""
    checkpoint_age: float | None = None
    """Seconds since the last checkpoint of the agent; None if there is none."""
    hanging: str = ""
    """Environments that take long right now, and joined machines that make no steps, while others
    may go on; empty if there are none."""
    machines: tuple[MachineStatus, ...] = ()
    """Those that have joined, then those that have left."""


@dataclass(frozen=True)
class FleetRecord:
    """A supervisor, its workers, and how their run is doing."""

    pid: int
    created: float
    """Unix time at which the supervisor's process was created: with `pid` it names one process,
    because pids are reused."""
    host: str
    launcher: str
    started: float
    """Unix time at which the run was started or resumed."""
    workers: tuple[WorkerStatus, ...] = ()
    state: FleetState = "running"
    events: tuple[Event, ...] = ()
    """The newest failures and restarts of the run, in order."""
    written: float = 0.0
    """Unix time."""
    run: RunNumbers | None = field(default=None)
    """None if the supervisor does not know yet."""

    @classmethod
    def of_this_process(cls, launcher: str = "", events: tuple[Event, ...] = ()) -> Self:
        """The record of a fleet that this process supervises, without workers yet."""
        me, now = psutil.Process(), time.time()
        host = socket.gethostname()
        return cls(me.pid, me.create_time(), host, launcher, now, events=events, written=now)


def write_record(logdir: Path, record: FleetRecord) -> None:
    """Replace `status.json`."""
    atomic_write(logdir / FILE_NAME, msgspec.json.encode(record, enc_hook=float))


def read_record(logdir: Path) -> FleetRecord | None:
    """What the supervisor wrote last, also one of the version before; None if there is no such
    file, or if it is damaged."""
    for name in (FILE_NAME, _OLD_FILE_NAME):
        try:
            return msgspec.json.decode((logdir / name).read_bytes(), type=FleetRecord)
        except FileNotFoundError:
            continue
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            log.debug("%s of %s cannot be read: %s", name, logdir, error)
            return None
    return None


def record_evaluation(logdir: Path) -> None:
    """Record that training is over, and that this process evaluates the run."""
    try:
        if (record := read_record(logdir)) is not None:
            write_record(logdir, replace(record, state="evaluating", written=0.0))
    except OSError as error:  # a full disk must not end the evaluation
        log.warning("The status of the run cannot be written: %s", error)


def supervisor_process(record: FleetRecord) -> psutil.Process | None:
    """The supervisor's process, if it is alive and on this machine."""
    if record.host != socket.gethostname():
        return None
    try:
        process = psutil.Process(record.pid)
        alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return process if alive and abs(process.create_time() - record.created) < 1 else None
    except (psutil.Error, ValueError, OverflowError):
        return None


@contextmanager
def recorded_end(logdir: Path) -> Iterator[None]:
    """Record how the run of the block has ended, unless the supervisor has."""
    state: FleetState = "failed"
    try:
        yield
        state = "ended"
    except KeyboardInterrupt:
        state = "ended"
        raise
    finally:
        record = read_record(logdir)
        if record is not None and record.state not in ("ended", "failed"):
            with suppress(OSError):  # a full disk must not hide why the run ended
                write_record(logdir, replace(record, state=state))
