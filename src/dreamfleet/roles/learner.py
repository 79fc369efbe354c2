"""The learner role: trains on what the replay sends."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dreamfleet.agents.api import Agent
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.clock import GlobalClock
from dreamfleet.config import RunConfig
from dreamfleet.metrics import Aggregate, Timer, Usage
from dreamfleet.policy import BLUEPRINT, Blueprint, find_checkpoint
from dreamfleet.roles.padding import policy_sizes
from dreamfleet.roles.progress import Progress
from dreamfleet.roles.streams import LOOK_AHEAD, RemoteStream
from dreamfleet.transport import Client, Closed, Disconnected, TransportError

log = logging.getLogger(__name__)

_FIRST_PATIENCE = 3600.0
_CONNECT_SECONDS, _POSITION_SECONDS = 1.0, 10.0
_NEWS_PATIENCE = 2.0
_LAST_WORDS_SECONDS = 10.0


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
    keys = args.run_keys
    with (
        Client(args.replay_addr, "learner-samples", LOOK_AHEAD, keys=keys) as samples,
        Client(args.replay_addr, "learner-reports", 2 * LOOK_AHEAD, keys=keys) as reports,
        Client(args.replay_addr, "learner-updates", 4, keys=keys) as updates,
        Client(args.logger_addr, "learner-logger", 8, keys=keys) as logger,
    ):
        keeper = Keeper(agent, args, progress, updates)
        learning = Learning(agent, args, progress, keeper, reports, updates, logger)
        learning.prepare()
        barrier.wait()
        progress.when_learning_is_over(samples.close)
        learning.run(samples)
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

    def restore(self) -> str:
        """Load the newest whole checkpoint of this run, or else what the run starts from; returns
        what was done."""
        self._find_replay()
        self._position = self._replay.position().result()
        step = saved = 0
        restored = "starting anew"
        snapshot = self._checkpoint.load()
        if snapshot is not None:
            self._agent.load(snapshot.parts["agent"])
            step = snapshot.step
            saved = int(snapshot.parts["replay"]["steps"])
            self.updates = int(snapshot.parts["run"]["updates"])
            restored = f"going on from {snapshot.path}"
        elif self._args.from_checkpoint:
            restored = self._start_from(Path(self._args.from_checkpoint))
        since = int(self._position["steps"]) - saved
        if since < 0:
            log.warning(
                "The replay holds %d steps less than this checkpoint has seen; the run goes on "
                "without them.",
                -since,
            )
        self._progress.restore(step + max(0, since))
        self._offset = self._progress.step - int(self._position["steps"])
        return restored

    def _start_from(self, path: Path) -> str:
        snapshot = find_checkpoint(path, ["agent"])
        regex = self._args.from_checkpoint_regex or None
        self._agent.load(snapshot.parts["agent"], regex)
        names = sorted(self._agent.save())
        loaded = [name for name in names if regex is None or re.match(regex, name)]
        for name in names:
            log.info("%s: %s", "loaded" if name in set(loaded) else "not loaded", name)
        rest = f"; not loaded: {_summary(set(names) - set(loaded))}" if regex else ""
        return (
            f"starting from {snapshot.path}, loaded {len(loaded)} of {len(names)} entries: "
            f"{_summary(set(loaded))}{rest}"
        )

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
        # Without environments updates are counted, which the replay knows nothing of.
        stored = self._offset + int(position["steps"])
        step = self._progress.step if self._args.offline else stored
        parts: dict[str, dict[str, Any]] = {
            "agent": self._agent.save(),
            "run": {"updates": self.updates},
            "replay": position,
            "logger": {"step": step},
            BLUEPRINT: Blueprint.of(self._agent, self._args).save(),
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
        reports: Client,
        updates: Client,
        logger: Client,
    ) -> None:
        self._agent, self._args, self._progress = agent, args, progress
        self._keeper, self._updates, self._logger = keeper, updates, logger
        self._aggregate, self._timer, self._usage = Aggregate(), Timer(), Usage()
        self._reports = {mode: RemoteStream(reports, mode) for mode in ("report", "eval")}
        self._since = (time.monotonic(), 0, 0)

    def prepare(self) -> None:
        """Restore and compile: all that has to be done before data is collected."""
        restored = self._keeper.restore()
        log.info("The agent is %s", restored)
        self._tell("learner/start", restored)
        compiling = getattr(self._agent, "compile", None)
        if compiling is not None and not self._progress.finished.is_set():
            self._tell("learner/state", "compiling the agent, which may take minutes")
            compiling(
                batch_size=self._args.batch_size,
                batch_length=self._args.batch_length,
                report_length=self._args.report_length if self._args.report_every else None,
                policy_batches=policy_sizes(self._args),
            )
        self._tell("learner/state", "waiting for enough data to train on")
        self._since = (time.monotonic(), self._keeper.updates, self._progress.step)

    def _tell(self, key: str, text: str) -> None:
        """News for the person at once, if the logger is there to pass them on."""
        self._logger.add(self._progress.step, {key: text}).wait(_NEWS_PATIENCE)

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
                if args.offline:
                    self._progress.advance(1)
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
        # An answer to a later question: the last metrics have arrived before the line is closed.
        self._logger.status().wait(_LAST_WORDS_SECONDS)

    def _batches(self, samples: Client) -> Iterator[dict[str, Any]]:
        """Training batches from the replay."""
        stream = RemoteStream(samples, "train")
        while True:
            try:
                batch = stream.take()
            except Closed:
                if self._progress.learning_over:
                    return
                raise
            assert batch is not None, "the replay waits until there is enough to train on"
            yield batch

    def _take(self, outs: dict[str, Any], metrics: dict[str, Any]) -> None:
        """Send the states of a trained batch back to the replay, and keep its metrics."""
        if "replay" in outs:
            states = {key: np.asarray(value) for key, value in outs["replay"].items()}
            self._updates.update(states)
        self._aggregate.add(metrics)

    def _log(self) -> None:
        now, updates, steps = time.monotonic(), self._keeper.updates, self._progress.step
        seconds, trained, collected = (
            new - old for new, old in zip((now, updates, steps), self._since, strict=True)
        )
        self._since = now, updates, steps
        batch = self._args.batch_size * self._args.batch_length
        rate = trained / max(seconds, 1e-9)
        metrics: dict[str, Any] = {
            **self._aggregate.result(prefix="train"),
            "learner/updates": float(updates),
            "learner/updates_per_second": rate,
            "learner/steps_per_second": rate * batch,
            "learner/env_steps_per_second": collected / max(seconds, 1e-9),
            # Of the whole run: what was trained on of each step, with the wait for enough data.
            "learner/replay_ratio": updates * batch / max(steps, 1),
            **{f"learner/timer/{key}": value for key, value in self._timer.stats().items()},
            **{f"learner/usage/{key}": value for key, value in self._usage.stats().items()},
        }
        if updates:
            metrics["learner/state"] = "training"
        if age := getattr(self._agent, "metrics", None):
            metrics |= {f"actor/{key}": value for key, value in age().items()}
        self._logger.add(steps, _sendable(metrics))

    def _report(self) -> None:
        """What the agent says about training and evaluation data, as far as there is any."""
        for mode, stream in self._reports.items():
            carry = self._agent.init_report(self._args.batch_size)
            aggregate = Aggregate()
            for _ in range(self._args.report_batches):
                if (batch := stream.take()) is None:
                    break
                carry, metrics = self._agent.report(carry, batch)
                aggregate.add(metrics)
            if found := aggregate.result(prefix=mode):
                self._logger.add(self._progress.step, _sendable(found))


def _sendable(metrics: dict[str, Any]) -> dict[str, Any]:
    plain = (bool, int, float, str)
    return {k: v if isinstance(v, plain) else np.asarray(v) for k, v in metrics.items()}


def _summary(names: set[str]) -> str:
    """How many entries there are of each part of the agent: `params/actor (4)`."""
    parts = Counter("/".join(name.split("/")[:2]) for name in names)
    return ", ".join(f"{part} ({count})" for part, count in sorted(parts.items())) or "none"
