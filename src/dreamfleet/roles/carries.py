"""The policy's memory of every environment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Agent, Carry, put_rows, take_rows


class Carries:
    """One carry for each environment, as rows of arrays that are indexed by slot.

    Args:
        agent: Tells what a fresh carry is.
        size: Environments there is room for at first; more are made room for.
        clock: Seconds, rising.
    """

    def __init__(self, agent: Agent, size: int, clock: Callable[[], float] = time.monotonic):
        self._agent = agent
        self._clock = clock
        self._rows = agent.init_policy(size)
        self._fresh = agent.init_policy(1)
        self._slots: dict[int, int] = {}
        self._free = list(range(size - 1, -1, -1))
        self._seen = np.zeros(size)

    def __len__(self) -> int:
        return len(self._slots)

    def known(self, envids: NDArray[Any]) -> NDArray[np.bool_]:
        """Which of these environments have a carry."""
        return np.array([envid in self._slots for envid in envids.tolist()], bool)

    def take(self, envids: NDArray[Any], is_first: NDArray[Any]) -> tuple[Carry, NDArray[np.intp]]:
        """The carries of these environments, fresh where an episode begins, and their slots."""
        slots = np.array([self._slot(envid) for envid in envids.tolist()], np.intp)
        self._seen[slots] = self._clock()
        if is_first.any():
            put_rows(self._rows, slots[is_first], self._fresh)
        return take_rows(self._rows, slots), slots

    def put(self, slots: NDArray[np.intp], carry: Carry) -> None:
        put_rows(self._rows, slots, carry)

    def silent(self) -> dict[int, float]:
        """Seconds since each environment was last heard of."""
        now = self._clock()
        return {envid: now - float(self._seen[slot]) for envid, slot in self._slots.items()}

    def evict(self, silence: float) -> int:
        """Forget environments that have been silent for so many seconds; returns how many."""
        limit = self._clock() - silence
        gone = [envid for envid, slot in self._slots.items() if self._seen[slot] < limit]
        for envid in gone:
            self._free.append(self._slots.pop(envid))
        return len(gone)

    def _slot(self, envid: int) -> int:
        slot = self._slots.get(envid)
        if slot is None:
            if not self._free:
                self._grow()
            slot = self._slots[envid] = self._free.pop()
            # Whoever had the slot before must not leak into an episode whose start was missed.
            put_rows(self._rows, np.array([slot]), self._fresh)
        return slot

    def _grow(self) -> None:
        size = len(self._seen)
        grown = self._agent.init_policy(2 * size)
        old = np.arange(size)
        put_rows(grown, old, take_rows(self._rows, old))
        self._rows = grown
        self._seen = np.concatenate([self._seen, np.zeros(size)])
        self._free = list(range(2 * size - 1, size - 1, -1))
