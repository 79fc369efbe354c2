"""The files of a replay: chunks with a checked header, and the directory they lie in.

A chunk file:

    8 bytes   magic
    4 bytes   length of the description, little-endian
    4 bytes   CRC-32 of the description
    n bytes   the description, JSON: id, run, previous id, stream, steps, columns
    padding   up to a multiple of 4096; it ends with the score of an episode so far (see
              `episodes`), and 72 bytes in which older versions kept checksums
    columns   ticks, then one column a key (see `schema`)

The rest of the header never changes once the file has its name. The ticks of its steps
and the journal say which steps are valid, not the file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import struct
import uuid
import weakref
import zlib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from dreamfleet.files import reserve
from dreamfleet.replay.errors import (
    DirectoryInUseError,
    ReplayError,
    SchemaError,
    StorageFullError,
)
from dreamfleet.replay.schema import Schema, StreamId, round_up
from dreamfleet.replay.storage.journal import DAMAGED, SYNCED
from dreamfleet.replay.storage.journal import FILENAME as JOURNAL

log = logging.getLogger(__name__)

SUFFIX = ".chunk"
LOCK = "lock"
EPISODES = "episodes.json"
_MAGIC = b"DFCHUNK\x01"
_PARTIAL = ".partial"
_PARTIAL_PATTERN = "[0-9a-f]" * 32 + _PARTIAL
_CHUNK_PATTERN = "[0-9a-f]" * 32 + SUFFIX
_PARTIAL_EPISODES = f".{EPISODES}.*"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM}
_PREFIX = struct.Struct("<8sII")
_MAX_DESCRIPTION = 1 << 20
_ROOM_FOR_THE_REST = 1024
_HEADER_ALIGN = 4096
UNUSED_BYTES, BEFORE_BYTES = 72, 24
"""At the end of the header: what older versions used, and before it an episode's score so far."""
# Slots must start on a page on every machine that may read the file, also on those with big pages.
_SLOT_ALIGN = 16384


class NotAChunkError(Exception):
    """A file that cannot be read as a chunk; caught where files are opened, and reported."""


@dataclass(frozen=True)
class ChunkInfo:
    """What the header of a chunk says."""

    id: bytes
    run: bytes
    """Id of the journal that says which of its steps count: a chunk is worth nothing without."""
    previous: bytes | None
    stream: StreamId | None
    """None for steps of another run that an older version has copied."""
    steps: int
    schema: Schema

    @property
    def filename(self) -> str:
        return f"{self.id.hex()}{SUFFIX}"

    def header(self) -> bytes:
        description = json.dumps(
            {
                "id": self.id.hex(),
                "run": self.run.hex(),
                "previous": self.previous.hex() if self.previous else None,
                "stream": self.stream,
                "steps": self.steps,
                "columns": self.schema.to_json(),
            }
        ).encode()
        prefix = _PREFIX.pack(_MAGIC, len(description), zlib.crc32(description))
        assert len(prefix) + len(description) + UNUSED_BYTES + BEFORE_BYTES <= header_bytes(
            self.schema
        )
        return (prefix + description).ljust(header_bytes(self.schema), b"\0")


@lru_cache(maxsize=16)
def header_bytes(schema: Schema) -> int:
    """Size of the header: the same for every chunk of a schema, so that columns line up."""
    columns = len(json.dumps(schema.to_json()))
    return round_up(columns + _ROOM_FOR_THE_REST, _HEADER_ALIGN)


def chunk_bytes(schema: Schema, steps: int) -> int:
    """Size of a chunk file: header and columns, rounded up to whole pages."""
    return round_up(header_bytes(schema) + schema.offsets(steps)[1], _SLOT_ALIGN)


