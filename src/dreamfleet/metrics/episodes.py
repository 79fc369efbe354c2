"""Episode statistics.

Transitions arrive in batches, a row for each environment that stepped. Every environment has a
slot in a few arrays, and a batch updates its slots with a few vectorised operations, so that
thousands of steps a second cost a fraction of a core.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.slots import SlotTable
from dreamfleet.spaces import LOG_PREFIX, is_frame

# A reward that differs less than this from the one before counts as the same.
_SAME_REWARD = 0.01
_EXPIRE_EVERY = 1.0
# What is kept of each environment, and what is counted of all of them.
_ROWS = ("running", "score", "steps", "reward", "changes", "log_sum", "log_max")
_COUNTS = ("finished", "abandoned", "timed_out")


@dataclass(frozen=True)
class Episode:
    """A finished episode.

    `length` counts actions, so the first step of the episode is not in it. `reward_rate` is the
    share of steps whose reward differs from the step before: how dense the signal is. `logs`
    holds `NAME/avg`, `NAME/max` and `NAME/sum` of every key `log/NAME`. `video` holds the frames
    of each image key, for the environment that is recorded.
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
    a new first step without having ended (the environment was restarted) is abandoned. One whose
    environment sends nothing for `timeout` seconds is dropped, and its memory is freed. Steps of
    an episode whose first step was missed are ignored.

    Args:
        timeout: Seconds without a step after which an episode is dropped; 0 for never.
        video: The id of the environment whose frames are recorded; None for none.
        most_frames: Frames recorded of one episode; later ones are left out.
        clock: Seconds, rising.
    """

    def __init__(
        self,
        *,
        timeout: float = 0.0,
        video: int | None = None,
        most_frames: int = 2000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout = timeout
        self._video = video
        self._most_frames = most_frames
        self._clock = clock
        self._envs = SlotTable(grow=self._grow, clock=clock)
        size = self._envs.size
        self._running = np.zeros(size, bool)
        self._score = np.zeros(size)
        self._steps = np.zeros(size, np.int64)
        self._reward = np.zeros(size)
        self._changes = np.zeros(size, np.int64)
        self._log_keys: tuple[str, ...] = ()
        self._log_sum = np.zeros((0, size))
        self._log_max = np.zeros((0, size))
        self._frames: dict[str, list[NDArray[np.uint8]]] = {}
        self._next_expiry = clock() + _EXPIRE_EVERY
        self.finished = 0
        self.abandoned = 0
        self.timed_out = 0

    @property
    def running(self) -> int:
        """Number of episodes under way."""
        return int(self._running.sum())

    def add(self, envid: NDArray[Any], transitions: Mapping[str, NDArray[Any]]) -> list[Episode]:
        """Take a batch (leading axis as long as `envid`) and return the episodes it finished.

        An environment may occur several times in a batch; its rows are taken in order.
        """
        ids: list[int] = envid.tolist()
        if len(set(ids)) == len(ids):
            episodes = self._add_unique(ids, transitions)
        else:
            episodes = []
            for rows in _rounds(ids):
                part = {key: value[rows] for key, value in transitions.items()}
                episodes += self._add_unique([ids[row] for row in rows], part)
        if self._timeout and (now := self._clock()) >= self._next_expiry:
            self._next_expiry = now + _EXPIRE_EVERY
            self.expire()
        return episodes

    def expire(self) -> None:
        """Drop the episodes of environments that have sent nothing for longer than the timeout."""
        if not self._timeout:
            return
        for envid, slot in self._envs.evict(self._timeout).items():
            self.timed_out += bool(self._running[slot])
            self._running[slot] = False
            if envid == self._video:
                self._frames = {}

    def stats(self) -> dict[str, float]:
        """Counts since the start."""
        return {
            "finished": self.finished,
            "abandoned": self.abandoned,
            "timed_out": self.timed_out,
            "running": self.running,
        }

    def save(self) -> dict[str, NDArray[Any] | str]:
        """The episodes under way, and the counts; without the frames of a video."""
        ids = list(self._envs)
        slots = self._envs.slots(ids)
        rows = {name: getattr(self, f"_{name}")[..., slots] for name in _ROWS}
        counts = np.array([getattr(self, name) for name in _COUNTS], np.int64)
        return {
            **rows,
            "ids": np.array(ids, np.int64),
            "counts": counts,
            "log_keys": json.dumps(self._log_keys),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `save` returned."""
        self._adopt_log_keys(tuple(json.loads(state["log_keys"])))
        slots = self._envs.slots(state["ids"].tolist())
        for name in _ROWS:
            getattr(self, f"_{name}")[..., slots] = state[name]
        for name, value in zip(_COUNTS, state["counts"].tolist(), strict=True):
            setattr(self, name, value)

    def _add_unique(self, ids: list[int], batch: Mapping[str, NDArray[Any]]) -> list[Episode]:
        slots = self._envs.slots(ids)
        first = np.asarray(batch["is_first"], bool)
        reward = np.asarray(batch["reward"], np.float64)
        sums, peaks = self._log_values(batch)
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
        if self._video is not None and self._video in ids:
            row = ids.index(self._video)
            self._record(row, bool(first[row]), batch)
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
            name, total = key.removeprefix(LOG_PREFIX), float(self._log_sum[row, slot])
            logs[f"{name}/avg"] = total / (steps + 1)
            logs[f"{name}/max"] = float(self._log_max[row, slot])
            logs[f"{name}/sum"] = total
        video = {}
        if envid == self._video:
            video = {key: np.stack(frames) for key, frames in self._frames.items()}
            self._frames = {}
        rate = float(self._changes[slot]) / steps if steps else 0.0
        return Episode(envid, float(self._score[slot]), steps, rate, logs, video)

    def _record(self, row: int, first: bool, batch: Mapping[str, NDArray[Any]]) -> None:
        if first:
            images = (key for key, v in batch.items() if is_frame(v.dtype, v.shape[1:]))
            self._frames = {key: [] for key in images}
        for key, frames in self._frames.items():
            if len(frames) < self._most_frames:
                frames.append(batch[key][row].copy())

    def _log_values(
        self, batch: Mapping[str, NDArray[Any]]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What to add to the sums and what to compare with the maxima, a row for each key."""
        keys = tuple(k for k, v in batch.items() if k.startswith(LOG_PREFIX) and v.ndim == 1)
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
        """Add rows for new keys; keys that are missing now keep theirs."""
        new = [key for key in keys if key not in self._log_keys]
        if new:
            room = (len(new), self._score.size)
            self._log_keys = (*self._log_keys, *new)
            self._log_sum = np.concatenate([self._log_sum, np.zeros(room)])
            self._log_max = np.concatenate([self._log_max, np.full(room, -np.inf)])

    def _grow(self, size: int) -> None:
        self._running = _padded(self._running, size)
        self._score = _padded(self._score, size)
        self._steps = _padded(self._steps, size)
        self._reward = _padded(self._reward, size)
        self._changes = _padded(self._changes, size)
        self._log_sum = _padded(self._log_sum, size)
        self._log_max = _padded(self._log_max, size, -np.inf)


def _padded(array: NDArray[Any], size: int, value: float = 0) -> NDArray[Any]:
    """An array with a longer last axis."""
    more = np.full((*array.shape[:-1], size - array.shape[-1]), value, array.dtype)
    return np.concatenate([array, more], axis=-1)


def _rounds(ids: list[int]) -> Iterator[list[int]]:
    """Groups of rows without a repeated id; the rows of an environment stay in order."""
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
