"""How much memory the processes of this machine may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_LIMITS = (("memory.max", "memory.swap.max"), ("memory.limit_in_bytes", ""))
"""Files of a control group, of both versions: memory, and what may be swapped in addition."""


def memory_limit(root: Path = Path("/")) -> float:
    """Bytes that there are at most: memory and swap of the machine, or what the control group of
    this process (a container, a job of a batch system) allows, if that is less.

    What is mapped from a file is no part of it: the system drops such pages when it needs room.
    """
    swap = psutil.swap_memory().total
    limits = [float(psutil.virtual_memory().total + swap)]
    for folder in _groups(root):
        for name, swapped in _LIMITS:
            allowed = _number(folder / name)
            if allowed is not None:
                more = _number(folder / swapped) if swapped else None
                limits.append(allowed + min(swap, swap if more is None else more))
    return min(limits)


def memory_free() -> float:
    """Bytes that are free now, swap included; no more than the limit."""
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    return min(float(free), memory_limit())


def _groups(root: Path) -> Iterator[Path]:
    """The control group of this process, and all around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # another system
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = root / "sys/fs/cgroup" / controllers
        inside = base / path.lstrip("/")
        # In a container the path may be that of the host, which is not there.
        yield base
        yield from (each for each in (inside, *inside.parents) if base in each.parents)


def _number(path: Path) -> float | None:
    """What a file says; None if it is not there, or says that there is no limit."""
    try:
        return float(int(path.read_text()))
    except (OSError, ValueError):
        return None
