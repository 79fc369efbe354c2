"""The learner role: trains on what the replay sends."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
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
from dreamfleet.roles.actor import BEGAN, policy_sizes
from dreamfleet.roles.health import Health, health_path
from dreamfleet.roles.hosts import Hosts
from dreamfleet.roles.logger import LoggerClient
from dreamfleet.roles.parameters import ParameterServer
from dreamfleet.roles.progress import Progress
from dreamfleet.roles.replay import LOOK_AHEAD, limiter_for, most_owed
from dreamfleet.roles.shards import Homes, Reply, ShardedReplay, replay_client
from dreamfleet.transport import Client, Closed, Disconnected, TransportError

log = logging.getLogger(__name__)

ReplayClient = Client | ShardedReplay

SAVE_REQUEST = "save.request"
"""A file in the run's directory by which users ask for a checkpoint."""
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
_BATCH_SECONDS = 0.1  # after which a learner without a batch does what else is due
_END = object()  # of the batches
_FLUSH_SECONDS = 10.0
_COMPILING = (
    "compiling the agent; the first time takes 20 s with a small model and minutes with a large one"
)
_TRACE_FROM, _TRACED = 5, 5
"""Updates before those of which the agent writes a profile, and how many these are."""
_END_SECONDS = 20.0
"""After which finished learning waits no longer for other workers, and the agent is saved."""


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
            early = health_path(args, BEGAN).exists() and hasattr(agent, "compile_policy")
            if not early:
                learner.compile()
            else:
                compile_policy(agent, policy_sizes(args))
            if args.actors > 1:
                parameters = ParameterServer(agent, args, progress, lambda: saver.updates)
                stack.enter_context(parameters)
            learner.pretrain()
            progress.acting = True
            barrier.wait()
            if early:
                learner.compile(policy=False)
            progress.updates_left = learner.updates_left
            progress.prepared = True
            progress.on_learning_over(samples.close)
            stack.enter_context(_waiting_for_nobody(progress, reports, updates, logger))
            try:
                learner.run(samples, parameters)
            except TransportError as error:
                if not (progress.stopped or progress.learning_over):
                    raise
                log.warning("The agent is saved without replay or logger: %s", error)
            saver.save()


@contextmanager
def _waiting_for_nobody(progress: Progress, *clients: ReplayClient) -> Iterator[None]:
    """While the block runs: close these clients a while after learning is over, which ends all
    waits for servers that are away or do not answer."""
    over, done = threading.Event(), threading.Event()

    def watch() -> None:
        over.wait()
        if not done.wait(_END_SECONDS):
            for client in clients:
                client.close(0.0)

    progress.on_learning_over(over.set)
    threading.Thread(target=watch, name="learner-end", daemon=True).start()
    try:
        yield
    finally:
        done.set()
        over.set()


