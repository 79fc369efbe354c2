"""Transitions on their way from the actor to replay and logger."""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Arrays
from dreamfleet.roles.camera import Camera
from dreamfleet.transport import Client, Future, Timeout

_GATHER_SECONDS = 0.01
IN_FLIGHT = 2
"""Messages to the replay without an answer: one that it works on, and one that comes next."""


@dataclass(frozen=True, slots=True)
class Transitions:
    """What follows a batch of actions: a row for each environment."""

    envids: NDArray[np.int64]
    is_eval: NDArray[np.bool_]
    steps: Arrays
    """What the replay stores."""
    logs: Arrays
    """What the logger follows episodes by."""

    def where(self, rows: NDArray[np.bool_]) -> Transitions:
        """Some of the rows."""
        return Transitions(
            self.envids[rows],
            self.is_eval[rows],
            {key: value[rows] for key, value in self.steps.items()},
            {key: value[rows] for key, value in self.logs.items()},
        )


class Outbox:
    """Sends transitions in the order they came, on a thread of its own.

    A message costs both sides more than the rows in it, and so does waking a thread. So batches
    that follow each other quickly share both: the thread wakes when there is something, gives
    more a moment to come, and sends all of it at once. What waits and what is in flight is
    bounded: when replay or logger fall behind, `put` waits.

    Args:
        replay, logger: Where transitions go.
        camera: Chooses the frames that the logger gets.
        rows: Rows of a full message, and rows that wait before `put` waits. No more than the
            replay's limiter tolerates at once, so that it can hold acting and learning in step.
        step: How many training steps there are by now.
        heard: Takes what the logger answers.
        failed: Told the error when something cannot be sent; from then on nothing is taken.
    """

    def __init__(
        self,
        replay: Client,
        logger: Client,
        camera: Camera,
        *,
        rows: int,
        step: Callable[[], int],
        heard: Callable[[Any], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._replay, self._logger, self._camera = replay, logger, camera
        self._step, self._heard, self._failed = step, heard, failed
        self._most_rows = rows
        # A fresh name for each life: a resend is recognised, a successor's batch is never.
        self._source = f"actor-{uuid.uuid4().hex}"
        self._sequence = 0
        self._changed = threading.Condition()
        self._waiting: deque[Transitions] = deque()
        self._rows = 0
        self._ending = False
        self._over = False
        self._stored: deque[Future] = deque()
        self._logged: deque[Future] = deque()
        self._thread = threading.Thread(target=self._work, name="actor-outbox", daemon=True)
        self._thread.start()

    def put(self, transitions: Transitions) -> bool:
        """Take a batch, after waiting while too much is waiting; False if it is too late."""
        with self._changed:
            if self._is_full():
                self._changed.wait_for(lambda: not self._is_full() or self._ending)
            if self._over:
                return False
            self._waiting.append(transitions)
            self._rows += len(transitions.envids)
            # In between the thread is busy, or gives more a moment to come.
            if len(self._waiting) == 1 or self._is_full():
                self._changed.notify_all()
            return True

    def hand_over(self, seconds: float) -> None:
        """Send what is left, and wait until replay and logger have everything.

        Raises:
            Timeout: They have taken nothing for so many seconds.
        """
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        sent = -1
        while self._thread.is_alive():
            if sent == self._sequence:
                raise Timeout(f"The replay has taken nothing for {seconds:g} s.")
            sent = self._sequence
            self._thread.join(seconds)
        while self._stored:
            self._stored.popleft().result(seconds)
        while self._logged:
            self._heard(self._logged.popleft().result(seconds))

    def drop(self) -> None:
        """Give up what is waiting, and take nothing more."""
        with self._changed:
            self._over = True
            self._waiting.clear()
            self._rows = 0
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            while batches := self._gather():
                for part in self._parts(batches):
                    self._send(*part)
        except Exception as error:
            self.drop()
            self._failed(error)

    def _is_full(self) -> bool:
        return self._rows >= self._most_rows

    def _gather(self) -> list[Transitions]:
        """A message's worth of what has come together; nothing at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending or self._over)
            self._changed.wait_for(
                lambda: self._is_full() or self._ending or self._over, _GATHER_SECONDS
            )
            batches: list[Transitions] = []
            rows = 0
            while self._waiting and rows < self._most_rows:
                batches.append(self._waiting.popleft())
                rows += len(batches[-1].envids)
            self._rows -= rows
            if not batches:
                self._over = True
            self._changed.notify_all()
            return batches

    def _parts(self, batches: Sequence[Transitions]) -> Iterator[tuple[list[Transitions], Arrays]]:
        """Batches for one message each, with the frames of the row that is filmed. A batch with
        frames goes alone, so that it is clear which row they belong to."""
        together: list[Transitions] = []
        for batch in batches:
            if frames := self._camera.frames(batch.envids, batch.steps):
                if together:
                    yield together, {}
                    together = []
                yield [batch], frames
            else:
                together.append(batch)
        if together:
            yield together, {}

    def _send(self, batches: Sequence[Transitions], frames: Arrays) -> None:
        while self._stored and self._stored[0].done():
            self._stored.popleft().result()
        while self._logged and self._logged[0].done():
            self._heard(self._logged.popleft().result())
        envids = _joined([batch.envids for batch in batches])
        is_eval = _joined([batch.is_eval for batch in batches])
        self._store(_joined_columns([batch.steps for batch in batches]), envids, is_eval)
        logs = _joined_columns([batch.logs for batch in batches])
        self._logged.append(self._logger.call("tran", self._step(), envids, is_eval, logs, frames))

    def _store(self, steps: Arrays, envids: NDArray[np.int64], is_eval: NDArray[np.bool_]) -> None:
        evaluated = np.count_nonzero(is_eval)
        if evaluated in (0, len(envids)):
            self._add(steps, envids, bool(evaluated))
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
