"""Episode statistics, the one implementation.

Transitions arrive in batches, a row for each environment that stepped. Every environment has a
slot in a few arrays, and a batch updates its slots with a handful of vectorised operations, so
that thousands of steps a second cost a fraction of a core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A reward that differs less than this from the one before counts as the same.
_SAME_REWARD = 0.01
_CHECK_SILENCE_EVERY = 1.0


@dataclass(frozen=True)
class Episode:
    """A finished episode.

    `length` counts actions, so the step that began the episode is not in it. `reward_rate` is
    the share of steps whose reward differs from the step before: how dense the signal is. `logs`
    holds `NAME/avg`, `NAME/max` and `NAME/sum` of every key `log/NAME`. `video` holds the frames
    of each image key, for the environment that is filmed.
    """

    envid: int
    score: float
    length: int
    reward_rate: float
    logs: dict[str, float] = field(default_factory=dict)
    video: dict[str, NDArray[np.uint8]] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        return {
            "score": self.score,
            "length": float(self.length),
            "reward_rate": self.reward_rate,
            **{f"log/{key}": value for key, value in self.logs.items()},
        }


class EpisodeStats:
    """Follows every environment's episode.

    An episode counts when both its first and its last step were seen. One that is followed by a
    new first step without having ended (the environment was restarted) is abandoned; one whose
    environment says nothing for `timeout` seconds is dropped as well and its memory freed. What
    is seen of an episode whose beginning was missed is ignored.

    Args:
        timeout: Seconds of silence after which an environment is given up; 0 for never.
        film: The environment whose frames are kept; None for none.
        most_frames: Frames kept of one episode; a longer one is filmed up to there.
        clock: Seconds, rising.
    """

    def __init__(
        self,
        *,
        timeout: float = 0.0,
        film: int | None = None,
        most_frames: int = 2000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout = timeout
        self._film = film
        self._most_frames = most_frames
        self._clock = clock
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._running = np.zeros(0, bool)
        self._score = np.zeros(0)
        self._steps = np.zeros(0, np.int64)
        self._reward = np.zeros(0)
        self._changes = np.zeros(0, np.int64)
        self._seen = np.zeros(0)
        self._log_keys: tuple[str, ...] = ()
        self._log_sum = np.zeros((0, 0))
        self._log_max = np.zeros((0, 0))
        self._frames: dict[str, list[NDArray[np.uint8]]] = {}
        self._next_check = clock() + _CHECK_SILENCE_EVERY
        self.finished = 0
        self.abandoned = 0
        self.timed_out = 0

    @property
    def running(self) -> int:
        """Episodes that are under way."""
        return int(self._running.sum())

    def add(self, envid: NDArray[Any], transitions: Mapping[str, NDArray[Any]]) -> list[Episode]:
        """Take a batch (leading axis as long as `envid`) and return the episodes it finished.

        An environment may occur several times in a batch; its rows are taken in order.
        """
        ids: list[int] = envid.tolist()
        now = self._clock()
        if len(set(ids)) == len(ids):
            episodes = self._add_unique(ids, transitions, now)
        else:
            episodes = []
            for rows in _rounds(ids):
                part = {key: value[rows] for key, value in transitions.items()}
                episodes += self._add_unique([ids[row] for row in rows], part, now)
        if self._timeout and now >= self._next_check:
            self._next_check = now + _CHECK_SILENCE_EVERY
            self.expire()
        return episodes

    def expire(self) -> None:
        """Give up environments that have been silent for longer than the timeout."""
        if not self._timeout:
            return
        limit = self._clock() - self._timeout
        gone = [envid for envid, slot in self._slots.items() if self._seen[slot] < limit]
        for envid in gone:
            slot = self._slots.pop(envid)
            self.timed_out += bool(self._running[slot])
            self._running[slot] = False
            self._free.append(slot)
            if envid == self._film:
                self._frames = {}

    def stats(self) -> dict[str, float]:
        """Counts since the beginning."""
        return {
            "finished": self.finished,
            "abandoned": self.abandoned,
            "timed_out": self.timed_out,
            "running": self.running,
        }

    def _add_unique(
        self, ids: list[int], batch: Mapping[str, NDArray[Any]], now: float
    ) -> list[Episode]:
        slots = self._slots_of(ids)
        first = np.asarray(batch["is_first"], bool)
        reward = np.asarray(batch["reward"], np.float64)
        sums, peaks = self._log_values(batch)
        self._seen[slots] = now
        if first.any():
            self._start(slots[first])
        again = ~first
        self._changes[slots] += again & (np.abs(reward - self._reward[slots]) >= _SAME_REWARD)
        self._reward[slots] = reward
        self._score[slots] += reward
        self._steps[slots] += again
        if self._log_keys:
            self._log_sum[:, slots] += sums
            self._log_max[:, slots] = np.maximum(self._log_max[:, slots], peaks)
        if self._film is not None and self._film in self._slots and self._film in ids:
            self._shoot(ids.index(self._film), bool(first[ids.index(self._film)]), batch)
        ended = np.flatnonzero(np.asarray(batch["is_last"], bool) & self._running[slots])
        return [self._finish(ids[row], int(slots[row])) for row in ended]

    def _start(self, slots: NDArray[np.intp]) -> None:
        self.abandoned += int(self._running[slots].sum())
        self._running[slots] = True
        self._score[slots] = 0
        self._steps[slots] = 0
        self._changes[slots] = 0
        self._log_sum[:, slots] = 0
        self._log_max[:, slots] = -np.inf

    def _finish(self, envid: int, slot: int) -> Episode:
        self._running[slot] = False
        self.finished += 1
        steps = int(self._steps[slot])
        logs = {}
        for row, key in enumerate(self._log_keys):
            if self._log_max[row, slot] == -np.inf:
                continue  # this environment does not have the key
            name, total = key.removeprefix("log/"), float(self._log_sum[row, slot])
            logs[f"{name}/avg"] = total / (steps + 1)
            logs[f"{name}/max"] = float(self._log_max[row, slot])
            logs[f"{name}/sum"] = total
        video = {}
        if envid == self._film:
            video = {key: np.stack(frames) for key, frames in self._frames.items()}
            self._frames = {}
        rate = float(self._changes[slot]) / steps if steps else 0.0
        return Episode(envid, float(self._score[slot]), steps, rate, logs, video)

    def _shoot(self, row: int, first: bool, batch: Mapping[str, NDArray[Any]]) -> None:
        if first:
            self._frames = {
                key: []
                for key, value in batch.items()
                if value.dtype == np.uint8 and value.ndim == 4 and value.shape[-1] in (1, 3)
            }
        for key, frames in self._frames.items():
            if len(frames) < self._most_frames:
                frames.append(batch[key][row].copy())

    def _log_values(
        self, batch: Mapping[str, NDArray[Any]]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What to add to the sums and what to compare with the maxima, a row for each key."""
        keys = tuple(k for k, value in batch.items() if k[:4] == "log/" and value.ndim == 1)
        if keys == self._log_keys:
            values = np.array([batch[key] for key in keys], np.float64)
            return values, values
        self._adopt_log_keys(keys)
        size = len(batch["reward"])
        zeros, nothing = np.zeros(size), np.full(size, -np.inf)
        sums = [batch[key] if key in keys else zeros for key in self._log_keys]
        peaks = [batch[key] if key in keys else nothing for key in self._log_keys]
        return np.array(sums, np.float64), np.array(peaks, np.float64)

    def _adopt_log_keys(self, keys: tuple[str, ...]) -> None:
        """Make room for keys not seen before; those missing now keep theirs."""
        new = [key for key in keys if key not in self._log_keys]
        if new:
            room = (len(new), self._score.size)
            self._log_keys = (*self._log_keys, *new)
            self._log_sum = np.concatenate([self._log_sum, np.zeros(room)])
            self._log_max = np.concatenate([self._log_max, np.full(room, -np.inf)])

    def _slots_of(self, ids: list[int]) -> NDArray[np.intp]:
        known = self._slots
        try:
            return np.array([known[envid] for envid in ids], np.intp)
        except KeyError:
            for envid in ids:
                if envid not in known:
                    known[envid] = self._new_slot()
            return np.array([known[envid] for envid in ids], np.intp)

    def _new_slot(self) -> int:
        if not self._free:
            size = self._score.size
            grown = max(16, 2 * size)
            for name in ("_running", "_score", "_steps", "_reward", "_changes", "_seen"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros(grown - size, old.dtype)]))
            more = (len(self._log_keys), grown - size)
            self._log_sum = np.concatenate([self._log_sum, np.zeros(more)], axis=1)
            self._log_max = np.concatenate([self._log_max, np.full(more, -np.inf)], axis=1)
            self._free = list(range(grown - 1, size - 1, -1))
        return self._free.pop()


def _rounds(ids: list[int]) -> Iterator[list[int]]:
    """Rows in groups without a repeated id, every environment's rows in order."""
    rest = list(range(len(ids)))
    while rest:
        taken: set[int] = set()
        now: list[int] = []
        later: list[int] = []
        for row in rest:
            (later if ids[row] in taken else now).append(row)
            taken.add(ids[row])
        yield now
        rest = later
