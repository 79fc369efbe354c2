"""What the actor and the learner of an agent process share next to the agent."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Progress:
    """The step counter, and how the run ends.

    A run ends in two steps. First `finish`: the actor stops and sends what it has collected, while
    the learner goes on, because the replay's rate limiter may hold inserts back until something was
    sampled. It also makes the updates that are left (`updates_left`). Then `end_learning`: the
    learner stops and saves.
    """

    def __init__(self, steps: int = 0) -> None:
        self.finished = threading.Event()
        self.stopped = False
        """Whether the run was asked to stop, instead of having made all its steps."""
        self.prepared = False
        """Whether the learner has restored and compiled the agent. Before that there is nothing to
        save."""
        self.error: BaseException | None = None
        self.updates_left: Callable[[], int] = lambda: 0
        """How many updates the learner has to make before it ends, which sets this."""
        self._limit = steps
        self._lock = threading.Lock()
        self._step = 0
        self._learning_over = False
        self._on_learning_over: list[Callable[[], None]] = []

    @property
    def step(self) -> int:
        """Training environment steps, also those before the run was resumed."""
        return self._step

    @property
    def learning_over(self) -> bool:
        return self._learning_over

    def restore(self, step: int) -> None:
        """Resume at a step; a run that has made all its steps finishes at once."""
        with self._lock:
            self._step = step
        self.advance(0)

    def advance(self, count: int) -> int:
        """Count steps, finish when there are enough, and return how many there are."""
        with self._lock:
            self._step += count
            step = self._step
        if self._limit and step >= self._limit:
            self.finish()
        return step

    def finish(self) -> None:
        """There were enough steps, or the score is reached."""
        self.finished.set()

    def stop(self) -> None:
        """Somebody asks the run to stop."""
        self.stopped = True
        self.finished.set()

    def fail(self, error: BaseException) -> None:
        """End the run because of an error; the first one counts."""
        with self._lock:
            if self.error is None:
                self.error = error
        self.finished.set()

    def on_learning_over(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._learning_over:
                self._on_learning_over.append(callback)
                return
        callback()

    def end_learning(self) -> None:
        with self._lock:
            self._learning_over = True
            callbacks, self._on_learning_over = self._on_learning_over, []
        for callback in callbacks:
            callback()
