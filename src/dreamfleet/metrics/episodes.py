"""Episode statistics.

Transitions arrive in batches, a row for each environment that stepped. Every environment has a
slot in a few arrays, and a batch updates its slots with a few vectorised operations, so that
thousands of steps a second cost a fraction of a core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.spaces import LOG_PREFIX

# A reward that differs less than this from the one before counts as the same.
_SAME_REWARD = 0.01
_SCORE, _STEPS, _CHANGES, _LOGS = range(4)  # rows of totals; each log key has a sum and a count
_SAVED = ("running", "reward", "totals", "peaks")
_COUNTS = ("finished", "abandoned", "timed_out")


@dataclass(frozen=True)
class Episode:
    """A finished episode.

    `length` counts actions, so the first step of the episode is not in it. `reward_rate` is the
    share of steps whose reward differs from the step before: how dense the signal is. `logs`
    holds `NAME/avg`, `NAME/max` and `NAME/sum` of every key `log/NAME`, over the steps that have it
    (-inf is missing). `video` holds the frames of each image key, for the environment that is
    recorded.
    """

    envid: int
    score: float
    length: int
    reward_rate: float
    logs: dict[str, float] = field(default_factory=dict)
    video: dict[str, NDArray[np.uint8]] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Its numbers by name."""
        return {
            "score": self.score,
            "length": float(self.length),
            "reward_rate": self.reward_rate,
            **{f"{LOG_PREFIX}{key}": value for key, value in self.logs.items()},
        }


