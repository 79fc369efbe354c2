"""The health record of a worker: a small mapped file in the run's directory.

It holds progress, failures, and what the worker does with which environment since when. An entry is
a store into memory, so it may be made at every step, and the file can be read while the worker is
stuck in code that lets no other thread run.
"""

from __future__ import annotations

import mmap
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from dreamfleet.config import RunConfig

Doing = Literal["waiting", "building", "resetting", "stepping", "closing"]
STARTED = "began"
"""A file among the health records: the run has acted since it was started or resumed."""
_DOING: tuple[Doing, ...] = ("waiting", "building", "resetting", "stepping", "closing")

_PROGRESS, _FAILURES, _FINAL, _DOING_NOW, _ENVID, _SINCE, _STEPS = range(7)
_NOT_FINITE = 2  # in the place of _FINAL
_WORDS = 8
_TEXT_BYTES = 8192
_LINE_LENGTH = 1000
_BYTES = 8 * _WORDS + _TEXT_BYTES

Number = Annotated[int, Meta(ge=0, le=1 << 60)]


@dataclass(frozen=True)
class HealthRecord:
    """What a health record holds. Bounds are for those that come from joined machines."""

    progress: Number = 0
    """Rises with every sign of progress; the role decides what counts as one."""
    failures: Number = 0
    """Environments that failed and were built or reset again, in the life of the run."""
    steps: Number = 0
    """Environment steps, in the life of the run."""
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


def health_path(args: RunConfig, worker: str) -> Path:
    """Where the health record of a worker lies."""
    return args.logdir / "workers" / worker


def read_health(path: Path) -> HealthRecord:
    """What a worker has recorded; an empty record if there is no such file."""
    try:
        content = path.read_bytes()
    except OSError:
        return HealthRecord()
    if len(content) < _BYTES:
        return HealthRecord()
    words = np.frombuffer(content, "<i8", _WORDS)
    floats = np.frombuffer(content, "<f8", _WORDS)
    doing = int(words[_DOING_NOW])
    text = content[8 * _WORDS :].rstrip(b"\0").decode(errors="replace")
    error, _, trace = text.partition("\n")
    return HealthRecord(
        progress=int(words[_PROGRESS]),
        failures=int(words[_FAILURES]),
        steps=int(words[_STEPS]),
        final=bool(words[_FINAL]),
        not_finite=bool(words[_FINAL] == _NOT_FINITE),
        doing=_DOING[doing] if 0 <= doing < len(_DOING) else "waiting",
        envid=int(words[_ENVID]),
        since=float(floats[_SINCE]),
        error=error,
        traceback=trace,
    )


class Health:
    """Writes the health record of this worker. Counts continue those of its predecessor.

    Args:
        path: The file; None, or one that cannot be written, keeps the record in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._map = _map(path)
        # Memoryviews are faster than arrays.
        words = memoryview(self._map)[: 8 * _WORDS]
        self._words, self._floats = words.cast("q"), words.cast("d")
        self._words[_FINAL] = self._words[_DOING_NOW] = 0

    def progress(self) -> None:
        """Record progress."""
        self._words[_PROGRESS] += 1

    def stepped(self, count: int) -> None:
        """Record environment steps."""
        self._words[_STEPS] += count

    def failed(self, line: str, error: BaseException | None = None) -> None:
        """Record the failure of an environment."""
        begin = line[:_LINE_LENGTH].encode()[:_LINE_LENGTH] + b"\n"
        trace = "".join(traceback.format_exception(error)).rstrip().encode() if error else b""
        text = begin + trace[-(_TEXT_BYTES - len(begin)) :]
        self._map[8 * _WORDS : _BYTES] = text.ljust(_TEXT_BYTES, b"\0")
        self._words[_FAILURES] += 1

    def give_up(self, *, not_finite: bool = False) -> None:
        """Record that this worker is about to end and that another start would not help."""
        self._words[_FINAL] = _NOT_FINITE if not_finite else 1

    def now(self, doing: Doing, envid: int = 0) -> None:
        """Record what this worker begins to do with an environment."""
        self._words[_DOING_NOW] = 0  # a reader never sees an action with the time of another one
        self._floats[_SINCE] = time.time()
        self._words[_ENVID] = envid
        self._words[_DOING_NOW] = _DOING.index(doing)


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
