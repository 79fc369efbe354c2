"""A replay's directory: one writer at a time, and what is found in it when it is opened."""

from __future__ import annotations

import fcntl
import logging
import os
import weakref
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from dreamfleet.replay import chunkfile
from dreamfleet.replay.chunkfile import ChunkInfo, NotAChunkError
from dreamfleet.replay.errors import DirectoryInUseError, ReplayError
from dreamfleet.replay.journal import FILENAME as JOURNAL

log = logging.getLogger(__name__)

LOCK = "lock"
_PARTIAL = "[0-9a-f]" * 32 + chunkfile.PARTIAL


class Found(NamedTuple):
    path: Path
    info: ChunkInfo


class DirectoryLock:
    """Held while the directory is open for writing; the kernel lets go of a dead process's."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ReplayError(
                f"The replay directory {directory} cannot be used ({error.strerror})."
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise DirectoryInUseError(
                f"Another replay (process {holder}) has {directory} open: stop it, or use another "
                "directory."
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        # Runs at the latest when the lock is collected, so a forgotten replay blocks nobody.
        self.release = weakref.finalize(self, os.close, fd)
        _held.add(self)


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked child shares its parent's lock, and would hold it when the parent is dead."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)


class Contents(NamedTuple):
    """What lies in a replay's directory."""

    found: list[Found]
    skipped: dict[str, str]
    """Files that are no chunks of this replay, with the reason."""


def scan(directory: Path, run: bytes | None) -> Contents:
    """Every chunk, and every file that is none with the reason; nothing here is fatal.

    Chunks belong to the journal with the id `run`; if that is lost, to the one that most of them
    name. They share their columns; should there be others, the most common win.
    """
    found: list[Found] = []
    skipped: dict[str, str] = {}
    for path in sorted(directory.iterdir()):
        if path.name in (LOCK, JOURNAL) or path.match(_PARTIAL):
            continue
        try:
            info = chunkfile.read(path)
            if path.name != info.filename:
                raise NotAChunkError(f"holds the chunk of {info.filename}")
            found.append(Found(path, info))
        except NotAChunkError as problem:
            skipped[path.name] = str(problem)
    if run is None and found:
        run = Counter(item.info.run for item in found).most_common(1)[0][0]
    for item in found:
        if item.info.run != run:
            skipped[item.path.name] = "belongs to another replay: use load_directory to copy steps"
    found = [item for item in found if item.info.run == run]
    kinds = Counter((item.info.schema, item.info.steps) for item in found)
    if len(kinds) > 1:
        schema, steps = winner = kinds.most_common(1)[0][0]
        for item in found:
            if (item.info.schema, item.info.steps) != winner:
                skipped[item.path.name] = (
                    f"has other columns or another size than the rest: "
                    f"{schema.describe_difference(item.info.schema)}, "
                    f"{item.info.steps} steps instead of {steps}"
                )
        found = [f for f in found if (f.info.schema, f.info.steps) == winner]
    for name, reason in skipped.items():
        log.warning("Skipping %s in the replay directory %s: it %s.", name, directory, reason)
    return Contents(found, skipped)


def remove_partial(directory: Path) -> None:
    """Files that were being made when a writer died never had steps in them."""
    for path in directory.glob(_PARTIAL):
        path.unlink(missing_ok=True)
