"""Parameters on their way from the learner to the actor."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import jax

Actor = TypeVar("Actor")


@dataclass(frozen=True)
class Snapshot:
    """Parameters for acting, as they were after some number of updates."""

    nets: Any
    updates: int
    created: float


class Publisher(Generic[Actor]):
    """The newest parameters for the actor; neither side ever waits for the other.

    The learner hands over snapshots that may still be worked out on the training devices. A thread
    waits for them, brings them to where they are used, turns them into what the actor calls, and
    swaps one reference. One snapshot at a time: while `busy`, the learner keeps its own.

    Args:
        first: What to act with until something newer has arrived.
        bring: Returns parameters where they are used.
        prepare: Returns what the actor calls, from parameters that are there.
    """

    def __init__(
        self, first: Snapshot, bring: Callable[[Any], Any], prepare: Callable[[Any], Actor]
    ) -> None:
        self._bring, self._prepare = bring, prepare
        self._take(first)
        self._updates = first.updates
        # Its thread ends with the object.
        self._thread = ThreadPoolExecutor(1, "publish")
        self._coming: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Learner: whether a snapshot is still on its way."""
        return self._coming is not None and not self._coming.done()

    @property
    def published(self) -> int:
        """Learner: the updates of the newest snapshot that was handed over."""
        return self._published

    def publish(self, snapshot: Snapshot) -> None:
        """Learner: a newer snapshot, which need not be there yet; waits for one before it."""
        self.wait()
        if snapshot.updates > self._current[0].updates:
            self._published = snapshot.updates
            self._coming = self._thread.submit(self._take, snapshot)

    def wait(self) -> None:
        """Return when the actor has the newest snapshot."""
        if self._coming is not None:
            self._coming.result()

    def count(self, updates: int) -> None:
        """Learner: how far training is, so that the age of the actor's parameters is known."""
        self._updates = updates

    def latest(self) -> Actor:
        """Actor: the newest parameters that have arrived."""
        return self._current[1]

    def newest(self) -> Any:
        """The newest parameters that have arrived; from any thread."""
        return self._current[0].nets

    def age(self) -> tuple[int, float]:
        """(updates, seconds) that the actor's parameters are behind."""
        current, _ = self._current
        return self._updates - current.updates, time.monotonic() - current.created

    def _take(self, snapshot: Snapshot) -> None:
        arrive: Any = jax.block_until_ready
        nets = arrive(self._bring(snapshot.nets))
        self._current = replace(snapshot, nets=nets), self._prepare(nets)
        self._published = snapshot.updates
