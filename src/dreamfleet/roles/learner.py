"""The learner role: trains on what the replay sends."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import numpy as np

from dreamfleet.agents.api import Agent, compile_policy, memory, trace
from dreamfleet.clock import GlobalClock, LocalClock, Round
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.formatting import readable
from dreamfleet.metrics import Aggregate, Timer, Usage
from dreamfleet.replay.replay import Mode
from dreamfleet.roles.health import STARTED, health_path
from dreamfleet.roles.logger_client import LoggerClient
from dreamfleet.roles.policy_batches import policy_sizes
from dreamfleet.roles.progress import Progress, hang_up_in_time, limiter_for
from dreamfleet.roles.runtime import POLL_SECONDS
from dreamfleet.roles.saver import Saver
from dreamfleet.roles.scaling.parameters import serve_parameters
from dreamfleet.roles.scaling.shards import ReplayClient, Reply
from dreamfleet.roles.scaling.sync import Sync
from dreamfleet.transport import Client, Closed, TransportError

log = logging.getLogger(__name__)

_CONFIRM_SECONDS = 0.02  # between two looks whether all steps are confirmed
_BATCH_SECONDS = 0.1  # after which a learner without a batch does what else is due
_FLUSH_SECONDS = 5.0
_IN_FLIGHT = 8  # calls to a shard without a reply, most of them updates
_AHEAD = 2  # batches that are requested before they are needed
_MESSAGES_ON_THEIR_WAY = 4  # from an actor at most
_COMPILING = (
    "the learner is compiling the agent; the first time takes 20 s with a small model and minutes "
    "with a large one"
)
_TRACE_FROM, _TRACED = 5, 5
"""Updates before those of which the agent writes a profile, and how many these are."""


def parallel_learner(
    agent: Agent,
    barrier: threading.Barrier,
    args: RunConfig,
    progress: Progress | None = None,
    sync: Sync | None = None,
) -> None:
    """Restore, release the actor, train until learning is over, and save. The agent and the
    progress are shared with the actor; `sync` is None if this is the only host."""
    progress = progress or Progress(args.steps)
    with (
        ReplayClient(args, "learner", _IN_FLIGHT) as replay,
        LoggerClient(args, "learner-logger", 8) as logger,
        closing(Saver(agent, args, progress, replay, logger, sync)) as saver,
    ):
        learner = Learner(agent, args, progress, saver, replay, logger, sync)
        learner.restore()  # parameters, updates, positions
        policy_first = learner.prepare()
        learner.pretrain()
        with serve_parameters(agent, args, progress, saver) as learner.publish:
            barrier.wait()  # the actor acts from here on
            if policy_first:
                learner.compile(policy=False)
            with progress.preparing:
                progress.prepared = True
            with hang_up_in_time(progress, logger, replay):
                learner.run()
                saver.save()
                with suppress(TransportError):
                    # The reply to a later call: the last metrics have arrived.
                    logger.status().wait(_FLUSH_SECONDS)


class Learner:
    """The training loop."""

    def __init__(
        self,
        agent: Agent,
        args: RunConfig,
        progress: Progress,
        saver: Saver,
        replay: ReplayClient,
        logger: Client,
        sync: Sync | None = None,
    ) -> None:
        self._agent, self._args, self._progress = agent, args, progress
        self._saver, self._replay, self._logger = saver, replay, logger
        self._health = saver.health
        self._sync = sync or Sync()
        self.publish: Callable[[], None] = lambda: None
        """Offers the parameters to actors in other processes."""
        self._voted_steps = 0  # in the last round
        self._ending = self._stopping = self._learned = self._too_little = False
        self._needed = 0  # updates in all, once the run ends
        self._finishing: tuple[Reply, bool] | None = None  # and whether all was sent before
        self._may_finish = LocalClock(POLL_SECONDS, first=True)
        self.aggregate = Aggregate()
        """Metrics of the updates since the last ones were logged."""
        self._timer, self._usage = Timer(), Usage()
        self._carry: Any = None
        self._results: tuple[Any, Any] | None = None  # of the last update
        self._written: deque[Reply] = deque()  # states that are on their way to the replay
        self._since = (time.monotonic(), 0, 0)
        self._tracing, self._made = ExitStack(), 0  # a profile, and updates for it

    def run(self) -> None:
        """Train until learning is over."""
        with closing(BatchQueue(self._agent.stream(self._batches()))) as batches:
            for agreed in self._rounds(batches):  # in which all hosts decide alike
                train = agreed.all("ready")
                with self._tolerant():
                    if train:
                        self.update(batches.take())
                    if self._progress.pretraining and (
                        not train or self._saver.updates >= self._args.pretrain
                    ):
                        self.pretrain()
                    if agreed.due("log"):
                        self.log(waiting=not train)
                    if agreed.due("report"):
                        self.report()
                    if agreed.due("save"):
                        with self._timer.section("save"):
                            self._saver.save(wait=False)
                    if agreed.due("round"):
                        self._saver.save(pending=True, wait=False)
                    self._saver.finish(wait=False)
        self._progress.wait_no_longer()
        with self._tolerant():
            self.process()
            self.end_trace()
            self.log()

    def update(self, batch: Mapping[str, Any]) -> None:
        """Train on a batch; `process` takes its results, now or with the next update."""
        if self._args.profile:
            self._trace()
        with self._timer.section("train"):
            if self._carry is None:
                self._carry = self._agent.init_train(self._args.host_batch)
            self._carry, outs, metrics = self._agent.train(self._carry, batch)
            self._saver.updates += 1
            self._health.stepped(1)
            if self._args.offline:
                self._progress.advance(1)
            # Reading results waits for them: those of the step before are done by now, while this
            # one is under way.
            self.process()
            self._results = outs, metrics
        self._saver.note_end()
        self.publish()

    def process(self) -> None:
        """Send the states of the last batch back to the replay, and aggregate its metrics."""
        if self._results is None:
            return
        (outs, metrics), self._results = self._results, None
        if "replay" in outs:
            states = {key: np.asarray(value) for key, value in outs["replay"].items()}
            self._written.append(self._replay.update(states))
            # An agent whose states are refused ends, rather than learns from older ones.
            while self._written and self._written[0].done():
                self._written.popleft().result()
        self.aggregate.add(metrics)

    # --- before the first update -----------------------------------------------------------------

    def restore(self) -> None:
        """Wait for the replay, and go on from the newest checkpoint."""
        where = (
            ", which 'dreamfleet role replay' starts elsewhere" if self._args.remote_replay else ""
        )
        self._health.waits(f"the learner waits for the replay{where}")
        restored = self._saver.restore()
        log.info("The agent is %s", restored)
        self._logger.add(self._progress.step, {"learner/start": restored})

    def prepare(self) -> bool:
        """Compile what is needed to act; returns whether the rest is still to be compiled.
        Environments of a run that is under way do not wait until training is compiled."""
        started = health_path(self._args, STARTED).exists()
        if policy_first := started and hasattr(self._agent, "compile_policy"):
            self._health.waits(_COMPILING)
            compile_policy(self._agent, policy_sizes(self._args))
        else:
            self.compile()
        return policy_first

    def pretrain(self) -> bool:
        """Whether the next update comes before the first step of the run; the replay lets it be
        made. Called again while there is no batch, because the replay may be restarted."""
        args, progress, before = self._args, self._progress, self._progress.pretraining
        left = args.pretrain - self._saver.updates
        progress.pretraining = left > 0 and not progress.step and not progress.finished.is_set()
        if not progress.pretraining:
            if before:  # a run that has begun does not make them again
                self._saver.save(wait=False)
            return False
        self._report_health()
        try:
            if not self._replay.grant(left * args.host_batch).result():
                self._health.give_up()
                raise ConfigError(
                    f"pretrain={args.pretrain} needs {limiter_for(args).minsize} steps in prefill, "
                    "which holds fewer: add sources, or lower batch_size or batch_length."
                )
        except TransportError as error:  # the replay restarts
            log.debug("The replay did not get the request for updates: %s", error)
        return True

    def compile(self, *, policy: bool = True) -> None:
        """Get ready to train, and to act if the `policy` is not ready yet."""
        if not self._progress.finished.is_set() or self._owed(self._progress.step):
            self._health.waits(_COMPILING)
            try:
                self._agent.compile(
                    batch_size=self._args.host_batch,
                    batch_length=self._args.batch_length,
                    report_length=self._args.report_window if self._args.report_every else None,
                    policy_batches=policy_sizes(self._args) if policy else (),
                )
            except ConfigError:
                self._health.give_up()
                raise
            if needed := memory(self._agent):
                text = _memory_in_words(needed)
                self._logger.add(self._progress.step, {"learner/memory": text})
        self._report_health()
        self._since = (time.monotonic(), self._saver.updates, self._progress.step)

    def _report_health(self, *, waiting: bool = False) -> None:
        """Record what the run waits for, as far as the learner knows."""
        made, text = self._saver.updates, ""
        if self._progress.pretraining:
            of = f"{made} of {self._args.pretrain}"
            text = f"the learner has made {of} updates before the run acts (pretrain)"
        elif self._ending and self.updates_left():
            text = f"the learner makes the last {self.updates_left()} updates (train_ratio)"
        elif waiting:
            text = "the learner waits for a batch from the replay"
        self._health.waits(text)

    def _await_hosts(self) -> None:
        """Wait until all hosts have compiled."""

        def on_wait(missing: list[int]) -> None:
            names = " and ".join(f"host {index}" for index in missing)
            verb = "is" if len(missing) == 1 else "are"
            self._health.waits(f"the learner waits for {names}, which {verb} compiling")

        self._sync.gather("compiled", {}, on_wait)
        self._report_health()

    # --- rounds ----------------------------------------------------------------------------------

    def _rounds(self, batches: BatchQueue) -> Iterator[Round]:
        """A round before each update, until learning is over."""
        self._await_hosts()
        every = {"log": self._args.log_every, "report": self._args.report_every}
        clock = GlobalClock(every, self._sync.channel("round"))
        while True:
            with self._timer.section("wait"):
                ready = batches.ready()
            agreed = clock(ready=ready, **self._vote())
            if self._apply_round(agreed):
                return
            if self._learned:
                time.sleep(_CONFIRM_SECONDS)
            else:
                yield agreed

    def _vote(self) -> dict[str, Any]:
        """What the hosts decide from, as this one knows it. When to log, report, save and evaluate,
        host 0 decides."""
        saver, progress = self._saver, self._progress
        self._voted_steps = progress.own
        return {
            "save": saver.is_due(),
            "round": not self._ending and saver.round_is_due(),
            "steps": self._voted_steps + saver.offset,
            "finished": progress.finished.is_set(),
            "stop": progress.stopped or progress.error is not None,
            "sent": progress.finished.is_set() and progress.sent,
            "too little": self._too_little,
        }

    def _apply_round(self, agreed: Round) -> bool:
        """Do what all hosts do now; returns whether learning is over.

        Nothing else than the round decides here, because all have to decide alike.
        """
        args, progress, total = self._args, self._progress, agreed.total("steps")
        progress.elsewhere = total - self._voted_steps
        enough = 0 < args.steps <= total
        if agreed.any("stop"):
            if not self._stopping and progress.error is None:
                progress.stop()
            self._stopping = True
        elif (enough or agreed.any("finished")) and not self._ending:
            progress.finish()
            self.begin_end(total)
        if not (self._ending or self._stopping):
            return False
        enough = self._saver.updates >= self._needed or agreed.any("too little")
        self._learned = self._stopping or enough
        over = self._learned and agreed.all("sent")
        if not over:
            self.finish_replay()
        return over

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        """The block may lose its servers, if the run ends and does not wait for them."""
        try:
            yield
        except TransportError as error:
            if self._progress.seconds_left() == float("inf"):
                raise
            log.warning("The agent is saved although other processes are away: %s", error)

    # --- the end ---------------------------------------------------------------------------------

    def begin_end(self, steps: int) -> None:
        """The actors stop after so many steps: note how many updates are missing to these. Hosts
        make as many as the one that owes most; they may have different numbers of environments."""
        self._ending = True
        self._needed = self._saver.updates + self._sync.most("owed", self._owed(steps))
        self._report_health()

    def updates_left(self) -> int:
        """How many updates are to be made before a run that is complete is saved."""
        stopped = self._progress.stopped or self._progress.error is not None
        return 0 if stopped else max(0, self._needed - self._saver.updates)

    def finish_replay(self) -> None:
        """Let the replay take the steps that are left, and give the batches that are missing; again
        and again, because it may be restarted. Does not wait for its reply."""
        if self._finishing is not None and self._finishing[0].done():
            (reply, sent), self._finishing = self._finishing, None
            try:
                self._too_little = sent and not reply.result()
            except TransportError as error:
                log.debug("The replay did not confirm the end: %s", error)
        if self._finishing is not None or not self._may_finish():
            return
        sequences, sent = self.updates_left() * self._args.host_batch, self._progress.sent
        with self._tolerant():
            self._finishing = self._replay.finish(sequences), sent

    def _owed(self, steps: int) -> int:
        """Updates that `train_ratio` asks for and that were not made, because nothing was trained
        before the replay held enough steps, and because it takes those that are on their way
        without a wait. No more than that: a run does not make up for updates that were lost with
        their parameters, nor for the time before its ratio was raised."""
        args = self._args
        if args.offline or args.train_ratio <= 0 or not args.catch_up:
            return 0
        if not 0 < args.steps <= steps:  # it ended at its target score
            return 0
        asked = int(args.train_ratio * steps / (args.batch_size * args.batch_length))
        asked += args.pretrain
        limiter = limiter_for(args)
        sent = _MESSAGES_ON_THEIR_WAY * args.actors * args.message_steps
        held = limiter.ratio * (limiter.minsize + limiter.tolerance + sent) + limiter.debt
        most = int(held / args.host_batch) + _AHEAD
        return max(0, min(asked - self._saver.updates, most))

    # --- batches, profiles, metrics --------------------------------------------------------------

    def _batches(self) -> Iterator[dict[str, Any]]:
        """Training batches from the replay, until learning is over."""
        with suppress(Closed):
            while True:
                yield self._replay.sample("train")

    def _trace(self) -> None:
        """Let the agent write a profile of a few updates, after the first ones."""
        if self._made == _TRACE_FROM:
            self._tracing.enter_context(trace(self._agent, self._args.logdir / "profile" / "jax"))
        elif self._made == _TRACE_FROM + _TRACED:
            self.end_trace()
        self._made += 1

    def end_trace(self) -> None:
        """Have a profile that is being made written, however few updates it holds."""
        self._tracing.close()

    def log(self, *, waiting: bool = False) -> None:
        """Tell the logger how learning is doing, which may be `waiting` for a batch."""
        self._report_health(waiting=waiting)
        if self._args.actors > 1:
            self._saver.newest_position()
        now, updates, steps = time.monotonic(), self._saver.updates, self._progress.step
        seconds, trained, collected = (
            new - old for new, old in zip((now, updates, steps), self._since, strict=True)
        )
        self._since = now, updates, steps
        batch = self._args.batch_size * self._args.batch_length
        rate = trained / max(seconds, 1e-9)
        metrics: dict[str, Any] = {
            **self.aggregate.result(prefix="train"),
            "learner/updates": float(updates),
            "learner/updates_per_second": rate,
            "learner/steps_per_second": rate * batch,
            "learner/env_steps_per_second": collected / max(seconds, 1e-9),
            # Of the whole run, so also of the steps before the first update.
            "learner/replay_ratio": updates * batch / max(steps, 1),
            **{f"learner/timer/{key}": value for key, value in self._timer.stats().items()},
            **{f"learner/usage/{key}": value for key, value in self._usage.stats().items()},
        }
        self._logger.add(steps, _sendable(metrics))

    def report(self) -> None:
        """What the agent reports about training and evaluation data, as far as there is any."""
        with self._timer.section("report"):
            modes: tuple[Mode, ...] = ("report", "eval")
            for mode in modes:
                carry = self._agent.init_report(self._args.host_batch)
                aggregate = Aggregate()
                for _ in range(self._args.report_batches):
                    batch = {} if self._progress.stopped else self._replay.sample(mode)
                    if not self._sync.agree("report", bool(batch)):
                        break
                    carry, metrics = self._agent.report(carry, batch)
                    aggregate.add(metrics)
                if found := aggregate.result(prefix=mode):
                    self._logger.add(self._progress.step, _sendable(found))


class BatchQueue:
    """Batches that a thread waits for: the next one while the learner trains on the one before."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._thread = ThreadPoolExecutor(1, "learner-batches")
        self._next = self._request()

    def ready(self) -> bool:
        """Whether there is a batch; waits a moment for it. There is none after the last one."""
        return bool(wait([self._next], _BATCH_SECONDS).done) and self._next.result() is not None

    def take(self) -> Any:
        """The batch that is ready."""
        batch, self._next = self._next.result(), self._request()
        return batch

    def _request(self) -> Future[Any]:
        return self._thread.submit(next, self._batches, None)

    def close(self) -> None:
        self._thread.shutdown(wait=False)


def _sendable(metrics: dict[str, Any]) -> dict[str, Any]:
    plain = (bool, int, float, str)
    return {k: v if isinstance(v, plain) else np.asarray(v) for k, v in metrics.items()}


def _memory_in_words(needed: Mapping[str, float]) -> str:
    """What training needs, for the status."""
    parts = ("parameters", "optimizer", "activations")
    words = ", ".join(f"{name} {readable(needed[name])}B" for name in parts if name in needed)
    whole = f"; a step {readable(needed['step'])}B" if "step" in needed else ""
    return f"{words}{whole} of {readable(needed['limit'])}B on each device, as compiled"
