"""Counters of a replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_RECENT = 1024
_COUNTERS = ("inserts", "samples", "updates", "skipped_updates")


class Statistics:
    """What happened since the replay was opened."""

    def __init__(self) -> None:
        self.inserts = 0
        self.samples = 0
        self.updates = 0
        self.skipped_updates = 0
        self._ages = np.zeros(_RECENT, np.int64)
        self._aged = 0

    def sampled(self, ages: NDArray[np.int64]) -> None:
        """Sequences were handed out; a sequence's age is counted in sequences added since."""
        newest = ages[-_RECENT:]
        self._ages[(self._aged + np.arange(len(newest))) % _RECENT] = newest
        self._aged += len(newest)
        self.samples += len(ages)

    def save(self) -> dict[str, NDArray[np.int64]]:
        return {f"count/{name}": np.array(getattr(self, name), np.int64) for name in _COUNTERS}

    def load(self, state: Mapping[str, Any]) -> None:
        for name in _COUNTERS:
            setattr(self, name, int(state[f"count/{name}"]))

    def summary(self, length: int) -> dict[str, float]:
        recent = self._ages[: min(self._aged, _RECENT)]
        return {
            "inserts": self.inserts,
            "samples": self.samples,
            "updates": self.updates,
            "skipped_updates": self.skipped_updates,
            "replay_ratio": self.samples * length / max(1, self.inserts),
            "sample_age_mean": float(recent.mean()) if len(recent) else 0.0,
            "sample_age_max": float(recent.max(initial=0)),
        }
