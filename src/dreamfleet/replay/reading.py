"""The episodes of a replay's directory, only read: its owner may go on writing meanwhile.

Only committed steps are read. A chunk that its owner removes at the same moment is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.replay.errors import ReplayError
from dreamfleet.replay.loading import linked, read_ticks, valid_ticks
from dreamfleet.replay.schema import StreamId
from dreamfleet.replay.storage.files import Found, header_bytes, scan
from dreamfleet.replay.storage.journal import read_committed

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class _Chain:
    """Chunks that follow each other, and the steps of each."""

    chunks: tuple[Found, ...]
    sizes: tuple[int, ...]

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows of a column."""
        parts, before = [], 0
        for (path, info), size in zip(self.chunks, self.sizes, strict=True):
            low, high = max(start - before, 0), min(stop - before, size)
            before += size
            if low >= high:
                continue
            column = next(each for each in info.schema.columns if each.name == name)
            offset = header_bytes(info.schema) + info.schema.offsets(info.steps)[0][name]
            with path.open("rb") as file:
                file.seek(offset + low * column.row_bytes)
                content = file.read((high - low) * column.row_bytes)
            rows = np.frombuffer(content, column.dtype)
            parts.append(rows.reshape(high - low, *column.shape))
        return np.concatenate(parts)


@dataclass(frozen=True)
class StoredEpisode:
    """An episode of a replay, or what is left of it."""

    stream: StreamId | None
    """The environment that played it."""
    length: int
    """Its steps, the first observation included."""
    score: float
    """The sum of its rewards."""
    begins: bool
    """Whether its first step is there."""
    ends: bool
    """Whether its last step is there; it is still being played otherwise, or was cut short."""
    tick: int
    """Grows with the time at which steps were stored."""
    history: int
    """Steps of the same environment before it, all of them if `complete`."""
    complete: bool
    """Whether the history reaches back to the first step that the environment ever made."""
    _chain: _Chain = field(repr=False)

    def read(self, start: int = 0, stop: int | None = None, keys: Collection[str] = ()) -> Arrays:
        """Its steps, an array for each key; `start` may be negative, down to `-history`.

        Raises:
            ReplayError: The run has removed them meanwhile.
        """
        end = self.length if stop is None else stop
        if not -self.history <= start < end <= self.length:
            raise ReplayError(f"The episode has no steps {start} to {end}: it has {self.length}.")
        names = [column.name for column in self._chain.chunks[0].info.schema.columns]
        offset = self.history
        try:
            return {
                name: self._chain.read(name, offset + start, offset + end)
                for name in names
                if not keys or name in keys
            }
        except FileNotFoundError:
            raise ReplayError(
                "The run has removed this episode meanwhile: choose a newer one."
            ) from None


def stored_episodes(directories: Iterable[Path], newest: int = 100) -> list[StoredEpisode]:
    """The newest episodes of a replay, the newest first.

    Args:
        directories: Of the replay; several if it has shards.
        newest: At most so many.
    """
    found = [each for directory in directories for each in _episodes(directory)]
    return sorted(found, key=lambda each: -each.tick)[:newest]


def _episodes(directory: Path) -> list[StoredEpisode]:
    header = read_committed(directory) if directory.is_dir() else None
    if header is None:
        return []
    run, committed = header
    chunks: dict[bytes, tuple[Found, NDArray[np.int64]]] = {}
    for item in scan(directory, run).found:
        try:
            ticks = read_ticks(item)
        except (FileNotFoundError, ReplayError):
            continue
        if count := valid_ticks(ticks, committed):
            chunks[item.info.id] = item, ticks[:count]
    if not chunks:
        return []
    sizes = {name: len(ticks) for name, (_, ticks) in chunks.items()}
    steps = next(iter(chunks.values()))[0].info.steps
    result = []
    for names in linked({n: item.info.previous for n, (item, _) in chunks.items()}, sizes, steps):
        chain = _Chain(tuple(chunks[n][0] for n in names), tuple(sizes[n] for n in names))
        ticks = np.concatenate([chunks[n][1] for n in names])
        try:
            result += _cut(chain, ticks)
        except FileNotFoundError:
            continue
    return result


def _cut(chain: _Chain, ticks: Sequence[int] | NDArray[np.int64]) -> list[StoredEpisode]:
    """The episodes of a chain."""
    count = len(ticks)
    first, last, reward = (chain.read(n, 0, count) for n in ("is_first", "is_last", "reward"))
    bounds = sorted({0, *np.flatnonzero(first).tolist(), count})
    return [
        StoredEpisode(
            stream=chain.chunks[0].info.stream,
            length=stop - start,
            score=float(reward[start:stop].sum()),
            begins=bool(first[start]),
            ends=bool(last[stop - 1]),
            tick=int(ticks[stop - 1]),
            history=start,
            complete=chain.chunks[0].info.previous is None,
            _chain=chain,
        )
        for start, stop in pairwise(bounds)
    ]
