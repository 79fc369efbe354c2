"""The learner role: trains on what the replay sends."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from dreamfleet.agents.api import Agent, Flat, compile_policy, memory, save_later, trace
from dreamfleet.checkpoint import Checkpoint, CheckpointError, Snapshot
from dreamfleet.clock import GlobalClock, LocalClock, Round
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.formatting import readable
from dreamfleet.metrics import Aggregate, Timer, Usage
from dreamfleet.policy import BLUEPRINT, Blueprint, find_checkpoint
from dreamfleet.roles.health import STARTED, Health, health_path
from dreamfleet.roles.hosts import Hosts
from dreamfleet.roles.logger_client import LoggerClient
from dreamfleet.roles.parameters import ParameterServer
from dreamfleet.roles.policy_batches import policy_sizes
from dreamfleet.roles.progress import Progress, hang_up_in_time
from dreamfleet.roles.rates import LOOK_AHEAD, most_owed
from dreamfleet.roles.shards import Homes, Reply, ShardedReplay, replay_client
from dreamfleet.transport import Client, Closed, Disconnected, TransportError

log = logging.getLogger(__name__)

ReplayClient = Client | ShardedReplay

SAVE_REQUEST = "save.request"
"""A file in the run's directory by which a person asks for a checkpoint."""
EARLY_SECONDS = 60.0
"""After the first update: when the first checkpoint is due. Later ones follow after longer and
longer times, up to `save_every`."""
_FIRST_TIMEOUT = 3600.0
_CONNECT_SECONDS, _POSITION_SECONDS, _SCORE_SECONDS = 1.0, 10.0, 2.0
_STATE_SECONDS = 2.0
_ENOUGH_DATA = "waiting for enough data to train on"
_UNKNOWN_STEP = -1  # for the logger, before the replay has said where the run is
_ROUND_SECONDS = 0.5
_LOOK_SECONDS = 0.5
_CONFIRM_SECONDS = 0.02  # between two looks whether all steps are confirmed
_BATCH_SECONDS = 0.1  # after which a learner without a batch does what else is due
_FLUSH_SECONDS = 10.0
_COMPILING = (
    "compiling the agent; the first time takes 20 s with a small model and minutes with a large one"
)
_TRACE_FROM, _TRACED = 5, 5
"""Updates before those of which the agent writes a profile, and how many these are."""


def parallel_learner(
    agent: Agent,
    barrier: threading.Barrier,
    args: RunConfig,
    progress: Progress | None = None,
    hosts: Hosts | None = None,
) -> None:
    """Restore, compile, release the actor, then train until learning is over, and save.

    An agent that is started again in the middle of a run acts as soon as its policy is ready, and
    compiles the rest meanwhile.

    Args:
        agent: Shared with the actor.
        barrier: Releases the actor once the checkpoint is restored.
        args: Addresses, intervals, where checkpoints lie.
        progress: Shared with the actor; None if there is none.
        hosts: Those that learn together; None if this is the only one.
    """
    progress = progress or Progress(args.steps)
    hosts = hosts or Hosts()
    homes = Homes()
    with (
        replay_client(args, "learner-samples", LOOK_AHEAD, homes) as samples,
        replay_client(args, "learner-reports", 2 * LOOK_AHEAD) as reports,
        replay_client(args, "learner-updates", 4, homes) as updates,
        LoggerClient(args, "learner-logger", 8) as logger,
    ):
        saver = Saver(agent, args, progress, updates, logger, hosts)
        learner = Learner(agent, args, progress, saver, reports, updates, logger, hosts=hosts)
        learner.restore()
        with ExitStack() as stack:
            parameters = None
            # Environments of a run that is under way need not wait until training is compiled.
            early = health_path(args, STARTED).exists() and hasattr(agent, "compile_policy")
            if not early:
                learner.compile()
            else:
                compile_policy(agent, policy_sizes(args))
            if args.actors > 1:
                parameters = ParameterServer(agent, args, progress, lambda: saver.updates)
                stack.enter_context(parameters)
            progress.acting = True
            barrier.wait()
            if early:
                learner.compile(policy=False)
            progress.prepared = True
            stack.enter_context(hang_up_in_time(progress, samples, reports, updates, logger))
            learner.run(samples, parameters)
            saver.save()