class Saver:
    """Saves and restores the agent.

    The replay owns the step counter (see `replay.positions`): an agent that goes back to a
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
        """Wait for the replay, which may be started later, unless the run ends before."""
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
        """Whether a file asks for a checkpoint now."""
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
        self._said_steps = 0  # in the last round of several hosts
        self._ending = self._stopping = self._too_little = False
        self.aggregate = Aggregate()
        """Metrics of the updates since the last ones were logged."""
        self._timer, self._usage = Timer(), Usage()
        self._reports = {mode: RemoteStream(reports, mode, ahead) for mode in ("report", "eval")}
        self._carry: Any = None
        self._results: tuple[Any, Any] | None = None  # of the last update
        self._written: deque[Reply] = deque()  # states that are on their way to the replay
        self._since = (time.monotonic(), 0, 0)
        self._tracing, self._made = ExitStack(), 0  # a profile, and updates for it
        self._asked = 0  # updates after which learning ends, once all steps are made
        self._should_save = LocalClock(args.save_every, early=EARLY_SECONDS)

    def restore(self) -> None:
        """Wait for the replay, and go on from the newest checkpoint."""
        self._show("learner/state", "waiting for the replay", step=_UNKNOWN_STEP)
        restored = self._saver.restore()
        log.info("The agent is %s", restored)
        self._show("learner/start", restored)

    def compile(self, *, policy: bool = True) -> None:
        """Get ready to train, and to act if the `policy` is not ready yet."""
        if not self._progress.finished.is_set() or self._missing():
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
        try:
            if not before:
                self._show("learner/state", f"making {left} updates before it acts (pretrain)")
            granted = self._updates.grant(left * args.host_batch)
            if granted.wait(_STATE_SECONDS) and not granted.result():
                self._saver.give_up()
                raise ConfigError(
                    f"pretrain={args.pretrain} needs {limiter_for(args).minsize} steps in prefill, "
                    "which holds fewer: add sources, or lower batch_size or batch_length."
                )
        except TransportError as error:  # the replay restarts
            log.debug("No updates were asked for: %s", error)
        return True

    def updates_left(self) -> int:
        """How many updates are missing to the train ratio, once the run has made all its steps; the
        replay lets them be made. Called again and again, because the replay may be restarted."""
        missing = self._missing()
        if not missing:
            return 0
        try:
            if not self._asked:
                self._asked = self._saver.updates + missing
                self._show("learner/state", f"making the last {missing} updates (train_ratio)")
            # Another host may have more to make up for than this one's replay grants at once.
            most = min(missing, most_owed(self._args))
            granted = self._updates.grant(most * self._args.host_batch)
            if granted.wait(_STATE_SECONDS) and not granted.result():
                return 0  # there is too little to train on
        except TransportError as error:  # the learner has ended just now, or the replay restarts
            log.debug("No updates were asked for: %s", error)
        return missing

    def _missing(self) -> int:
        """Updates that `train_ratio` asks for and that were not made, because nothing was trained
        before the replay held enough steps. No more than that: a run whose ratio was raised does
        not make up for the time before."""
        args, progress = self._args, self._progress
        if args.offline or args.train_ratio <= 0 or not args.catch_up:
            return 0
        if progress.stopped or progress.error is not None:
            return 0
        if self._asked:
            return max(0, self._asked - self._saver.updates)
        # Or it ended at its target score. With several hosts a round tells how many are asked for.
        if not 0 < args.steps <= progress.step or self._hosts.count > 1:
            return 0
        return self._owed(progress.step)

    def _owed(self, steps: int) -> int:
        """The same for a number of steps."""
        args = self._args
        asked = int(args.train_ratio * steps / (args.batch_size * args.batch_length))
        asked += args.pretrain
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
        args, timer, several = self._args, self._timer, self._hosts.count > 1
        every = {"log": args.log_every, "report": args.report_every}
        if several:
            self._await_hosts()
        clock = GlobalClock(every, self._hosts.meeting("round"))
        batches = _looked_for(self._agent.stream(self._batches(samples)))
        batch: Any = None
        while True:
            if batch is None:
                with timer.section("wait"):
                    batch = next(batches, _END)
            if batch is _END or (self._progress.learning_over and not several):
                break
            done = self._saver.updates >= args.pretrain
            if self._progress.pretraining and (batch is None or done):
                self.pretrain()
            agreed = clock(ready=batch is not None, **self._said())
            if several and self._hear(agreed):
                break
            ready = batch is not None and agreed.all("ready")
            if ready:
                self.update(batch)
                batch = None
                self._saver.note_end()
                if parameters is not None:
                    parameters.publish()
                if not several and self._asked and self._saver.updates >= self._asked:
                    break
            if agreed.due("log"):
                self.log(waiting=not ready)
            if self._stopping if several else self._progress.stopped:
                continue  # the end is all that is waited for
            if agreed.due("report"):
                self.report()
            if agreed.due("save"):
                with timer.section("save"):
                    self._saver.save(wait=False)
            self._saver.finish(wait=False)
            if agreed.due("round"):
                self._saver.save(pending=True, wait=False)
        if several:
            self._progress.end_learning()
        self.process()
        self.end_trace()
        self.log()
        # A reply to a later call: the last metrics have arrived before the client is closed.
        self._logger.status().wait(_FLUSH_SECONDS)

    def _await_hosts(self) -> None:
        """Wait until all hosts have compiled."""

        def on_wait(missing: list[int]) -> None:
            names = " and ".join(f"host {index}" for index in missing)
            verb = "is" if len(missing) == 1 else "are"
            self._show("learner/state", f"waiting for {names}, which {verb} compiling")

        self._hosts.gather("compiled", {}, on_wait)
        self._show("learner/state", _ENOUGH_DATA)

    def _said(self) -> dict[str, Any]:
        """What the hosts decide from, as this one knows it."""
        saver, progress = self._saver, self._progress
        first, self._said_steps = self._hosts.index == 0, progress.own
        return {
            "save": first and (saver.asked() or (saver.has_news and self._should_save())),
            "round": first and not self._asked and saver.round_is_due(),
            "steps": self._said_steps + saver.offset,
            "finished": progress.finished.is_set(),
            "stop": progress.stopped or progress.error is not None,
            "sent": progress.sent,
            "too little": self._too_little,
        }

    def _hear(self, agreed: Round) -> bool:
        """Several hosts: do what all of them do now; returns whether learning is over.

        Nothing else than the round decides here, because all have to decide alike.
        """
        args, progress, total = self._args, self._progress, agreed.total("steps")
        progress.elsewhere = total - self._said_steps
        enough = 0 < args.steps <= total
        if agreed.any("stop") or (self._ending and agreed.any("too little")):
            self._stopping = True
            progress.stop()
        elif (enough or agreed.any("finished")) and not self._ending:
            self._ending = True
            if enough and args.train_ratio > 0:
                # Hosts may have different numbers of environments.
                owed = self._hosts.gather("owed", {"updates": self._owed(total)})
                self._asked = self._saver.updates + max(each["updates"] for each in owed)
            progress.finish()
        made = self._stopping or self._saver.updates >= self._asked
        if agreed.all("sent") and made:
            return True
        if progress.sent and not agreed.all("ready"):
            # Others may have updates to make, and nothing is collected here any more.
            self._too_little = not self._may_sample()
        return False

    def _may_sample(self) -> bool:
        """Have the replay give one more batch; returns whether it can."""
        try:
            granted = self._updates.grant(self._args.host_batch)
            return not granted.wait(_STATE_SECONDS) or bool(granted.result())
        except TransportError as error:
            log.debug("No batch was asked for: %s", error)
            return True

    def _batches(self, samples: ReplayClient) -> Iterator[dict[str, Any]]:
        """Training batches from the replay, until learning is over."""
        stream = RemoteStream(
            samples, "train", known=self._saver.samples, batch=self._args.host_batch
        )
        while True:
            try:
                batch = stream.take()
            except Closed:
                if self._progress.learning_over:
                    return
                raise
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
            if self._progress.pretraining:
                made = f"{updates} of {self._args.pretrain} updates before it acts (pretrain)"
                metrics["learner/state"] = f"making {made}"
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
            wanted = thread.submit(next, batches, _END)
            while not wait([wanted], _BATCH_SECONDS).done:
                yield None
            if (batch := wanted.result()) is _END:
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
    """The memory that training needs, as text."""
    parts = ("parameters", "optimizer", "activations")
    words = ", ".join(f"{name} {readable(needed[name])}B" for name in parts if name in needed)
    whole = f"; a step {readable(needed['step'])}B" if "step" in needed else ""
    return f"{words}{whole} of {readable(needed['limit'])}B on each device, as compiled"


def _summary(names: set[str]) -> str:
    """How many entries there are of each part of the agent: `params/actor (4)`."""
    parts = Counter("/".join(name.split("/")[:2]) for name in names)
    return ", ".join(f"{part} ({count})" for part, count in sorted(parts.items())) or "none"
