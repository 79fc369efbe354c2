"""Finished episodes, which follow from the committed steps.

A score is the sum of the rewards from a step with `is_first` to one that arrived with `is_last`.
Nothing is stored with a step. The header of a chunk says what the episode under way had scored
before the chunk (`Store.before`), so a chunk knows its scores after its predecessors were evicted.

A reader asks for what was committed after the newest tick it has written (`Ledger.since`). An
episode that is evicted before it was read is kept in the ledger's file.

A power cut drops committed steps, and their ticks are given out again. So ticks belong to an epoch,
and the ledger knows with which tick each epoch began.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from dreamfleet.files import atomic_write, checksum
from dreamfleet.replay.storage.store import Store

log = logging.getLogger(__name__)

_MOST_EVICTED = 1 << 16
_FLAGS = {"is_first", "is_last", "reward"}


class Finished(NamedTuple):
    """An episode, by the tick of its last step. `length` counts actions."""

    tick: int
    score: float
    length: int


class Scores:
    """The scores in the chunks of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.there = set(store.columns) >= _FLAGS
        """Whether steps have what a score needs."""

    def begin_chunk(self, slot: int) -> None:
        """Note what the episode under way has scored when a stream goes on in another chunk.

        The rows before it are written; it has none that is committed.
        """
        previous, last = int(self._store.previous[slot]), self._store.steps - 1
        if previous < 0 or not self.there or self._store.columns["is_last"][previous, last]:
            return
        if (so_far := self._so_far(previous, last)) is not None:
            score, length = so_far
            words = int(np.float64(score).view(np.uint64)), length
            self._store.before[slot] = [checksum(_salt(self._store, slot), *words), *words]

    def finished(self, slot: int, since: int) -> Iterator[Finished]:
        """The episodes that end in a chunk, with steps after this tick."""
        store = self._store
        if not self.there or not store.own[slot]:
            return
        ticks = store.ticks[slot, : store.lengths[slot]]
        new = int(ticks.searchsorted(since, "right"))
        last = store.columns["is_last"][slot, new : len(ticks)]
        if not last.any():
            return
        for row in (np.flatnonzero(last) + new).tolist():
            if (so_far := self._so_far(slot, row)) is not None:
                yield Finished(int(ticks[row]), *so_far)

    def _so_far(self, slot: int, row: int) -> tuple[float, int] | None:
        """Return and length of an episode up to a row; None if its first step is unknown."""
        columns = self._store.columns
        starts = np.flatnonzero(columns["is_first"][slot, : row + 1])
        start = int(starts[-1]) if len(starts) else 0
        if columns["is_last"][slot, start:row].any():
            return None  # it was over before
        score = float(columns["reward"][slot, start : row + 1].sum(dtype=np.float64))
        if len(starts):
            return score, row - start
        check, *words = self._store.before[slot].tolist()
        if check != checksum(_salt(self._store, slot), *words):
            return None
        return score + float(np.uint64(words[0]).view(np.float64)), words[1] + row + 1


def _salt(store: Store, slot: int) -> int:
    """Ties what a header says to its chunk."""
    return int.from_bytes(store.ids[slot, :8].tobytes(), "little")


class _File(msgspec.Struct):
    epochs: list[tuple[str, int]]
    evicted: list[tuple[int, float | None, int]]
    """A score that is not finite is null in the file."""


class Ledger:
    """What the chunks do not know about finished episodes.

    Args:
        path: Its file; None keeps it in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._epochs: list[tuple[str, int]] = []
        self.evicted: list[Finished] = []
        """Episodes that were not read before their steps left."""
        self.read = 0
        """Episodes up to this tick were read."""
        if path is not None and path.exists():
            try:
                found = msgspec.json.decode(path.read_bytes(), type=_File)
                self._epochs = found.epochs
                self.evicted = [
                    Finished(tick, math.nan if score is None else score, length)
                    for tick, score, length in found.evicted
                ]
            except msgspec.DecodeError as error:
                log.warning("%s is damaged: scores may be missing. %s", path, error)

    @property
    def is_new(self) -> bool:
        """Whether it has no epoch yet. The first one begins after the steps of an older version,
        whose scores were written by that."""
        return not self._epochs

    @property
    def epoch(self) -> str:
        return self._epochs[-1][0]

    def begin_epoch(self, tick: int) -> None:
        """Steps after this tick may have been dropped, and their ticks are given out again."""
        self._epochs.append((uuid.uuid4().hex[:12], tick))
        self.evicted = [each for each in self.evicted if each.tick <= tick]
        self._write()

    def since(self, epoch: str, tick: int) -> int:
        """The tick after which everything is new to a reader that has read up to this one."""
        names = [name for name, _ in self._epochs]
        later = names.index(epoch) + 1 if epoch in names else 0
        tick = min([tick, *(start for _, start in self._epochs[later:])])
        return max(tick, self._epochs[0][1])

    def mark_read(self, tick: int) -> None:
        """A reader has everything up to this tick."""
        self.read = max(self.read, tick)
        self.evicted = [each for each in self.evicted if each.tick > tick]

    def keep(self, episodes: Iterable[Finished]) -> None:
        """Keep episodes whose steps are about to leave."""
        if found := list(episodes):
            self.evicted = [*self.evicted, *found][-_MOST_EVICTED:]
            try:
                self._write()
            except OSError as error:
                log.warning("Scores may be lost if the replay is killed now: %s", error)

    def _write(self) -> None:
        if self._path is not None:
            atomic_write(self._path, msgspec.json.encode(_File(self._epochs, [*self.evicted])))