class Saver:
    """Saves and restores the agent.

    The replay owns the step counter (see `dreamfleet.positions`): an agent that goes back to a
    checkpoint resumes at the steps that the replay has stored by now. Updates after the checkpoint
    are lost with their parameters, and are not made up for.
    """

    def __init__(
        self,
        agent: Agent,
        args: RunConfig,
        progress: Progress,
        replay: ReplayClient,
        logger: Client,
        hosts: Hosts | None = None,
    ) -> None:
        self._agent, self._args, self._progress = agent, args, progress
        self._replay, self._logger = replay, logger
        self._hosts = hosts or Hosts()
        self._checkpoint = Checkpoint(args.checkpoints, keep=2)
        self._position: dict[str, Any] = {"steps": 0, "samples": 0}
        self._health = Health(health_path(args, "agent"))
        self._round = 0  # the step at which the last round of evaluation began
        self.round_may_begin: Callable[[], bool] = LocalClock(_ROUND_SECONDS, first=True)
        """Whether to look now if a round is due; looking reads files."""
        self._may_look = LocalClock(_LOOK_SECONDS, first=True)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._saved = 0  # updates
        self.updates = 0
        self.most_hosts = self._hosts.count
        """That this run ever had."""
        self.offset = 0
        """Several hosts: steps of the run that are not counted by the replay of any of them; below
        0 for those that two have counted."""

    def restore(self) -> str:
        """Load the newest complete checkpoint of this run, or else what the run starts from;
        returns what was done."""
        self._connect_to_replay()
        self._hosts.gather("ready", {})  # loading may be done by all devices together
        step = 0
        restored = "starting from scratch"
        snapshot = self._checkpoint.load()
        if snapshot is not None:
            self._agent.load(snapshot.parts["agent"])
            step, run = snapshot.step, snapshot.parts["run"]
            self.updates = self._saved = int(run["updates"])
            self._round = int(run.get("round", 0))
            counted = sum(name.startswith("steps/") for name in run)  # by hosts that saved it
            self.most_hosts = max(self.most_hosts, int(run.get("hosts", 0)), counted)
            restored = f"resuming from {snapshot.path}"
        elif self._args.from_checkpoint:
            restored = self._start_from(Path(self._args.from_checkpoint))
        if self._args.offline:  # there are no environment steps: updates are counted
            self._position = self._replay.position().result()
        else:
            known = step if self._hosts.count == 1 else 0
            self._position = self._replay.raise_position(known).result()
            step = int(self._position["steps"])
        if self._hosts.count > 1:
            self._count_together(step, snapshot)
        self._progress.restore(step)
        return restored

    def _count_together(self, stored: int, snapshot: Snapshot | None) -> None:
        """Several hosts: agree on the step of the run. It is that of the checkpoint, and what each
        host has stored since. A host that was away then has nothing new."""
        name = snapshot.path.name if snapshot else ""
        before = snapshot.parts["run"].get(f"steps/{self._hosts.index}", stored) if snapshot else 0
        said = self._hosts.gather(
            "restore", {"name": name, "stored": stored, "new": max(0, stored - before)}
        )
        if any(each["name"] != name for each in said):
            names = ", ".join(each["name"] or "none" for each in said)
            raise CheckpointError(
                f"Hosts do not find the same checkpoint in {self._args.checkpoints} ({names}): "
                "they need a directory that all of them share."
            )
        total = sum(each["new"] for each in said) + (snapshot.step if snapshot else 0)
        self._progress.elsewhere = total - stored
        if self._hosts.index == 0:
            self.offset = total - sum(each["stored"] for each in said)

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

    def _connect_to_replay(self) -> None:
        """Wait for the replay, which somebody may start later, unless the run ends before."""
        deadline = time.monotonic() + _FIRST_TIMEOUT
        while True:
            try:
                self._replay.connect(_CONNECT_SECONDS)
                return
            except Disconnected:
                if self._progress.finished.is_set() or time.monotonic() > deadline:
                    raise

    @property
    def samples(self) -> int:
        """Samples that the replay has counted, as it has told last."""
        return int(self._position["samples"])

    def asked(self) -> bool:
        """Whether a person wants a checkpoint now, and has said so with a file."""
        if not self._may_look():
            return False
        try:
            (self._args.logdir / SAVE_REQUEST).unlink()
        except OSError:
            return False
        return True

    def begin_round(self) -> None:
        """Begin a round of evaluation if one is due: save a checkpoint that waits for its score."""
        if self.round_is_due():
            self.save(pending=True, wait=False)

    def round_is_due(self) -> bool:
        """Whether a round of evaluation is to begin now; answered once for each.

        A round that is due while another one is under way begins as soon as that one has ended.
        """
        every = self._args.eval_every
        if not every or self._progress.step // every <= self._round // every:
            return False
        if not self.round_may_begin() or self.in_round():
            return False
        # Steps that are stored, as a checkpoint counts them: some are still on their way.
        step = int(self._newest_position()["steps"]) + self._progress.elsewhere
        if step // every <= self._round // every:
            return False
        self._round = step
        return True

    def in_round(self) -> bool:
        """Whether a round is under way, or a checkpoint is being written that may begin one."""
        self.finish(wait=False)
        return self._writing is not None or self._checkpoint.pending() is not None

    @property
    def has_news(self) -> bool:
        """Whether the agent was trained since it was last saved."""
        return self.updates > self._saved

    def save(self, *, pending: bool = False, wait: bool = True) -> None:
        """Write a checkpoint, with the evaluation score that tells which one is the best.

        Args:
            pending: The score is found by a round of evaluation that begins with this checkpoint.
            wait: Return when it is written. Otherwise a thread writes it while the agent goes on
                learning; one at a time, so that there is one state beside the agent's at most.
        """
        self.finish()
        self._saved = self.updates
        position = self._newest_position()
        # Not the actor's count, which holds steps that are still on their way to the replay.
        step = self._progress.step if self._args.offline else int(position["steps"])
        parts: dict[str, dict[str, Any]] = {
            "run": {f"steps/{self._hosts.index}": step},
        }
        score = None
        if self._hosts.index == 0:  # the rest is the same on all hosts
            parts["run"] |= {"updates": self.updates, "round": self._round}
            parts["run"]["hosts"] = self.most_hosts
            parts["replay"] = position
            parts[BLUEPRINT] = Blueprint.of(self._agent, self._args).save()
            score = self._evaluation_score()
        self.note_end()
        if wait:  # all steps are looked at: NaN in the last one is an error
            parts = {"agent": self._agent.save(), **parts}
        state = None if wait else save_later(self._agent)
        step += self.offset
        self._writing = self._writer.submit(self._write, state, parts, step, score, pending)
        if wait:
            self.finish()

    def _write(
        self,
        state: Callable[[], Flat] | None,
        parts: dict[str, dict[str, Any]],
        step: int,
        score: float | None,
        pending: bool,
    ) -> None:
        if state is not None:
            parts = {"agent": state(), **parts}
        hosts = self._hosts
        self._checkpoint.save(
            parts,
            step=step,
            score=score,
            pending=pending,
            host=hosts.index,
            gather=hosts.meeting("checkpoint"),
        )
        self._health.progress()

    def finish(self, *, wait: bool = True) -> None:
        """Wait for the checkpoint that is being written, or only look whether it is done; raises
        what went wrong."""
        if self._writing is not None and (wait or self._writing.done()):
            writing, self._writing = self._writing, None
            writing.result()

    def note_end(self) -> None:
        """While the run ends: let the supervisor know that the end gets on."""
        if self._progress.finished.is_set():
            self._health.progress()

    def give_up(self) -> None:
        """Note that another start of the agent would not help."""
        self._health.give_up()

    def recount(self) -> None:
        """Count at least the steps that the replay holds: an actor of another process may have told
        a learner of them that was killed."""
        self._newest_position()

    def _newest_position(self) -> dict[str, Any]:
        """The replay's position; the last one known, if the replay is restarting."""
        try:
            self._replay.connect(_CONNECT_SECONDS)
            self._position = self._replay.position().result(_POSITION_SECONDS)
            if not self._args.offline:
                self._progress.raise_to(int(self._position["steps"]))
        except TransportError as error:
            log.warning("The checkpoint names an older position of the replay: %s", error)
        return self._position

    def _evaluation_score(self) -> float | None:
        """The mean score of recent evaluation episodes, if there are any."""
        may_be_there = self._args.eval_envs or self._args.bind
        if not may_be_there or self._args.eval_every:
            return None
        try:
            score = self._logger.status().result(_SCORE_SECONDS)["eval_score"]
        except TransportError as error:
            log.warning("The checkpoint has no evaluation score: %s", error)
            return None
        return None if score is None else float(score)


