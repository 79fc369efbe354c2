"""Transitions on their way from the actor to replay and logger."""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agent.api import Arrays
from dreamfleet.transport import Client, Future

_GATHER_SECONDS = 0.01
_GATHER_BATCHES = 16
_HAND_OVER_SECONDS = 60.0


@dataclass(frozen=True)
class Transitions:
    """What follows a batch whose actions have gone out: a row for each environment."""

    envids: NDArray[np.int64]
    is_eval: NDArray[np.bool_]
    steps: Arrays
    """What the replay stores."""
    logs: Arrays
    """What the logger follows episodes by."""


class Outbox:
    """Sends transitions in the order they came, several batches in a message.

    A message costs both sides more than the rows in it, so batches that follow each other quickly
    share one. What is in flight is bounded: `put` waits when replay or logger fall behind.

    Args:
        replay, logger: Where transitions go.
        step: How many training steps there are by now.
        heard: Takes what the logger answers.
        clock: Seconds, rising.
    """

    def __init__(
        self,
        replay: Client,
        logger: Client,
        step: Callable[[], int],
        heard: Callable[[Any], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replay, self._logger = replay, logger
        self._step, self._heard, self._clock = step, heard, clock
        # A fresh name for each life: a resend is recognised, a successor's batch is never.
        self._source = f"actor-{uuid.uuid4().hex}"
        self._sequence = 0
        self._lock = threading.Lock()
        self._gathered: list[Transitions] = []
        self._sent_at = -float("inf")
        self._stored: deque[Future] = deque()
        self._logged: deque[Future] = deque()

    def put(self, transitions: Transitions, frames: Arrays) -> None:
        """Take a batch; it is sent at once unless the one before was sent only just now.

        Args:
            transitions: A batch.
            frames: Images for the logger, of the row that is filmed, if any. Such a batch goes
                alone, so that it is clear which row they belong to.
        """
        with self._lock:
            if frames:
                self._send()
            self._gathered.append(transitions)
            late = self._clock() - self._sent_at >= _GATHER_SECONDS
            if late or len(self._gathered) >= _GATHER_BATCHES or frames:
                self._send(frames)

    def flush(self) -> None:
        """Send what has been gathered, in case that nothing follows it."""
        # Who holds the lock is sending, and may have to wait for long.
        if self._lock.acquire(blocking=False):
            try:
                self._send()
            finally:
                self._lock.release()

    def hand_over(self) -> None:
        """Send everything, and wait until replay and logger have it."""
        with self._lock:
            self._send()
        while self._stored:
            self._stored.popleft().result(_HAND_OVER_SECONDS)
        while self._logged:
            self._heard(self._logged.popleft().result(_HAND_OVER_SECONDS))

    def _send(self, frames: Arrays | None = None) -> None:
        while self._stored and self._stored[0].done():
            self._stored.popleft().result()
        while self._logged and self._logged[0].done():
            self._heard(self._logged.popleft().result())
        batches, self._gathered = self._gathered, []
        self._sent_at = self._clock()
        if not batches:
            return
        envids = _joined([batch.envids for batch in batches])
        is_eval = _joined([batch.is_eval for batch in batches])
        self._store(_joined_columns([batch.steps for batch in batches]), envids, is_eval)
        logs = _joined_columns([batch.logs for batch in batches])
        self._logged.append(
            self._logger.call("tran", self._step(), envids, is_eval, logs, frames or {})
        )

    def _store(self, steps: Arrays, envids: NDArray[np.int64], is_eval: NDArray[np.bool_]) -> None:
        evaluated = int(is_eval.sum())
        if evaluated in (0, len(envids)):
            self._add(steps, envids, evaluated > 0)
            return
        for rows, kind in ((~is_eval, False), (is_eval, True)):
            self._add({key: value[rows] for key, value in steps.items()}, envids[rows], kind)

    def _add(self, steps: Arrays, envids: NDArray[np.int64], is_eval: bool) -> None:
        self._sequence += 1
        self._stored.append(
            self._replay.call("add_batch", steps, envids, is_eval, self._source, self._sequence)
        )


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _joined_columns(parts: list[Arrays]) -> Arrays:
    return {key: _joined([part[key] for part in parts]) for key in parts[0]}
