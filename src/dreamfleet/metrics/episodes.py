"""Episode statistics.

Transitions arrive in batches, a row for each environment that stepped. Every environment has a
slot in a few arrays, and a batch updates its slots with a few vectorised operations, so that
thousands of steps a second cost a fraction of a core.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.slots import SlotTable
from dreamfleet.spaces import LOG_PREFIX, is_frame

# A reward that differs less than this from the one before counts as the same.
_SAME_REWARD = 0.01
# What is kept of each environment, and what is counted of all of them.
_ROWS = ("running", "score", "steps", "reward", "changes", "log_sum", "log_max", "log_count")


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
        self._score = np.zeros(size)
        self._steps = np.zeros(size, np.int64)
        self._reward = np.zeros(size)
        self._changes = np.zeros(size, np.int64)
        self._log_keys: tuple[str, ...] = ()
        self._log_sum = np.zeros((0, size))
        self._log_max = np.zeros((0, size))
        self._log_count = np.zeros((0, size), np.int64)
        self._frames: dict[str, list[NDArray[np.uint8]]] = {}
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
        return self._follow(envid.tolist(), transitions) if len(envid) else []

    def forget(self, envids: Iterable[int]) -> None:
        """Drop the episodes of environments that are gone, and free their memory."""
        for envid, slot in self._envs.remove(envids).items():
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

    def _follow(self, ids: list[int], batch: Mapping[str, NDArray[Any]]) -> list[Episode]:
        values = self._log_values(batch)
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
        changed = ~first & (np.abs(reward - before) >= _SAME_REWARD)
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

        def total(values: NDArray[Any], so_far: NDArray[Any]) -> NDArray[Any]:
            return np.add.reduceat(values, starts, -1) + np.where(continued, so_far[..., place], 0)

        score = total(reward, self._score)
        steps = total((~first).astype(np.int64), self._steps)
        changes = total(changed.astype(np.int64), self._changes)
        # Where an environment has several parts the last one stays, because numpy assigns in order.
        self._running[place] = left
        self._score[place], self._steps[place], self._changes[place] = score, steps, changes
        self._reward[place] = reward[ends]
        sums = peaks = counts = values
        if self._log_keys:
            values = values[:, order]
            present = values != -np.inf
            sums = total(np.where(present, values, 0.0), self._log_sum)
            counts = total(present.astype(np.int64), self._log_count)
            known = np.where(continued, self._log_max[:, place], -np.inf)
            peaks = np.maximum(np.maximum.reduceat(values, starts, -1), known)
            self._log_sum[:, place], self._log_max[:, place] = sums, peaks
            self._log_count[:, place] = counts
        videos = self._record(ids, batch) if self._video in ids else {}
        episodes: dict[int, Episode] = {}  # by the row they end with
        for part in np.flatnonzero(ended).tolist():
            row, count = int(order[ends[part]]), int(steps[part])
            episodes[row] = Episode(
                ids[row],
                float(score[part]),
                count,
                float(changes[part]) / count if count else 0.0,
                self._logs(sums[:, part], peaks[:, part], counts[:, part]),
                videos.get(row, {}),
            )
        self.finished += len(episodes)
        return [episodes[row] for row in sorted(episodes)]

    def _logs(
        self, sums: NDArray[np.float64], peaks: NDArray[np.float64], counts: NDArray[Any]
    ) -> dict[str, float]:
        logs = {}
        columns = (column.tolist() for column in (sums, peaks, counts))
        for key, total, peak, count in zip(self._log_keys, *columns, strict=True):
            if peak == -np.inf:
                continue  # no step of this episode has it
            name = key.removeprefix(LOG_PREFIX)
            logs[f"{name}/avg"] = total / max(1, count)
            logs[f"{name}/max"] = peak
            logs[f"{name}/sum"] = total
        return logs

    def _record(
        self, ids: list[int], batch: Mapping[str, NDArray[Any]]
    ) -> dict[int, dict[str, NDArray[np.uint8]]]:
        """Take the frames of the environment that is recorded; the videos that are complete, by the
        row they end with."""
        images = [key for key, value in batch.items() if is_frame(value.dtype, value.shape[1:])]
        if not images and not self._frames:
            return {}
        videos = {}
        for row, envid in enumerate(ids):
            if envid != self._video:
                continue
            if batch["is_first"][row]:
                self._frames = {key: [] for key in images}
            for key, frames in self._frames.items():
                if len(frames) < self._most_frames:
                    frames.append(batch[key][row].copy())
            if batch["is_last"][row]:
                videos[row] = {key: np.stack(frames) for key, frames in self._frames.items()}
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
        if new:
            room = (len(new), self._score.size)
            self._log_keys = (*self._log_keys, *new)
            self._log_sum = np.concatenate([self._log_sum, np.zeros(room)])
            self._log_max = np.concatenate([self._log_max, np.full(room, -np.inf)])
            self._log_count = np.concatenate([self._log_count, np.zeros(room, np.int64)])

    def _grow(self, size: int) -> None:
        for name in _ROWS:
            array, nothing = getattr(self, f"_{name}"), -np.inf if name == "log_max" else 0
            setattr(self, f"_{name}", _padded(array, size, nothing))


def _padded(array: NDArray[Any], size: int, value: float) -> NDArray[Any]:
    """An array with a longer last axis."""
    more = np.full((*array.shape[:-1], size - array.shape[-1]), value, array.dtype)
    return np.concatenate([array, more], axis=-1)
