"""The health record of a worker: a small mapped file in the run's directory.

It holds progress, failures, what the worker waits for, and what it does with which environment
since when. An entry is a store into memory, so it may be made at every step, and the file can be
read while the worker is stuck in code that lets no other thread run.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from dreamfleet.config import RunConfig

Doing = Literal["waiting", "building", "resetting", "stepping", "closing"]
STARTED = "began"
"""A file among the health records: the run has acted since it was started or resumed."""
_DOING: tuple[Doing, ...] = ("waiting", "building", "resetting", "stepping", "closing")

_NOT_FINITE = 2  # in the place of `final`
_TEXT_BYTES, _WAITING_BYTES = 8192, 1024
_LINE_LENGTH = 1000


class _Layout(ctypes.LittleEndianStructure):
    """The bytes of the file."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("progress", "failures", "final", "doing", "envid")),
        ("since", ctypes.c_double),
        ("steps", ctypes.c_int64),
        ("reported", ctypes.c_double),
        ("text", ctypes.c_char * _TEXT_BYTES),
        ("waiting", ctypes.c_char * _WAITING_BYTES),
    )


_BYTES = ctypes.sizeof(_Layout)
_SAME = ("progress", "failures", "steps", "envid", "since", "reported")  # in file and record
Number = Annotated[int, Meta(ge=0, le=1 << 60)]


@dataclass(frozen=True)
class HealthRecord:
    """What a health record holds. Bounds are for those that come from joined machines."""

    progress: Number = 0
    """Rises with every sign of progress; the role decides what counts as one."""
    failures: Number = 0
    """Environments that failed and were built or reset again, in the life of the run."""
    steps: Number = 0
    """Environment steps, or updates of a learner, in the life of the run."""
    final: bool = False
    """Whether the worker ended because another start would not help."""
    not_finite: bool = False
    """Whether that was NaN or infinity, at which the run ends."""
    doing: Doing = "waiting"
    """What it does with an environment right now."""
    envid: Number = 0
    """With which environment."""
    since: float = 0.0
    """Unix time since when."""
    error: Annotated[str, Meta(max_length=_LINE_LENGTH)] = ""
    """The last failure, one line."""
    traceback: Annotated[str, Meta(max_length=_TEXT_BYTES)] = ""
    """Its traceback; only the end of a long one."""
    waiting: Annotated[str, Meta(max_length=_WAITING_BYTES)] = ""
    """What it waits for, without a period; empty if it does not wait."""
    reported: float = 0.0
    """Unix time at which it said so; 0 if it has not since it was started."""


def health_path(args: RunConfig, worker: str) -> Path:
    """Where the health record of a worker lies."""
    return args.logdir / "workers" / worker


def read_health(path: Path) -> HealthRecord:
    """What a worker has recorded; an empty record if there is no such file."""
    try:
        found = _Layout.from_buffer_copy(path.read_bytes())
    except (OSError, ValueError):  # there is none, or it is too short
        return HealthRecord()
    error, _, trace = found.text.decode(errors="replace").partition("\n")
    return HealthRecord(
        **{name: getattr(found, name) for name in _SAME},
        final=bool(found.final),
        not_finite=found.final == _NOT_FINITE,
        doing=_DOING[found.doing] if 0 <= found.doing < len(_DOING) else "waiting",
        error=error,
        traceback=trace,
        waiting=found.waiting.decode(errors="replace"),
    )


class Health:
    """Writes the health record of this worker. Counts continue those of its predecessor. Without a
    path, or with one that cannot be written, the record is kept in memory."""

    def __init__(self, path: Path | None = None) -> None:
        self._record = _Layout.from_buffer(_map(path))
        self._record.final = self._record.doing = self._record.reported = 0

    def progress(self) -> None:
        """Record progress."""
        self._record.progress += 1

    def waits(self, what: str = "") -> None:
        """Record what this worker waits for, if it waits; called every `log_every` seconds."""
        self._record.waiting = what.rstrip(".").encode()[: _WAITING_BYTES - 1]
        self._record.reported = time.time()

    def stepped(self, count: int) -> None:
        """Record environment steps, or updates."""
        self._record.steps += count

    def failed(self, line: str, error: BaseException | None = None) -> None:
        """Record the failure of an environment."""
        begin = line[:_LINE_LENGTH].encode()[:_LINE_LENGTH] + b"\n"
        trace = "".join(traceback.format_exception(error)).rstrip().encode() if error else b""
        self._record.text = begin + trace[-(_TEXT_BYTES - len(begin)) :]
        self._record.failures += 1

    def give_up(self, *, not_finite: bool = False) -> None:
        """Record that this worker is about to end and that another start would not help."""
        self._record.final = _NOT_FINITE if not_finite else 1

    def now(self, doing: Doing, envid: int = 0) -> None:
        """Record what this worker begins to do with an environment."""
        self._record.doing = 0  # a reader never sees an action with the time of another one
        self._record.since = time.time()
        self._record.envid = envid
        self._record.doing = _DOING.index(doing)


def _map(path: Path | None) -> mmap.mmap:
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if os.fstat(descriptor).st_size != _BYTES:
                    # Written in full: a full disk raises here instead of SIGBUS at the first store.
                    os.truncate(descriptor, 0)
                    os.write(descriptor, bytes(_BYTES))
                return mmap.mmap(descriptor, _BYTES)
            finally:
                os.close(descriptor)
        except OSError:
            pass  # the work goes on without a record
    return mmap.mmap(-1, _BYTES)