class EpisodeStats:
    """Follows the episode of every environment.

    An episode counts when both its first and its last step were received. One that is followed by
    a new first step without having ended (the environment was restarted) is abandoned. Steps of an
    episode whose first step was missed are ignored.

    Args:
        video: The id of the environment whose frames are recorded; None for none.
        most_frames: Frames recorded of one episode; later ones are left out.
    """

    def __init__(self, *, video: int | None = None, most_frames: int = 2000) -> None:
        self._video = video
        self._most_frames = most_frames
        self._envs = SlotTable(grow=self._grow)
        size = self._envs.size
        self._running = np.zeros(size, bool)
        self._reward = np.zeros(size)
        self._totals = np.zeros((_LOGS, size))
        self._peaks = np.zeros((0, size))  # of each log key
        self._log_keys: tuple[str, ...] = ()
        self._frames: dict[str, list[NDArray[np.uint8]]] = {}
        self.finished = self.abandoned = self.timed_out = 0

    @property
    def running(self) -> int:
        """Number of episodes under way."""
        return int(self._running.sum())

    def add(
        self,
        envid: NDArray[Any],
        transitions: Mapping[str, NDArray[Any]],
        frames: Mapping[str, NDArray[np.uint8]] = MappingProxyType({}),
    ) -> list[Episode]:
        """Take a batch (leading axis as long as `envid`) and return the episodes it finished.

        An environment may occur several times in a batch; its rows are taken in order. `frames`
        has a row for each one of the environment that is recorded; without them its episode is
        recorded no more.
        """
        return self._follow(envid.tolist(), transitions, frames) if len(envid) else []

    def forget(self, envids: Iterable[int]) -> None:
        """Drop the episodes of environments that are gone, and free their memory."""
        for envid, slot in self._envs.remove(envids).items():
            self.timed_out += bool(self._running[slot])
            self._running[slot] = False
            if envid == self._video:
                self._frames = {}

    def stats(self) -> dict[str, float]:
        """Counts since the start."""
        return {**{name: getattr(self, name) for name in _COUNTS}, "running": self.running}

    def _follow(
        self,
        ids: list[int],
        batch: Mapping[str, NDArray[Any]],
        frames: Mapping[str, NDArray[np.uint8]],
    ) -> list[Episode]:
        logs = self._log_values(batch)
        slots = self._envs.slots(ids)
        # The rows of an environment next to each other, in their order.
        order = np.argsort(slots, kind="stable")
        slots = slots[order]
        first = np.asarray(batch["is_first"], bool)[order]
        last = np.asarray(batch["is_last"], bool)[order]
        reward = np.asarray(batch["reward"], np.float64)[order]
        follows = np.zeros(len(ids), bool)  # a row of the same environment
        follows[1:] = slots[1:] == slots[:-1]
        before = self._reward[slots]
        np.copyto(before[1:], reward[:-1], where=follows[1:])
        # A part is the rows of one episode. The first part of an environment may go on with the
        # episode that the batches before have begun.
        at_start = first | ~follows
        at_start[1:] |= last[:-1]
        starts = np.flatnonzero(at_start)
        ends = np.append(starts[1:], len(ids)) - 1
        place, begins = slots[starts], first[starts]
        continued = ~begins & ~follows[starts]
        running = begins | (continued & self._running[place])
        ended = running & last[ends]
        left = running & ~ended
        was_running = self._running[place]
        np.copyto(was_running[1:], left[:-1], where=follows[starts[1:]])
        self.abandoned += int(np.count_nonzero(begins & was_running))
        rows = np.empty((len(self._totals), len(ids)))
        rows[_SCORE], rows[_STEPS] = reward, ~first
        rows[_CHANGES] = ~first & (np.abs(reward - before) >= _SAME_REWARD)
        peaks = logs
        if self._log_keys:
            logs = logs[:, order]
            present = logs != -np.inf
            rows[_LOGS::2], rows[_LOGS + 1 :: 2] = np.where(present, logs, 0.0), present
            known = np.where(continued, self._peaks[:, place], -np.inf)
            peaks = np.maximum(np.maximum.reduceat(logs, starts, -1), known)
            self._peaks[:, place] = peaks
        totals = np.add.reduceat(rows, starts, -1)
        totals += np.where(continued, self._totals[:, place], 0)
        # Where an environment has several parts the last one stays, because numpy assigns in order.
        self._running[place], self._reward[place] = left, reward[ends]
        self._totals[:, place] = totals
        videos = self._record(ids, batch, frames) if self._video in ids else {}
        episodes: dict[int, Episode] = {}  # by the row they end with
        for part in np.flatnonzero(ended).tolist():
            row = int(order[ends[part]])
            score, steps, changes, *sums = totals[:, part].tolist()
            found = self._logs(sums, peaks[:, part].tolist())
            rate = changes / steps if steps else 0.0
            episodes[row] = Episode(ids[row], score, int(steps), rate, found, videos.get(row, {}))
        self.finished += len(episodes)
        return [episodes[row] for row in sorted(episodes)]

    def _logs(self, sums: list[float], peaks: list[float]) -> dict[str, float]:
        logs = {}
        for key, total, count, peak in zip(
            self._log_keys, sums[::2], sums[1::2], peaks, strict=True
        ):
            if count:  # else no step of this episode has it
                name = key.removeprefix(LOG_PREFIX)
                logs[f"{name}/avg"] = total / count
                logs[f"{name}/max"] = peak
                logs[f"{name}/sum"] = total
        return logs

    def _record(
        self,
        ids: list[int],
        batch: Mapping[str, NDArray[Any]],
        frames: Mapping[str, NDArray[np.uint8]],
    ) -> dict[int, dict[str, NDArray[np.uint8]]]:
        """Take the frames of the environment that is recorded; the videos that are complete, by the
        row they end with."""
        if not frames:
            self._frames = {}
            return {}
        videos = {}
        for number, row in enumerate(row for row, envid in enumerate(ids) if envid == self._video):
            if batch["is_first"][row]:
                self._frames = {key: [] for key in frames}
            for key, taken in self._frames.items():
                if len(taken) < self._most_frames:
                    taken.append(frames[key][number].copy())
            if batch["is_last"][row]:
                videos[row] = {key: np.stack(taken) for key, taken in self._frames.items()}
                self._frames = {}
        return videos

    def _log_values(self, batch: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
        """A row for each key; -inf where a value is missing."""
        keys = tuple(k for k, v in batch.items() if k.startswith(LOG_PREFIX) and v.ndim == 1)
        if keys != self._log_keys:
            self._adopt_log_keys(keys)
        size = len(batch["reward"])
        nothing = np.full(size, -np.inf)
        rows = [batch[key] if key in keys else nothing for key in self._log_keys]
        return np.array(rows, np.float64).reshape(len(rows), size)

    def _adopt_log_keys(self, keys: tuple[str, ...]) -> None:
        """Add rows for new keys; keys that are missing now keep theirs."""
        new = [key for key in keys if key not in self._log_keys]
        size = self._reward.size
        self._log_keys = (*self._log_keys, *new)
        self._totals = np.concatenate([self._totals, np.zeros((2 * len(new), size))])
        self._peaks = np.concatenate([self._peaks, np.full((len(new), size), -np.inf)])

    def _grow(self, size: int) -> None:
        for name in _SAVED:
            array = getattr(self, f"_{name}")
            more = np.zeros((*array.shape[:-1], size - array.shape[-1]), array.dtype)
            setattr(self, f"_{name}", np.concatenate([array, more], axis=-1))


class SlotTable:
    """Gives every id a slot: the index of its row in arrays that the owner keeps.

    Slots are reused once their id is removed, so the arrays stay as small as the most ids at one
    time. The row of a reused slot still holds the values of the id before.

    Not thread-safe.

    Args:
        size: Number of slots at first.
        grow: Called with the new number of slots, twice the old one, before one of the new slots
            is used. The owner makes its arrays that long.
        clock: Seconds, rising.
    """

    def __init__(
        self,
        size: int = 16,
        *,
        grow: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grow = grow
        self._clock = clock
        self._slots: dict[int, int] = {}
        self._free = list(range(size - 1, -1, -1))
        self._used = np.zeros(size)  # when each slot was last asked for

    @property
    def size(self) -> int:
        """Number of slots, taken and free."""
        return len(self._used)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: int) -> bool:
        return key in self._slots

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def slots(self, keys: Sequence[int]) -> NDArray[np.intp]:
        """The slot of each id, which counts as used now. An id without a slot gets one, for which
        the arrays may grow."""
        known = self._slots
        try:
            found = np.array([known[key] for key in keys], np.intp)
        except KeyError:
            for key in keys:
                if key not in known:
                    known[key] = self._take()
            found = np.array([known[key] for key in keys], np.intp)
        self._used[found] = self._clock()
        return found

    def idle(self) -> dict[int, float]:
        """Seconds since each id was last used."""
        now = self._clock()
        return {key: now - float(self._used[slot]) for key, slot in self._slots.items()}

    def remove(self, keys: Iterable[int]) -> dict[int, int]:
        """Free the slots of ids; returns both, of those that had one."""
        gone = {key: self._slots.pop(key) for key in keys if key in self._slots}
        self._free += gone.values()
        return gone

    def _take(self) -> int:
        if not self._free:
            size = self.size
            self._grow(2 * size)
            self._used = np.concatenate([self._used, np.zeros(size)])
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()
