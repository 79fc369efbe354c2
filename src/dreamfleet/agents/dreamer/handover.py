"""The hand-over of parameters from the learner thread to the actor thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax

Actor = TypeVar("Actor")


@dataclass(frozen=True)
class Snapshot:
    """Parameters for acting, as they were after some number of updates."""

    nets: Any
    updates: int
    created: float


class HandOver(Generic[Actor]):
    """The newest complete parameters for the actor; neither side ever waits for the other.

    The learner offers snapshots that may still be on their way to the acting device. The actor
    keeps its current one until a newer one has arrived completely, then changes over by swapping
    one reference; `prepare` turns it into what the actor calls.
    """

    def __init__(self, first: Snapshot, prepare: Callable[[Any], Actor]) -> None:
        self._current = first
        self._offered = first
        self._updates = first.updates
        self._prepare = prepare
        self._prepared: tuple[Snapshot, Actor] | None = None
        self._swap = threading.Lock()

    def offer(self, snapshot: Snapshot) -> None:
        """Learner: a newer snapshot, which need not have arrived yet."""
        # The one before is promoted first, or a busy learner could always replace it in time.
        self._promote()
        self._offered = snapshot

    def learned(self, updates: int) -> None:
        """Learner: how far training is, so that the age of the actor's parameters is known."""
        self._updates = updates

    def latest(self) -> Actor:
        """Actor: the newest parameters that have arrived."""
        self._promote()
        snapshot = self._current
        if self._prepared is None or self._prepared[0] is not snapshot:
            self._prepared = (snapshot, self._prepare(snapshot.nets))
        return self._prepared[1]

    def age(self) -> tuple[int, float]:
        """(updates, seconds) that the actor's parameters are behind."""
        current = self._current
        return self._updates - current.updates, time.monotonic() - current.created

    def _promote(self) -> None:
        offered = self._offered
        if offered.updates <= self._current.updates:
            return
        if not all(leaf.is_ready() for leaf in jax.tree.leaves(offered.nets)):
            return
        with self._swap:
            if offered.updates > self._current.updates:
                self._current = offered
