"""The chunk file: a checked header, then the columns.

    8 bytes   magic
    4 bytes   length of the description, little-endian
    4 bytes   CRC-32 of the description
    n bytes   the description, JSON: id, run, previous id, stream, steps, columns
    padding   up to a multiple of 4096
    columns   ticks, then one column a key (see `schema`)

The header never changes once the file has its name. Which steps are valid is said by their ticks
and by the commit journal, not by the file.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path

from dreamfleet.replay.errors import ReplayError, SchemaError, StorageFullError
from dreamfleet.replay.schema import Schema, round_up

MAGIC = b"DFCHUNK\x01"
SUFFIX = ".chunk"
PARTIAL = ".partial"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM}
_PREFIX = struct.Struct("<8sII")
_MAX_DESCRIPTION = 1 << 20
_ROOM_FOR_THE_REST = 1024
HEADER_ALIGN = 4096
# Slots must start on a page on every machine that may read the file, also on those with big pages.
SLOT_ALIGN = 16384
MAX_STREAM_NAME = 100
MAX_STREAM_JSON = 700

StreamId = int | str


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
    """None for a chunk that came from another run: nothing is ever appended to it."""
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
        prefix = _PREFIX.pack(MAGIC, len(description), zlib.crc32(description))
        assert len(prefix) + len(description) <= header_bytes(self.schema)
        return (prefix + description).ljust(header_bytes(self.schema), b"\0")


def header_bytes(schema: Schema) -> int:
    """Size of the header: the same for every chunk of a schema, so that columns line up."""
    columns = len(json.dumps(schema.to_json()))
    return round_up(columns + _ROOM_FOR_THE_REST, HEADER_ALIGN)


def chunk_bytes(schema: Schema, steps: int) -> int:
    """Size of a chunk file: header and columns, rounded up to whole pages."""
    return round_up(header_bytes(schema) + schema.offsets(steps)[1], SLOT_ALIGN)


def create(directory: Path, info: ChunkInfo) -> int:
    """Make the file, with every byte reserved on disk, and return its descriptor.

    Without the reservation a full disk would be noticed when a mapped page is written, which is a
    SIGBUS and not an error. The name is given last: a file that has its name is whole.
    """
    final = directory / info.filename
    partial = final.with_suffix(PARTIAL)
    size = chunk_bytes(info.schema, info.steps)
    fd = -1
    try:
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        _reserve(fd, size)
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
            f"({error.strerror}): free disk space, or lower the replay's capacity or max_bytes."
        ) from error
    return fd


def _reserve(fd: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
        return
    for start in range(0, size, 1 << 20):
        os.pwrite(fd, bytes(min(1 << 20, size - start)), start)


def read(path: Path) -> ChunkInfo:
    """What the header of a chunk file says. Raises `NotAChunkError`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NotAChunkError(f"cannot be opened: {error.strerror}") from error
    try:
        return _read(fd)
    except OSError as error:
        raise NotAChunkError(f"cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)


def _read(fd: int) -> ChunkInfo:
    prefix = os.pread(fd, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
        raise NotAChunkError("is not a replay chunk of this version")
    _, length, checksum = _PREFIX.unpack(prefix)
    description = os.pread(fd, min(length, _MAX_DESCRIPTION), _PREFIX.size)
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
        raise NotAChunkError(f"has a header that makes no sense: {error}") from error
    if info.steps < 1 or os.fstat(fd).st_size < chunk_bytes(info.schema, info.steps):
        raise NotAChunkError("is shorter than its header says")
    return info
