"""Episode statistics, and slots in arrays for environments that come and go."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.spaces import LOG_PREFIX

# A reward that differs less than this from the one before counts as the same.
_SAME_REWARD = 0.01


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


@dataclass(slots=True)
class _Running:
    """An episode under way."""

    reward: float
    """Of the last step."""
    score: float = 0.0
    length: int = -1
    changes: int = 0
    logs: dict[str, tuple[float, int, float]] = field(default_factory=dict)
    """Sum, count and largest value."""

    def add(self, reward: float) -> None:
        self.score += reward
        self.length += 1
        self.changes += abs(reward - self.reward) >= _SAME_REWARD
        self.reward = reward

    def log(self, name: str, value: float) -> None:
        total, count, peak = self.logs.get(name, (0.0, 0, -math.inf))
        self.logs[name] = total + value, count + 1, max(peak, value)

    def ended(self, envid: int, video: dict[str, NDArray[np.uint8]]) -> Episode:
        logs: dict[str, float] = {}
        for name, (total, count, peak) in self.logs.items():
            logs |= {f"{name}/avg": total / count, f"{name}/max": peak, f"{name}/sum": total}
        rate = self.changes / self.length if self.length else 0.0
        return Episode(envid, self.score, self.length, rate, logs, video)


class EpisodeStats:
    """Follows the episode of every environment.

    Transitions arrive in batches, a row for each environment that stepped. An episode counts when
    both its first and its last step were received. One that is followed by a new first step without
    having ended (the environment was restarted) is abandoned. Steps of an episode whose first step
    was missed are ignored.

    Args:
        video: The id of the environment whose frames are recorded; None for none.
        most_frames: Frames recorded of one episode; later ones are left out.
    """

    def __init__(self, *, video: int | None = None, most_frames: int = 2000) -> None:
        self._video = video
        self._most_frames = most_frames
        self._running: dict[int, _Running] = {}
        self._frames: dict[str, list[NDArray[np.uint8]]] = {}
        self.finished = self.abandoned = self.timed_out = 0

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
        ids = envid.tolist()
        videos = self._record(ids, transitions, frames) if self._video in ids else {}
        # Lists: one number at a time, these are several times faster than arrays.
        flags = (transitions[key].tolist() for key in ("reward", "is_first", "is_last"))
        logs = {
            key.removeprefix(LOG_PREFIX): np.asarray(value, np.float64).tolist()
            for key, value in transitions.items()
            if key.startswith(LOG_PREFIX) and value.ndim == 1
        }
        episodes = []
        for row, (env, reward, first, last) in enumerate(zip(ids, *flags, strict=True)):
            if first:
                self.abandoned += env in self._running
                self._running[env] = _Running(reward)
            if (episode := self._running.get(env)) is None:
                continue
            episode.add(reward)
            for name, values in logs.items():
                if (value := values[row]) != -math.inf:
                    episode.log(name, value)
            if last:
                del self._running[env]
                episodes.append(episode.ended(env, videos.get(row, {})))
        self.finished += len(episodes)
        return episodes

    def forget(self, envids: Iterable[int]) -> None:
        """Drop the episodes of environments that are gone."""
        for envid in envids:
            self.timed_out += self._running.pop(envid, None) is not None
            if envid == self._video:
                self._frames = {}

    def stats(self) -> dict[str, float]:
        """Counts since the start, and the episodes under way."""
        counts = {name: getattr(self, name) for name in ("finished", "abandoned", "timed_out")}
        return {**counts, "running": len(self._running)}

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

    def __contains__(self, key: int) -> bool:
        return key in self._slots

    def slots(self, keys: Sequence[int]) -> NDArray[np.intp]:
        """The slot of each id, which counts as used now. An id without a slot gets one, for which
        the arrays may grow."""
        for key in keys:
            if key not in self._slots:
                self._slots[key] = self._take()
        found = np.array([self._slots[key] for key in keys], np.intp)
        self._used[found] = self._clock()
        return found

    def idle(self) -> dict[int, float]:
        """Seconds since each id was last used."""
        now = self._clock()
        return {key: now - float(self._used[slot]) for key, slot in self._slots.items()}

    def remove(self, keys: Iterable[int]) -> None:
        """Free the slots of ids, of those that have one."""
        self._free += [self._slots.pop(key) for key in keys if key in self._slots]

    def _take(self) -> int:
        if not self._free:
            size = self.size
            self._grow(2 * size)
            self._used = np.concatenate([self._used, np.zeros(size)])
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()
