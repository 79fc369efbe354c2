"""Writing files so that a reader finds the old content or the new one, never a part; and temporary
directories that are always removed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Without a line of input this process was killed. Others may write there for some seconds: they end
# with it.
_REMOVE = 'read _ || for _ in $(seq 25); do rm -rf "$0"; sleep 0.2; done'


def atomic_write(path: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Replace a file's content: written under a temporary name, fsynced, then renamed.

    The directory is made if it is missing, and fsynced too, so that the new name survives a power
    cut. Concurrent writers do not disturb each other; the last one wins.
    """
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    fsync(path.parent)


def atomic_rename(temporary: Path, path: Path) -> None:
    """Give a complete file or directory its final name, so that both survive a power cut.

    For what another program or library has written under a temporary name beside it. A directory's
    files have to be fsynced already.
    """
    fsync(temporary)
    temporary.replace(path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Bring a file's content, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def temporary_folder(prefix: str = "dreamfleet-") -> Iterator[Path]:
    """A temporary directory that is removed when the block ends, or when this process is killed."""
    with (
        tempfile.TemporaryDirectory(prefix=prefix) as name,
        subprocess.Popen(
            ["sh", "-c", _REMOVE, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        ) as guard,
    ):
        try:
            yield Path(name)
        finally:
            shutil.rmtree(name, ignore_errors=True)
            guard.communicate(b"\n")
