"""Files of a run, opened so that nothing outside of its directory can be reached.

Names come from a browser, and directories from anybody who may write a run. So every part of a path
is opened by itself, below the one before, and none of them may be a link.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def open_inside(folder: Path, *names: str) -> Iterator[BinaryIO]:
    """A regular file below a folder, open for reading.

    Args:
        folder: A directory that is trusted to be the one that is meant.
        names: What follows, one name a part.

    Raises:
        OSError: There is no such file, it is no regular file, or a link leads to it.
    """
    *folders, name = names
    with _below(folder, folders) as directory:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(_plain(name), flags, dir_fd=directory)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(f"{name} is no regular file")
        yield file


def list_inside(folder: Path, *names: str) -> list[os.DirEntry[str]]:
    """What a directory below a folder holds, in order; nothing if there is no such directory, or if
    it is a link."""
    try:
        with _below(folder, names) as directory, os.scandir(directory) as entries:
            return sorted(
                (entry for entry in entries if not entry.is_symlink()), key=lambda e: e.name
            )
    except OSError:
        return []


@contextmanager
def _below(folder: Path, names: tuple[str, ...] | list[str]) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(folder, flags)
    try:
        for name in names:
            following = os.open(_plain(name), flags | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = following
        yield descriptor
    finally:
        os.close(descriptor)


def _plain(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise FileNotFoundError(f"{name!r} is no name of a file")
    return name
