"""The learner role: trains on what the replay sends."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dreamfleet.agent.api import Agent
from dreamfleet.checkpoint import Checkpoint, read_checkpoint
from dreamfleet.clock import GlobalClock
from dreamfleet.config import RunConfig
from dreamfleet.metrics import Aggregate, Timer, Usage
from dreamfleet.roles.progress import Progress
from dreamfleet.transport import Client, Closed, Disconnected, TransportError

log = logging.getLogger(__name__)

_LOOK_AHEAD = 2
_FIRST_PATIENCE = 3600.0
_CONNECT_SECONDS, _POSITION_SECONDS = 1.0, 10.0


def parallel_learner(
    agent: Agent, barrier: threading.Barrier, args: RunConfig, progress: Progress | None = None
) -> None:
    """Restore, release the actor, then train until learning is over, and save.

    Args:
        agent: Shared with the actor.
        barrier: Releases the actor once the checkpoint is restored.
        args: Addresses, intervals, where checkpoints lie.
        progress: Shared with the actor; None if there is none.
    """
    progress = progress or Progress(args.steps)
    with (
        Client(args.replay_addr, "learner-samples", _LOOK_AHEAD, keys=args.run_keys) as samples,
        Client(args.replay_addr, "learner-updates", 4, keys=args.run_keys) as updates,
        Client(args.logger_addr, "learner-logger", 8, keys=args.run_keys) as logger,
    ):
        keeper = Keeper(agent, args, progress, updates)
        keeper.restore()
        barrier.wait()
        progress.when_learning_is_over(samples.close)
        Learning(agent, args, progress, keeper, updates, logger).run(samples)
        keeper.save()


class Keeper:
    """Saves and restores the agent, with how far the run is.

    The manifest names the replay's position beside the agent's. Steps that came into the replay
    after a checkpoint are still there when the agent goes back to it, so they are counted.
    """

    def __init__(self, agent: Agent, args: RunConfig, progress: Progress, replay: Client) -> None:
        self._agent, self._args, self._progress = agent, args, progress
        self._replay = replay
        self._checkpoint = Checkpoint(args.logdir / "ckpt" / "agent", keep=2)
        self._position: dict[str, Any] = {}
        self._offset = 0  # steps of the run that the replay has not counted
        self.updates = 0

    def restore(self) -> None:
        """The newest whole checkpoint of this run, or else what the run starts from."""
        self._find_replay()
        self._position = self._replay.position().result()
        step = saved = 0
        snapshot = self._checkpoint.load()
        if snapshot is not None:
            self._agent.load(snapshot.parts["agent"])
            step = snapshot.step
            saved = int(snapshot.parts["replay"]["steps"])
            self.updates = int(snapshot.parts["run"]["updates"])
            log.info("Going on from %s", snapshot.path)
        elif self._args.from_checkpoint:
            path = Path(self._args.from_checkpoint)
            path = Checkpoint(path).latest() or path
            state = read_checkpoint(path, ["agent"]).parts["agent"]
            self._agent.load(state, self._args.from_checkpoint_regex or None)
            log.info("Starting from %s", path)
        since = int(self._position["steps"]) - saved
        if since < 0:
            log.warning(
                "The replay holds %d steps less than this checkpoint has seen; the run goes on "
                "without them.",
                -since,
            )
        self._progress.restore(step + max(0, since))
        self._offset = self._progress.step - int(self._position["steps"])

    def _find_replay(self) -> None:
        """Wait for the replay, which somebody may start later, unless the run ends before."""
        deadline = time.monotonic() + _FIRST_PATIENCE
        while True:
            try:
                self._replay.connect(_CONNECT_SECONDS)
                return
            except Disconnected:
                if self._progress.finished.is_set() or time.monotonic() > deadline:
                    raise

    def save(self) -> None:
        position = self._newest_position()
        # Not the actor's count, which holds steps that are still on their way to the replay.
        step = self._offset + int(position["steps"])
        parts: dict[str, dict[str, Any]] = {
            "agent": self._agent.save(),
            "run": {"updates": self.updates},
            "replay": position,
            "logger": {"step": step},
        }
        self._checkpoint.save(parts, step=step)

    def _newest_position(self) -> dict[str, Any]:
        """The replay's position; the one before, if the replay is being started again."""
        try:
            self._replay.connect(_CONNECT_SECONDS)
            self._position = self._replay.position().result(_POSITION_SECONDS)
        except TransportError as error:
            log.warning("The checkpoint names an older position of the replay: %s", error)
        return self._position