def create_chunk(directory: Path, info: ChunkInfo) -> int:
    """Make the file, with every byte reserved on disk, and return its descriptor.

    The name is given last: a file that has its name is complete.
    """
    final = directory / info.filename
    partial = final.with_suffix(_PARTIAL)
    size = chunk_bytes(info.schema, info.steps)
    fd = -1
    try:
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        reserve(fd, size)
        os.pwrite(fd, info.header(), 0)
        partial.rename(final)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        partial.unlink(missing_ok=True)
        if error.errno not in _FULL:
            raise ReplayError(
                f"The replay directory {directory} cannot be written to ({error.strerror})."
            ) from error
        raise StorageFullError(
            f"No room for another replay chunk of {size:,} bytes in {directory} "
            f"({error.strerror}): free disk space, or lower replay.capacity or replay.max_bytes."
        ) from error
    return fd


def read_chunk(path: Path) -> ChunkInfo:
    """What the header of a chunk file says. Raises `NotAChunkError`."""
    try:
        with path.open("rb") as file:
            prefix = file.read(_PREFIX.size).ljust(_PREFIX.size, b"\0")
            magic, length, checksum = _PREFIX.unpack(prefix)
            description = file.read(min(length, _MAX_DESCRIPTION))
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise NotAChunkError(f"cannot be read: {error.strerror}") from error
    if magic != _MAGIC:
        raise NotAChunkError("is not a replay chunk of this version")
    if len(description) != length or zlib.crc32(description) != checksum:
        raise NotAChunkError("has a damaged header")
    try:
        fields = json.loads(description)
        info = ChunkInfo(
            id=uuid.UUID(fields["id"]).bytes,
            run=uuid.UUID(fields["run"]).bytes,
            previous=uuid.UUID(fields["previous"]).bytes if fields["previous"] else None,
            stream=fields["stream"],
            steps=int(fields["steps"]),
            schema=Schema.from_json(fields["columns"]),
        )
    except (KeyError, TypeError, ValueError, SchemaError) as error:
        raise NotAChunkError(f"has an invalid header: {error}") from error
    if info.steps < 1 or size < chunk_bytes(info.schema, info.steps):
        raise NotAChunkError("is shorter than its header says")
    return info


class Found(NamedTuple):
    """A chunk file that was found in a directory."""

    path: Path
    info: ChunkInfo


class DirectoryLock:
    """Held while the directory is open for writing; the kernel releases that of a dead process."""

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
        # Runs at the latest when the lock is collected, so a forgotten replay blocks no other.
        self.release = weakref.finalize(self, os.close, fd)
        with suppress(OSError):  # a full disk: who holds it is only for a message
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        _held.add(self)


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """A forked child shares its parent's lock, and would hold it when the parent is dead."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)


def scan(directory: Path, run: bytes | None) -> tuple[list[Found], dict[str, str]]:
    """Find every chunk, and say by name why any other file is skipped; nothing here is fatal.

    Chunks belong to the journal with the id `run`; if that is lost, to the one that most of them
    name. All of a journal have the same columns and size: a replay refuses other steps.
    """
    found: list[Found] = []
    skipped: dict[str, str] = {}
    for path in sorted(directory.iterdir()):
        if path.name in (LOCK, JOURNAL, DAMAGED, EPISODES, *SYNCED):
            continue
        if path.match(_PARTIAL_PATTERN) or path.match(_PARTIAL_EPISODES):
            continue
        try:
            info = read_chunk(path)
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
    for name, reason in skipped.items():
        log.warning("Skipping %s in the replay directory %s: it %s.", name, directory, reason)
    return found, skipped


def remove_partial(directory: Path, *, power_cut: bool = False) -> None:
    """Files that were being made when a writer died never had steps in them. A power cut may leave
    such a file under its final name, with zeros where its header was not written yet."""
    for path in (*directory.glob(_PARTIAL_PATTERN), *directory.glob(_PARTIAL_EPISODES)):
        path.unlink(missing_ok=True)
    for path in directory.glob(_CHUNK_PATTERN) if power_cut else ():
        with path.open("rb") as file:
            blank = not any(file.read(_PREFIX.size))
        if blank:
            path.unlink()
