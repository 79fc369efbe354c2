"""What a supervisor writes about its workers: the file `fleet.json` in the run's directory.

The supervisor writes it whenever something changes. Anybody may read it, so a second terminal, or a
person on another machine with the same file system, sees the same fleet as the one who started it.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

import msgspec
import psutil

from dreamfleet.files import atomic_write
from dreamfleet.metrics.outputs.jsonl import append_row

log = logging.getLogger(__name__)

FILE_NAME = "fleet.json"
EVENTS_FILE = "events.jsonl"
"""When workers failed and were started, a line each: what `fleet.json` forgets."""

WorkerState = Literal["starting", "running", "restarting", "ended"]
FleetState = Literal["running", "ending", "evaluating", "ended", "failed"]


@dataclass(frozen=True)
class WorkerRecord:
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


@dataclass(frozen=True)
class FleetRecord:
    """A supervisor and its workers."""

    pid: int
    created: float
    """Unix time at which the supervisor's process was created: with `pid` it names one process,
    because pids are used again."""
    host: str
    launcher: str
    started: float
    """Unix time at which the run was started, or resumed."""
    workers: tuple[WorkerRecord, ...] = ()
    state: FleetState = "running"

    @classmethod
    def of_this_process(cls, launcher: str = "") -> Self:
        """The record of a fleet that this process supervises, which has no workers yet."""
        me = psutil.Process()
        return cls(me.pid, me.create_time(), socket.gethostname(), launcher, time.time())


def write_record(logdir: Path, record: FleetRecord) -> None:
    """Replace what is known of the fleet of this directory."""
    content = msgspec.json.format(msgspec.json.encode(record), indent=2)
    atomic_write(logdir / FILE_NAME, content)


def read_record(logdir: Path) -> FleetRecord | None:
    """What the supervisor wrote last; None if there is no such file, or if it is damaged."""
    path = logdir / FILE_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=FleetRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        log.debug("%s cannot be read: %s", path, error)
        return None


def record_event(logdir: Path, worker: str, event: str, error: str = "") -> None:
    """Add a line about a worker that has `failed`, or was `started` again."""
    row = {"time": round(time.time(), 3), "worker": worker, "event": event, "error": error}
    try:
        append_row(logdir / EVENTS_FILE, row)
    except OSError as problem:  # a full disk must not keep a worker from being started
        log.warning("What happens cannot be written: %s", problem)


def record_evaluation(logdir: Path) -> None:
    """Training is over, and this process evaluates the run."""
    try:
        if (record := read_record(logdir)) is not None:
            write_record(logdir, replace(record, state="evaluating"))
    except OSError as error:  # a full disk must not take the evaluation along
        log.warning("The record of the fleet cannot be written: %s", error)


def supervisor_process(record: FleetRecord) -> psutil.Process | None:
    """The supervisor's process, if it lives and is on this machine."""
    if record.host != socket.gethostname():
        return None
    try:
        process = psutil.Process(record.pid)
        lives = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return process if lives and abs(process.create_time() - record.created) < 1 else None
    except (psutil.Error, ValueError, OverflowError):
        return None


@contextmanager
def recorded_end(logdir: Path) -> Iterator[None]:
    """Write into the record how the run of the block has ended, unless somebody has."""
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