class Learning:
    """The training loop."""

    def __init__(
        self,
        agent: Agent,
        args: RunConfig,
        progress: Progress,
        keeper: Keeper,
        updates: Client,
        logger: Client,
    ) -> None:
        self._agent, self._args, self._progress = agent, args, progress
        self._keeper, self._updates, self._logger = keeper, updates, logger
        self._aggregate, self._timer, self._usage = Aggregate(), Timer(), Usage()
        self._since = (time.monotonic(), keeper.updates)

    def run(self, samples: Client) -> None:
        args, timer = self._args, self._timer
        should_log = GlobalClock(args.log_every)
        should_report = GlobalClock(args.report_every)
        should_save = GlobalClock(args.save_every)
        carry = self._agent.init_train(args.batch_size)
        stream = self._agent.stream(self._batches(samples))
        previous: tuple[Any, Any] | None = None
        while True:
            with timer.section("wait"):
                batch = next(stream, None)
            if batch is None:
                break
            with timer.section("train"):
                carry, outs, metrics = self._agent.train(carry, batch)
                self._keeper.updates += 1
                # Reading results waits for them: those of the step before are done by now, while
                # this one is under way.
                if previous is not None:
                    self._take(*previous)
                previous = outs, metrics
            if should_log():
                self._log()
            if should_report():
                with timer.section("report"):
                    self._report()
            if should_save():
                with timer.section("save"):
                    self._keeper.save()
        if previous is not None:
            self._take(*previous)
        self._log()

    def _batches(self, samples: Client) -> Iterator[dict[str, Any]]:
        """Training batches from the replay, asked for ahead of their use."""
        asked = deque(samples.sample_batch_train() for _ in range(_LOOK_AHEAD))
        while True:
            try:
                batch = asked.popleft().result()
                asked.append(samples.sample_batch_train())
            except Closed:
                if self._progress.learning_over:
                    return
                raise
            yield batch

    def _take(self, outs: dict[str, Any], metrics: dict[str, Any]) -> None:
        """Send the states of a trained batch back to the replay, and keep its metrics."""
        if "replay" in outs:
            states = {key: np.asarray(value) for key, value in outs["replay"].items()}
            self._updates.update(states)
        self._aggregate.add(metrics)

    def _log(self) -> None:
        now = time.monotonic()
        then, updates = self._since
        self._since = now, self._keeper.updates
        batch = self._args.batch_size * self._args.batch_length
        rate = (self._keeper.updates - updates) / max(now - then, 1e-9)
        metrics = {
            **self._aggregate.result(prefix="train"),
            "learner/updates": float(self._keeper.updates),
            "learner/updates_per_second": rate,
            "learner/steps_per_second": rate * batch,
            **{f"learner/timer/{key}": value for key, value in self._timer.stats().items()},
            **{f"learner/usage/{key}": value for key, value in self._usage.stats().items()},
        }
        self._logger.add(self._progress.step, _sendable(metrics))

    def _report(self) -> None:
        """What the agent says about training and evaluation data, as far as there is any."""
        for mode in ("report", "eval"):
            carry = self._agent.init_report(self._args.batch_size)
            aggregate = Aggregate()
            for _ in range(self._args.report_batches):
                batch = self._updates.call(f"sample_batch_{mode}").result()
                if not batch:
                    break
                carry, metrics = self._agent.report(carry, batch)
                aggregate.add(metrics)
            if found := aggregate.result(prefix=mode):
                self._logger.add(self._progress.step, _sendable(found))


def _sendable(metrics: dict[str, Any]) -> dict[str, Any]:
    plain = (bool, int, float, str)
    return {k: v if isinstance(v, plain) else np.asarray(v) for k, v in metrics.items()}