class Learner:
    """The training loop."""

    def __init__(
        self,
        agent: Agent,
        args: RunConfig,
        progress: Progress,
        saver: Saver,
        reports: ReplayClient,
        updates: ReplayClient,
        logger: Client,
        ahead: int = LOOK_AHEAD,
        hosts: Hosts | None = None,
    ) -> None:
        self._agent, self._args, self._progress = agent, args, progress
        self._saver, self._updates, self._logger = saver, updates, logger
        self._hosts = hosts or Hosts()
        self._voted_steps = 0  # in the last round of several hosts
        self._ending = self._stopping = self._learned = self._too_little = False
        self._needed = 0  # updates in all, once the run ends
        self._finishing: tuple[Reply, bool] | None = None  # and whether all was sent before
        self._may_finish = LocalClock(_LOOK_SECONDS, first=True)
        self.aggregate = Aggregate()
        """Metrics of the updates since the last ones were logged."""
        self._timer, self._usage = Timer(), Usage()
        self._reports = {mode: RemoteStream(reports, mode, ahead) for mode in ("report", "eval")}
        self._carry: Any = None
        self._results: tuple[Any, Any] | None = None  # of the last update
        self._written: deque[Reply] = deque()  # states that are on their way to the replay
        self._since = (time.monotonic(), 0, 0)
        self._tracing, self._made = ExitStack(), 0  # a profile, and updates for it
        self._should_save = LocalClock(args.save_every, early=EARLY_SECONDS)

    def restore(self) -> None:
        """Wait for the replay, and go on from the newest checkpoint."""
        self._show("learner/state", "waiting for the replay", step=_UNKNOWN_STEP)
        restored = self._saver.restore()
        log.info("The agent is %s", restored)
        self._show("learner/start", restored)

    def compile(self, *, policy: bool = True) -> None:
        """Get ready to train, and to act if the `policy` is not ready yet."""
        if not self._progress.finished.is_set() or self._owed(self._progress.step):
            self._show("learner/state", _COMPILING)
            try:
                self._agent.compile(
                    batch_size=self._args.host_batch,
                    batch_length=self._args.batch_length,
                    report_length=self._args.report_window if self._args.report_every else None,
                    policy_batches=policy_sizes(self._args) if policy else (),
                )
            except ConfigError:
                self._saver.give_up()
                raise
            if needed := memory(self._agent):
                self._show("learner/memory", _memory_in_words(needed))
        self._show("learner/state", _ENOUGH_DATA)
        self._since = (time.monotonic(), self._saver.updates, self._progress.step)

    def begin_end(self, steps: int) -> None:
        """The actors stop after so many steps: note how many updates are missing to these. Hosts
        make as many as the one that owes most; they may have different numbers of environments."""
        self._ending = True
        owed = self._hosts.gather("owed", {"updates": self._owed(steps)})
        self._needed = self._saver.updates + max(each["updates"] for each in owed)
        if self.updates_left():
            text = f"making the last {self.updates_left()} updates (train_ratio)"
            self._logger.add(steps, {"learner/state": text})

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
                log.debug("The replay has not heard of the end: %s", error)
        if self._finishing is not None or not self._may_finish():
            return
        # Another host may have more to make up for than this one's replay allows at once.
        batches, sent = min(self.updates_left(), most_owed(self._args)), self._progress.sent
        try:
            self._finishing = self._updates.finish(batches * self._args.host_batch), sent
        except TransportError as error:
            self._tolerate(error)

    def _owed(self, steps: int) -> int:
        """Updates that `train_ratio` asks for and that were not made, because nothing was trained
        before the replay held enough steps. No more than that: a run whose ratio was raised does
        not make up for the time before."""
        args = self._args
        if args.offline or args.train_ratio <= 0 or not args.catch_up:
            return 0
        if not 0 < args.steps <= steps:  # it ended at its target score
            return 0
        asked = int(args.train_ratio * steps / (args.batch_size * args.batch_length))
        hosts, before = self._hosts.count, self._saver.most_hosts
        # Each of the hosts, then and now, had a replay to fill.
        most = most_owed(args, fills=1.0 if before == hosts else 1.0 + before / hosts)
        return max(0, min(asked - self._saver.updates, most))

    def _show(self, key: str, text: str, step: int | None = None) -> None:
        """Send a text for the person at once, if the logger is there to pass it on."""
        at = self._progress.step if step is None else step
        self._logger.add(at, {key: text}).wait(_STATE_SECONDS)

    def run(self, samples: ReplayClient, parameters: ParameterServer | None = None) -> None:
        """Train until learning is over.

        Args:
            samples: For requests of training batches.
            parameters: Offers the parameters to actors in other processes, if there are any.
        """
        args, timer = self._args, self._timer
        every = {"log": args.log_every, "report": args.report_every}
        self._await_hosts()
        clock = GlobalClock(every, self._hosts.meeting("round"))
        batches = _looked_for(self._agent.stream(self._batches(samples)))
        batch: Any = None
        while True:
            if batch is None:
                with timer.section("wait"):
                    batch = next(batches, None)  # None as well when the end has closed the client
            agreed = clock(ready=batch is not None, **self._vote())
            if self._apply_round(agreed):
                break
            if self._learned:
                time.sleep(_CONFIRM_SECONDS)
                continue
            ready = batch is not None and agreed.all("ready")
            try:
                self._turn(agreed, batch if ready else None, parameters)
            except TransportError as error:
                self._tolerate(error)
            batch = None if ready else batch
        self._progress.wait_no_longer()
        try:
            self.process()
            self.end_trace()
            self.log()
            # A reply to a later call: the last metrics have arrived before the client is closed.
            self._logger.status().wait(_FLUSH_SECONDS)
        except TransportError as error:
            self._tolerate(error)

    def _turn(self, agreed: Round, batch: Any, parameters: ParameterServer | None) -> None:
        """Train on a batch, if all hosts have one, and do what is due."""
        if batch is not None:
            self.update(batch)
            self._saver.note_end()
            if parameters is not None:
                parameters.publish()
        if agreed.due("log"):
            self.log(waiting=batch is None)
        if agreed.due("report"):
            self.report()
        if agreed.due("save"):
            with self._timer.section("save"):
                self._saver.save(wait=False)
        self._saver.finish(wait=False)
        if agreed.due("round"):
            self._saver.save(pending=True, wait=False)

    def _tolerate(self, error: TransportError) -> None:
        """Raise the error, unless the run ends and does not wait for other processes."""
        if self._progress.seconds_left() == float("inf"):
            raise error
        log.warning("The agent is saved although other processes are away: %s", error)

    def _await_hosts(self) -> None:
        """Wait until all hosts have compiled."""

        waited = False

        def on_wait(missing: list[int]) -> None:
            nonlocal waited
            waited = True
            names = " and ".join(f"host {index}" for index in missing)
            verb = "is" if len(missing) == 1 else "are"
            self._show("learner/state", f"waiting for {names}, which {verb} compiling")

        self._hosts.gather("compiled", {}, on_wait)
        if waited:
            self._show("learner/state", _ENOUGH_DATA)

    def _vote(self) -> dict[str, Any]:
        """What the hosts decide from, as this one knows it."""
        saver, progress = self._saver, self._progress
        first, self._voted_steps = self._hosts.index == 0, progress.own
        return {
            "save": first and (saver.asked() or (saver.has_news and self._should_save())),
            "round": first and not self._ending and saver.round_is_due(),
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

    def _batches(self, samples: ReplayClient) -> Iterator[dict[str, Any]]:
        """Training batches from the replay, until learning is over."""
        stream = RemoteStream(
            samples, "train", known=self._saver.samples, batch=self._args.host_batch
        )
        while True:
            try:
                batch = stream.take()
            except Closed:
                return
            assert batch is not None, "the replay waits until there is enough to train on"
            yield batch

    def update(self, batch: Mapping[str, Any], *, at_once: bool = False) -> None:
        """Train on a batch; with `at_once` its results are there when this returns."""
        if self._args.profile:
            self._trace()
        with self._timer.section("train"):
            if self._carry is None:
                self._carry = self._agent.init_train(self._args.host_batch)
            self._carry, outs, metrics = self._agent.train(self._carry, batch)
            self._saver.updates += 1
            if self._args.offline:
                self._progress.advance(1)
            # Reading results waits for them: those of the step before are done by now, while this
            # one is under way.
            self.process()
            self._results = outs, metrics
            if at_once:
                self.process()

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

    def process(self) -> None:
        """Send the states of the last batch back to the replay, and aggregate its metrics."""
        if self._results is None:
            return
        (outs, metrics), self._results = self._results, None
        if "replay" in outs:
            states = {key: np.asarray(value) for key, value in outs["replay"].items()}
            self._written.append(self._updates.update(states))
            # An agent whose states are refused ends, rather than learns from older ones.
            while self._written and self._written[0].done():
                self._written.popleft().result()
        self.aggregate.add(metrics)

    def log(self, *, waiting: bool = False) -> None:
        """Tell the logger how learning is doing, which may be `waiting` for a batch."""
        if self._args.actors > 1:
            self._saver.recount()
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
            **{f"actor/{key}": value for key, value in self._agent.metrics().items()},
        }
        if updates:
            waits = "waiting for a batch from the replay"
            metrics["learner/state"] = waits if waiting else "training"
        self._logger.add(steps, _sendable(metrics))

    def report(self) -> None:
        """What the agent reports about training and evaluation data, as far as there is any."""
        with self._timer.section("report"):
            self._report()

    def _report(self) -> None:
        for mode, stream in self._reports.items():
            carry = self._agent.init_report(self._args.host_batch)
            aggregate = Aggregate()
            for _ in range(self._args.report_batches):
                batch = stream.take()
                ready = batch is not None and not self._progress.stopped
                said = self._hosts.gather("report", {"ready": ready})
                if batch is None or not all(each["ready"] for each in said):
                    break
                carry, metrics = self._agent.report(carry, batch)
                aggregate.add(metrics)
                if self._progress.stopped and self._hosts.count == 1:
                    return
            if found := aggregate.result(prefix=mode):
                self._logger.add(self._progress.step, _sendable(found))


