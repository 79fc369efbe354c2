"""One supervisor in a directory at a time, also where several machines share it.

A lock keeps others out: the kernel releases that of a dead process, and NFS passes locks on to
other machines. Some file systems have no locks, or keep them to one machine, and there is no way to
ask. So the supervisor also beats: a thread of it counts in a small file. A process that finds a
record of a run on another machine watches that file, and takes the directory only if the count
stands still. Liveness is judged by change alone, because clocks of machines differ.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from dreamfleet.errors import ConfigError
from dreamfleet.fleet.record import (
    UNDER_WAY,
    RunState,
    RunStatus,
    read_record,
    record_state,
    run_state,
    write_record,
)

log = logging.getLogger(__name__)

LOCK_NAME = "fleet.lock"
BEAT_NAME = "fleet.beat"
BEAT_SECONDS = 1.0
"""Between two signs of life of a supervisor."""
_SILENT_SECONDS = 10.0  # a supervisor that has not beaten for as long is dead
_LOOK_SECONDS = 0.2
_KILL_SECONDS = 2.0
_claimed: set[Path] = set()


@contextmanager
def claim_directory(logdir: Path, say: Callable[[str], None] = log.warning) -> Iterator[None]:
    """Make this process the only supervisor in this directory until the block ends. It is a
    `ConfigError` if another process runs a fleet there, or if nothing can be written."""
    try:
        logdir.mkdir(parents=True, exist_ok=True)
        lock = (logdir / LOCK_NAME).open("a")
    except OSError as error:
        raise _not_writable(logdir, error) from None
    with lock:
        _refuse_second(logdir, _locked(logdir, lock), say)
        try:
            beat = _Beat(logdir, say)
            write_record(logdir, RunStatus.of_this_process(logdir))
        except OSError as error:
            raise _not_writable(logdir, error) from None
        state: RunState = "failed"
        with beat.beating():
            _claimed.add(logdir.absolute())
            try:
                yield
                state = "ended"
            except KeyboardInterrupt:
                state = "ended"
                raise
            finally:
                _claimed.discard(logdir.absolute())
                record_state(logdir, state, unless=("ended", "failed"))


def is_claimed(logdir: Path) -> bool:
    """Whether this process has claimed this directory."""
    return logdir.absolute() in _claimed


def _not_writable(logdir: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{logdir} cannot be written to ({error.strerror}), so the run was not started: make room "
        "or fix its permissions, or choose another --logdir."
    )


def _locked(logdir: Path, lock: IO[str]) -> bool:
    """Take the lock; False if there are no locks here."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with this process
    except (BlockingIOError, PermissionError):
        raise _in_use(logdir, read_record(logdir)) from None
    except OSError as error:
        log.info("%s has no locks (%s).", logdir, error)
        return False
    return True


def _refuse_second(logdir: Path, locked: bool, say: Callable[[str], None]) -> None:
    """Refuse a directory in use by a supervisor that the lock did not keep out."""
    record = read_record(logdir)
    state = run_state(record)
    alive = state in UNDER_WAY and not locked  # on one machine the lock tells
    if record is not None and state == "unknown":
        say(
            f"The run in {logdir} was last on {record.host} (process {record.pid}) and may still "
            f"be running there: watching it for {_SILENT_SECONDS:g} s"
        )
        alive = BeatWatch(logdir).beats(_SILENT_SECONDS)
    if alive:
        raise _in_use(logdir, record)


def _in_use(logdir: Path, record: RunStatus | None) -> ConfigError:
    who = f" (process {record.pid} on {record.host})" if record else ""
    return ConfigError(
        f"{logdir} is in use by another run{who}: end it, or choose another directory."
    )


def _read_beat(logdir: Path) -> bytes:
    try:
        # Opened each time: only then does NFS ask the server for what others have written.
        return (logdir / BEAT_NAME).read_bytes()
    except OSError:
        return b""


class BeatWatch:
    """Whether the supervisor on another machine is alive."""

    def __init__(self, logdir: Path) -> None:
        self._logdir = logdir
        self._last = b""
        self._changed = float("-inf")

    def last(self) -> float:
        """When it was last seen to beat, on the monotonic clock; minus infinity if never."""
        beat = _read_beat(self._logdir)
        if self._last and beat != self._last:
            self._changed = time.monotonic()
        self._last = beat
        return self._changed

    def beats(self, patience: float) -> bool:
        """Whether it has beaten in the last seconds; waits so long for the first change."""
        deadline = time.monotonic() + patience
        while self.last() < (now := time.monotonic()) - _SILENT_SECONDS:
            if now >= deadline:
                return False
            time.sleep(min(_LOOK_SECONDS, max(0.0, deadline - now)))
        return True


class _Beat:
    """Counts in the directory's file, and ends this process when another one does."""

    def __init__(self, logdir: Path, say: Callable[[str], None]) -> None:
        self._logdir, self._say = logdir, say
        self._name = secrets.token_hex(8).encode()
        self._count = 0
        self._over = threading.Event()
        self._write()

    @contextmanager
    def beating(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(_KILL_SECONDS)  # a shared directory may hang

    def _run(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            now = _read_beat(self._logdir)
            if now and not now.startswith(self._name):
                self._lost()
                return
            with suppress(OSError):
                self._write()

    def _write(self) -> None:
        self._count += 1
        # In place and of one size, so that a full disk stops no beat.
        descriptor = os.open(
            self._logdir / BEAT_NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644
        )
        try:
            os.write(descriptor, b"%s %020d\n" % (self._name, self._count))
        finally:
            os.close(descriptor)  # which is when NFS writes it

    def _lost(self) -> None:
        """Two started at the same moment, or this machine was cut off for long."""
        record = read_record(self._logdir)
        who = f"process {record.pid} on {record.host}" if record else "another process"
        self._say(f"{who} has taken {self._logdir} over, so this run ends without saving.")
        end_at_once()


def end_at_once() -> None:
    """As Ctrl-C does that is pressed twice."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_KILL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
