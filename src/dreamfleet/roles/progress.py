"""What the actor and the learner of an agent process share next to the agent.

An actor in a process of its own has a `SharedProgress` instead, which counts with the learner.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from dreamfleet.config import RunConfig
from dreamfleet.roles.logger_client import LoggerClient
from dreamfleet.transport import Client, Disconnected

_LOOK_SECONDS = 0.5
_END_SECONDS = 5.0


class Progress:
    """The step counter, and how the run ends.

    Both ends are one sequence: the actor stops (`finished`); the learner calls `finish` of the
    replay, which takes the steps that are left and allows the updates that are missing; the steps
    are confirmed (`sent`); the learner saves. A complete run waits for its replay as long as that
    takes. A run that is stopped, or has failed, makes no more updates and waits 5 s for other
    processes at most (`seconds_left`): then unconfirmed steps are dropped, as after a kill.
    """

    def __init__(self, steps: int = 0) -> None:
        self.finished = threading.Event()
        self.stopped = False
        """Whether the run was asked to stop, instead of having made all its steps."""
        self.acting = False
        """Whether the actor may act: the agent is restored, and its policy is ready."""
        self.prepared = False
        """Whether the learner has restored and compiled the agent. Before that there is nothing to
        save."""
        self.error: BaseException | None = None
        self.sending: Callable[[], bool] = lambda: False
        """Whether the actor of this process still acts or sends; set by the agent."""
        self.actors_busy: Callable[[], bool] = lambda: False
        """Whether actors in other processes still send what they have; set by the learner."""
        self.failures_elsewhere: Callable[[], tuple[int, float]] = lambda: (0, 0.0)
        """Failures of the environments of other actors, and their steps; set by the learner."""
        self.present_elsewhere: Callable[[], int] = lambda: 0
        """Environments of other actors that are there; set by the learner."""
        self.present = 0
        """Environments that are there, as far as this process knows."""
        self.begun = False
        """Whether the environments that the run expects were there."""
        self.elsewhere = 0
        """Steps of other hosts, as far as this one has heard of them."""
        self._limit = steps
        self._lock = threading.Lock()
        self._step = 0
        self._end_by = float("inf")

    @property
    def step(self) -> int:
        """Training environment steps, also those before the run was resumed."""
        return self._step + self.elsewhere

    @property
    def own(self) -> int:
        """Those of this host."""
        return self._step

    @property
    def sent(self) -> bool:
        """Whether all steps of the actors are confirmed, or are not waited for any more."""
        return not self.seconds_left() or not (self.sending() or self.actors_busy())

    def seconds_left(self) -> float:
        """How long the end may still wait for other processes."""
        return max(0.0, self._end_by - time.monotonic())

    def wait_no_longer(self) -> None:
        """Wait for other processes only a few seconds from now on."""
        self._end_by = min(self._end_by, time.monotonic() + _END_SECONDS)

    def restore(self, step: int) -> None:
        """Resume at a step of this host; a run that has made all its steps finishes at once."""
        with self._lock:
            self._step = step
        self.advance(0)

    def advance(self, count: int) -> int:
        """Count steps, finish when there are enough, and return how many there are."""
        with self._lock:
            self._step += count
            step = self.step
        if self._limit and step >= self._limit:
            self.finish()
        return step

    def raise_to(self, step: int) -> None:
        """The replay holds so many steps; some of them may not be counted yet."""
        with self._lock:
            self._step = max(self._step, step)
        self.advance(0)

    def retract(self, count: int) -> None:
        """Steps that were counted are lost, because the actor that made them was killed."""
        with self._lock:
            if not self.finished.is_set():
                self._step -= count

    def report(self) -> None:
        """Have the steps counted before they are sent to the replay; here they are."""

    def stored(self, count: int) -> None:
        """The replay has so many more of the steps."""

    def noted(self, failures: int, steps: float) -> None:
        """So many failures of environments, and steps, there were since this actor was started."""

    def may_begin(self, present: int, expected: int) -> bool:
        """Whether the run acts, if so many environments of this actor are there, and it expects so
        many of all actors."""
        self.present = present + self.present_elsewhere()
        self.begun = self.begun or self.present >= expected
        return self.begun

    def waiting(self) -> str:
        """Whom counting waits for, in words; empty if for nobody."""
        return ""

    def finish(self) -> None:
        """There were enough steps, or the score is reached."""
        self.finished.set()

    def stop(self) -> None:
        """The run is asked to stop."""
        self.stopped = True
        self.wait_no_longer()
        self.finished.set()

    def fail(self, error: BaseException) -> None:
        """End the run because of an error; the first one counts."""
        with self._lock:
            if self.error is None:
                self.error = error
        self.wait_no_longer()
        self.finished.set()


class Closable(Protocol):
    """A client."""

    def close(self, flush: float = ..., /) -> None: ...


@contextmanager
def hang_up_in_time(progress: Progress, logger: LoggerClient, *replays: Closable) -> Iterator[None]:
    """While the block runs: close the clients when the end may not wait for their servers any
    longer. Every call that waits then fails with `Closed`. The end never waits for a logger that
    answers nothing."""
    done = threading.Event()

    def watch() -> None:
        progress.finished.wait()
        while not done.wait(min(_LOOK_SECONDS, progress.seconds_left())):
            logger.give_up_if_silent(_END_SECONDS)
            if not progress.seconds_left():
                for client in (logger, *replays):
                    client.close(0.0)
                return

    threading.Thread(target=watch, name="end", daemon=True).start()
    try:
        yield
    finally:
        done.set()


class SharedProgress(Progress):
    """The progress of a run as an actor in a process of its own knows it.

    The learner counts. It is told of steps before they are sent to the replay, so every step that
    is stored was counted; whoever reports while it is away waits until it is back. So all actors
    together make at most `_margin` steps that were not counted, and when the run has no more left
    than that, every policy call reports.

    Messages hold totals, so one that arrives twice counts once. A learner that was started again
    counts from what the replay holds: it gets a total without the steps that its predecessor knew.

    Args:
        name: The actor's.
        args: The run.
        learner: The learner's server.
    """

    def __init__(self, name: str, args: RunConfig, learner: Client) -> None:
        super().__init__(args.steps)
        self.name = name
        self.busy = True
        """Whether there are steps that this actor has not sent yet."""
        self.heard: dict[str, Any] = {}
        """What the learner said last; empty as long as it has said nothing."""
        self._learner = learner
        self._source = uuid.uuid4().hex  # a successor's totals start again
        batch = max(args.policy_batch_of(actor) for actor in range(args.actors))
        self._margin = args.actors * (2 * args.limiter_tolerance + batch)
        self._counting = ""  # the learner that counts
        self._reporting = threading.Lock()
        self._acted = self._known = 0  # steps, all of them and those that the learner knows
        self._earlier = 0  # those that an earlier one knew
        self._unstored = 0
        self._reached = False
        self._failures, self._env_steps = 0, 0.0

    def advance(self, count: int) -> int:
        with self._lock:
            self._acted += count
            self._unstored += count
            self._step += count
            step = self._step
        if self._limit and step + self._margin >= self._limit:
            self.report()
        return step

    def report(self) -> None:
        """Tell the learner, and hear from it; waits until it is there. Without it an actor that is
        asked to stop goes on: the replay's count holds what it stores."""
        with self._reporting:
            acted, reply = self._told()
            while reply is not None and not self._take(acted, reply):
                acted, reply = self._told()

    def ask(self, method: str, *args: Any) -> Any:
        """The learner's reply; None if there is no learner, and the run needs none any more."""
        while True:
            try:
                self._learner.connect(_LOOK_SECONDS)
                future = self._learner.call(method, *args)
                while not future.wait(_LOOK_SECONDS):
                    if self.finished.is_set() and self.waiting():
                        return None
                return future.result()
            except Disconnected:
                if self.finished.is_set():
                    return None

    def _told(self) -> tuple[int, Any]:
        """Tell the learner of the steps; returns how many it was told of, and its reply."""
        with self._lock:
            acted = self._acted
            message = {
                "learner": self._counting,
                "actor": self.name,
                "source": self._source,
                "steps": acted - self._earlier,
                "unstored": self._unstored,
                "busy": self.busy,
                "reached": self._reached,
                "failures": self._failures,
                "env_steps": self._env_steps,
                "present": self.present,
            }
        return acted, self.ask("report", message)

    def _take(self, acted: int, reply: dict[str, Any]) -> bool:
        """Take the learner's reply; returns whether it has counted."""
        with self._lock:
            if reply["learner"] != self._counting:
                self._counting, self._earlier = reply["learner"], self._known
                return False
            self._known = acted
            self._step = reply["step"] + self._acted - acted
            self.heard = reply
        if reply["stopped"]:
            self.stop()
        elif reply["finished"]:
            self.finished.set()
        return True

    def stored(self, count: int) -> None:
        with self._lock:
            self._unstored -= count

    def noted(self, failures: int, steps: float) -> None:
        self._failures, self._env_steps = failures, steps

    def may_begin(self, present: int, expected: int) -> bool:
        self.present = present
        self.begun = not expected or bool(self.heard.get("begun"))
        return self.begun

    def waiting(self) -> str:
        away = not self._learner.stats()["connected"]
        return f"{self.name} has no connection to the learner" if away else ""

    def finish(self) -> None:
        """The score is reached, as the learner has to know."""
        self._reached = True
        self.report()
