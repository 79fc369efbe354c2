"""What the actor and the learner share next to the agent: the step counter, and the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dreamfleet.config import RunConfig
from dreamfleet.replay import SamplesPerInsert
from dreamfleet.roles.logger_client import LoggerClient
from dreamfleet.roles.runtime import POLL_SECONDS
from dreamfleet.roles.scaling.shards import ReplayClient

_END_SECONDS = 5.0


class Progress:
    """The step counter, and how the run ends.

    A single actor counts its steps when it acts. Of several actors, the replay counts the steps
    (`raise_to`): a step is made when it is committed.

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
        self.prepared = False
        """Whether the learner has restored and compiled the agent. Before that there is nothing to
        save."""
        self.preparing = threading.Lock()
        """Held while it becomes so, or while the process is left because it is not."""
        self.error: BaseException | None = None
        self.senders: list[Callable[[], bool]] = []
        """Whether the actor of this process still acts or sends, and those of others."""
        self.policy_lock = threading.Lock()
        """Held while the agent chooses actions."""
        self.policy_metrics: Callable[[], dict[str, float]] = dict
        """What the actor logs in addition to its own metrics and those of the agent."""
        self.present_elsewhere: Callable[[], int] = lambda: 0
        """Environments of actors in other processes that are there."""
        self.present = 0
        """Environments that are there, as far as this process knows."""
        self.begun = False
        """Whether the environments that the run expects were there."""
        self.pretraining = False
        """Whether the learner still makes updates that come before the first step."""
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
        return not self.seconds_left() or not any(sending() for sending in self.senders)

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
            self.finished.set()
        return step

    def raise_to(self, step: int) -> None:
        """The replay holds so many steps; some of them may not be counted yet."""
        with self._lock:
            self._step = max(self._step, step)
        self.advance(0)

    def may_begin(self, present: int, expected: int) -> bool:
        """Whether the run acts, if so many environments of this actor are there, and it expects so
        many of all actors."""
        self.present = present + self.present_elsewhere()
        self.begun = self.begun or (self.present >= expected and not self.pretraining)
        return self.begun

    def finish(self) -> None:
        """The score is reached."""
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


@contextmanager
def hang_up_in_time(
    progress: Progress, logger: LoggerClient, replay: ReplayClient
) -> Iterator[None]:
    """While the block runs: close the clients when the end may not wait for their servers any
    longer. Every call that waits then fails with `Closed`. The end never waits for a logger that
    answers nothing."""
    done = threading.Event()

    def watch() -> None:
        progress.finished.wait()
        while not done.wait(min(POLL_SECONDS, progress.seconds_left())):
            # Steps may wait for the logger, so that one that is silent leaves time for the replay.
            logger.give_up_if_silent(_END_SECONDS / 2 if progress.stopped else _END_SECONDS)
            if not progress.seconds_left():
                logger.close(0.0)
                replay.close(0.0)
                return

    threading.Thread(target=watch, name="end", daemon=True).start()
    try:
        yield
    finally:
        done.set()


# --- acting, learning and the replay in step ------------------------------------------------------


def limiter_for(args: RunConfig) -> SamplesPerInsert:
    """The limiter of a run: `train_ratio` replayed steps for each step collected.

    The least size makes sure that there is a sequence to sample: with so many steps in so many
    streams at least one stream is long enough.
    """
    if args.offline:  # nothing is collected that learning could be held in step with
        return SamplesPerInsert(ratio=0.0, tolerance=1.0, minsize=1)
    return SamplesPerInsert(
        ratio=args.train_ratio / args.batch_length,
        tolerance=args.limiter_tolerance,
        minsize=max(args.host_batch, args.envs) * args.window,
        # As much as the learner may be ahead: one that keeps up is exactly where it should be.
        debt=args.limiter_tolerance if args.catch_up else None,
    )
