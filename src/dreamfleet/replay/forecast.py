"""What a replay will need when it is full, and whether the machine has it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from dreamfleet.replay.store import Store

INDEX_BYTES_PER_ITEM = 8
PRIORITY_BYTES_PER_ITEM = 8 + 8 + 4


@dataclass(frozen=True)
class Forecast:
    """Bytes at full capacity."""

    ram: int
    disk: int

    def shortages(self, directory: Path | None, used: int) -> list[str]:
        """One sentence for each thing the machine has too little of; `used` is ours already."""
        problems = []
        free = psutil.virtual_memory().available + (0 if directory else used)
        if self.ram > free:
            problems.append(
                f"The replay needs {_size(self.ram)} of memory when full, but the machine has "
                f"{_size(free)} to give: lower its capacity"
                + (", or give it a directory." if directory is None else ".")
            )
        if directory is not None:
            try:
                free = shutil.disk_usage(directory).free + used
            except FileNotFoundError:
                return problems  # Whoever writes next is told that the directory is gone.
            if self.disk > free:
                problems.append(
                    f"The replay needs {_size(self.disk)} of disk when full, but {directory} has "
                    f"{_size(free)} to give: lower its capacity or set max_bytes."
                )
        return problems


def forecast(
    capacity: int,
    length: int,
    streams: int,
    store: Store,
    on_disk: bool,
    max_bytes: int | None,
    prioritized: bool,
) -> Forecast:
    """Chunks for `capacity` items, and what each stream has beside them: a first chunk that is
    partly let go, the one it writes, and those that only the end of an item reaches into."""
    beside = streams * (2 + (length - 1) // store.steps)
    data = (-(-capacity // store.steps) + beside) * store.chunk_bytes
    if max_bytes is not None:
        data = min(data, max_bytes)
    per_item = INDEX_BYTES_PER_ITEM + (PRIORITY_BYTES_PER_ITEM if prioritized else 0)
    index = capacity * per_item
    return Forecast(ram=index + (0 if on_disk else data), disk=data if on_disk else 0)


def limits(capacity: int, streams: int, store: Store, max_bytes: int | None) -> list[str]:
    """One sentence for each bound that leaves room for less than was asked for."""
    problems = []
    most = store.slots * store.steps
    if capacity > most and (max_bytes is None or max_bytes > store.slots * store.chunk_bytes):
        problems.append(
            f"The replay can hold about {most:,} sequences in {store.slots:,} chunks, not its "
            f"capacity of {capacity:,}: lower it, or raise `chunk` ({store.steps} steps) where "
            "chunks are small."
        )
    if max_bytes is not None and max_bytes < 2 * streams * store.chunk_bytes:
        problems.append(
            f"max_bytes={max_bytes:,} holds fewer than two chunks of {store.chunk_bytes:,} bytes "
            f"for each of {streams} streams, so few sequences will last: raise max_bytes, or lower "
            f"`chunk` ({store.steps} steps)."
        )
    return problems


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
