"""The steps of a replay's directory, only read: its owner may go on writing meanwhile.

Only committed steps are read. A chunk that its owner removes at the same moment is left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.replay.errors import ReplayError
from dreamfleet.replay.schema import StreamId
from dreamfleet.replay.storage.files import ChunkInfo, Found, header_bytes, scan
from dreamfleet.replay.storage.journal import read_committed

Arrays = dict[str, NDArray[Any]]
Ticks = NDArray[np.int64]

_REPLAY = re.compile(r"replay(-\d+)?")


def replay_directories(run: Path) -> list[Path]:
    """Where a run keeps its steps: a directory for each shard."""
    found = run.iterdir() if run.is_dir() else ()
    return sorted(each for each in found if _REPLAY.fullmatch(each.name) and each.is_dir())


@dataclass(frozen=True)
class StoredChain:
    """Steps that follow each other without a gap, from chunk to chunk."""

    chunks: tuple[Found, ...]
    ticks: Ticks
    """One for each step; they rise."""

    @property
    def stream(self) -> StreamId | None:
        return self.chunks[0].info.stream

    @property
    def keys(self) -> list[str]:
        return [column.name for column in self.chunks[0].info.schema.columns]

    def without_first(self) -> StoredChain | None:
        """What is left of it without its first chunk; None if that is the only one."""
        steps = self.chunks[0].info.steps
        return StoredChain(self.chunks[1:], self.ticks[steps:]) if self.chunks[1:] else None

    def read(self, key: str, start: int, stop: int) -> NDArray[Any]:
        """Rows of a column. Raises `FileNotFoundError` if their chunk was removed."""
        parts = []
        for number, (path, info) in enumerate(self.chunks):
            first = number * info.steps  # all chunks but the last are full
            low, high = max(start - first, 0), min(stop - first, info.steps)
            if low >= high:
                continue
            column = next(each for each in info.schema.columns if each.name == key)
            offset = header_bytes(info.schema) + info.schema.offsets(info.steps)[0][key]
            with path.open("rb") as file:
                file.seek(offset + low * column.row_bytes)
                content = file.read((high - low) * column.row_bytes)
            if len(content) < (high - low) * column.row_bytes:
                raise ReplayError(f"{path} became shorter while it was read: try again.")
            parts.append(np.frombuffer(content, column.dtype).reshape(high - low, *column.shape))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


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
    _chain: StoredChain = field(repr=False)

    def read(self, start: int = 0, stop: int | None = None, keys: Collection[str] = ()) -> Arrays:
        """Its steps, an array for each key; `start` may be negative, down to `-history`.

        Raises:
            ReplayError: The run has removed them meanwhile.
        """
        end = self.length if stop is None else stop
        if not -self.history <= start < end <= self.length:
            raise ReplayError(f"The episode has no steps {start} to {end}: it has {self.length}.")
        offset = self.history
        try:
            return {
                key: self._chain.read(key, offset + start, offset + end)
                for key in self._chain.keys
                if not keys or key in keys
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
    found: list[StoredEpisode] = []
    for directory in directories:
        for chain in stored_chains(directory)[1]:
            left: StoredChain | None = chain
            while left is not None:
                try:
                    found += _cut(left)
                    break
                except FileNotFoundError:  # the run removes the oldest chunks of a chain first
                    left = left.without_first()
    return sorted(found, key=lambda each: -each.tick)[:newest]


def _cut(chain: StoredChain) -> list[StoredEpisode]:
    """The episodes of a chain."""
    count = len(chain.ticks)
    first, last, reward = (chain.read(n, 0, count) for n in ("is_first", "is_last", "reward"))
    bounds = sorted({0, *np.flatnonzero(first).tolist(), count})
    return [
        StoredEpisode(
            stream=chain.stream,
            length=stop - start,
            score=float(reward[start:stop].sum()),
            begins=bool(first[start]),
            ends=bool(last[stop - 1]),
            tick=int(chain.ticks[stop - 1]),
            history=start,
            complete=chain.chunks[0].info.previous is None,
            _chain=chain,
        )
        for start, stop in pairwise(bounds)
    ]


def stored_chains(directory: Path) -> tuple[bytes | None, list[StoredChain]]:
    """The id of a replay and its chains; None if the directory is not one."""
    header = read_committed(directory) if directory.is_dir() else None
    if header is None:
        return None, []
    run, committed = header
    chunks: dict[bytes, tuple[Found, Ticks]] = {}
    for item in scan(directory, run)[0]:
        try:
            with item.path.open("rb") as file:
                file.seek(header_bytes(item.info.schema))
                ticks = np.fromfile(file, np.int64, item.info.steps)
        except FileNotFoundError:
            continue
        if count := valid_ticks(ticks, committed):
            chunks[item.info.id] = item, ticks[:count]
    sizes = {name: (item.info, len(ticks)) for name, (item, ticks) in chunks.items()}
    return run, [
        StoredChain(
            tuple(chunks[name][0] for name in names),
            np.concatenate([chunks[name][1] for name in names]),
        )
        for names in linked(sizes)
    ]


def valid_ticks(ticks: Ticks, committed: int) -> int:
    """Length of the leading run of growing ticks up to the committed one."""
    good = (ticks > 0) & (ticks <= committed)
    good[1:] &= ticks[1:] > ticks[:-1]
    return len(good) if good.all() else int(good.argmin())


def linked(chunks: Mapping[bytes, tuple[ChunkInfo, int]]) -> list[list[bytes]]:
    """Chunks, given with the steps in them, as chains: each follows the one that it names, if that
    is here and full."""
    full = {chunk for chunk, (info, size) in chunks.items() if size == info.steps}
    chains: dict[bytes, list[bytes]] = {}
    after: dict[bytes, bytes] = {}
    for chunk, (info, _) in chunks.items():
        if info.previous in full and info.previous not in after:
            after[info.previous] = chunk
        else:
            chains[chunk] = [chunk]
    for chain in chains.values():
        while chain[-1] in after:
            chain.append(after[chain[-1]])
    return list(chains.values())