def _looked_for(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches, and None for every moment in which there is none."""
    thread = ThreadPoolExecutor(1, "learner-batches")
    try:
        while True:
            wanted = thread.submit(next, batches, None)
            while not wait([wanted], _BATCH_SECONDS).done:
                yield None
            if (batch := wanted.result()) is None:
                return
            yield batch
    finally:
        thread.shutdown(wait=False)


class RemoteStream:
    """The batches of one of the replay's streams, requested ahead of their use.

    Nothing is requested before the first batch is wanted: what the replay has then is newer.

    Args:
        client: Of the replay.
        mode: Which of the streams.
        ahead: How many are requested, at least the one that is wanted.
        known: Samples that the replay has counted, if it counts those of this stream.
        batch: Samples in a batch.
    """

    def __init__(
        self,
        client: ReplayClient,
        mode: str,
        ahead: int = LOOK_AHEAD,
        known: int | None = None,
        batch: int = 0,
    ) -> None:
        self._client, self._ahead = client, ahead
        self._known, self._batch = known, batch
        self._method = f"sample_batch_{mode}"
        self._requested: deque[Reply] = deque()

    def take(self) -> dict[str, Any] | None:
        """The next batch; None if the replay has too little data for one."""
        while len(self._requested) < max(1, self._ahead):
            self._request()
        batch: dict[str, Any] = self._requested.popleft().result()
        if not batch:
            # Those requested at the same time are as empty, and would be stale by the next time.
            self._requested.clear()
            return None
        if self._ahead:
            self._request()
        return batch

    def _request(self) -> None:
        known = () if self._known is None else (self._known,)
        self._requested.append(self._client.call(self._method, *known))
        if self._known is not None:
            self._known += self._batch


def _sendable(metrics: dict[str, Any]) -> dict[str, Any]:
    plain = (bool, int, float, str)
    return {k: v if isinstance(v, plain) else np.asarray(v) for k, v in metrics.items()}


def _memory_in_words(needed: Mapping[str, float]) -> str:
    """What training needs, for a person."""
    parts = ("parameters", "optimizer", "activations")
    words = ", ".join(f"{name} {readable(needed[name])}B" for name in parts if name in needed)
    whole = f"; a step {readable(needed['step'])}B" if "step" in needed else ""
    return f"{words}{whole} of {readable(needed['limit'])}B on each device, as compiled"


def _summary(names: set[str]) -> str:
    """How many entries there are of each part of the agent: `params/actor (4)`."""
    parts = Counter("/".join(name.split("/")[:2]) for name in names)
    return ", ".join(f"{part} ({count})" for part, count in sorted(parts.items())) or "none"
