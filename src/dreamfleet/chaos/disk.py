"""A disk that can be filled: a small file system of the run's own, where the machine allows one.

It is a tmpfs in a mount namespace of this process, so nobody else sees it and it is gone with the
process. It is filled by making it as small as what it holds. Without the privilege to mount, no
process of the fleet may write a file beyond its first bytes instead (RLIMIT_FSIZE).
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, Self

import psutil

_NEW_NAMESPACE = 0x00020000
_REMOUNT, _RECURSIVE, _PRIVATE = 32, 16384, 1 << 18
_DETACH = 2


class Disk:
    """The disk of a run. A context manager."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        self.kind: Literal["tmpfs", "limit"] = "limit"
        """How it is filled."""

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        if self._mount():
            self.kind = "tmpfs"
        return self

    def __exit__(self, *_: object) -> None:
        if self.kind == "tmpfs":
            ctypes.CDLL(None).umount2(os.fsencode(self._folder), _DETACH)

    def _mount(self) -> bool:
        if sys.platform != "linux":
            return False
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_NEW_NAMESPACE) != 0:
            return False
        # What is mounted from here on stays in this namespace.
        if libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None) != 0:
            return False
        return _mount_tmpfs(self._folder, 0, self._size)

    def fill(self, processes: Iterable[psutil.Process]) -> None:
        """Let nobody write anything more."""
        if self.kind == "tmpfs":
            used = shutil.disk_usage(self._folder).used
            _mount_tmpfs(self._folder, _REMOUNT, max(used, resource.getpagesize()))
        else:
            _limit(processes, 0)

    def free(self, processes: Iterable[psutil.Process]) -> None:
        """Make room again."""
        if self.kind == "tmpfs":
            _mount_tmpfs(self._folder, _REMOUNT, self._size)
        else:
            _limit(processes, resource.RLIM_INFINITY)


def _mount_tmpfs(folder: Path, flags: int, size: int) -> bool:
    options = f"size={size}".encode()
    result: int = ctypes.CDLL(None).mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options)
    return result == 0


def _limit(processes: Iterable[psutil.Process], size: int) -> None:
    for process in processes:
        with suppress(psutil.Error, OSError):
            _, most = process.rlimit(resource.RLIMIT_FSIZE)
            process.rlimit(resource.RLIMIT_FSIZE, (size, most))
