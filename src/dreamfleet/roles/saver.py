"""Saves and restores the agent, with the position of the run."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

from dreamfleet.agents.api import Agent, save_later
from dreamfleet.checkpoint import Checkpoint, CheckpointError, Snapshot
from dreamfleet.clock import LocalClock
from dreamfleet.config import RunConfig
from dreamfleet.policy import BLUEPRINT, Blueprint, find_checkpoint
from dreamfleet.roles.health import Health, health_path
from dreamfleet.roles.progress import Progress
from dreamfleet.roles.runtime import POLL_SECONDS, await_server
from dreamfleet.roles.scaling.shards import ReplayClient
from dreamfleet.roles.scaling.sync import Sync
from dreamfleet.transport import Client, TransportError

log = logging.getLogger(__name__)

SAVE_REQUEST = "save.request"
"""A file in the run's directory by which a user asks for a checkpoint."""
_EARLY_SECONDS = 60.0
"""After the first update: when the first checkpoint is due. Later ones follow after longer and
longer times, up to `save_every`."""
_CONNECT_SECONDS, _POSITION_SECONDS, _SCORE_SECONDS = 1.0, 10.0, 2.0
_ROUND_SECONDS = 0.5


class Saver:
    """Saves and restores the agent.

    The replay owns the step counter (`dreamfleet.replay.positions`): an agent that goes back to a
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
        sync: Sync | None = None,
    ) -> None:
        self._agent, self._args, self._progress = agent, args, progress
        self._replay, self._logger = replay, logger
        self._sync = sync or Sync()
        self._checkpoint = Checkpoint(args.checkpoints, keep=2)
        self._position: dict[str, Any] = {"steps": 0, "samples": 0}
        self.health = Health(health_path(args, "agent"))
        self._round = 0  # the step at which the last round of evaluation began
        self.round_may_begin: Callable[[], bool] = LocalClock(_ROUND_SECONDS, first=True)
        """Whether to look now if a round is due; looking reads files."""
        self._may_look = LocalClock(POLL_SECONDS, first=True)
        self._is_time = LocalClock(args.save_every, early=_EARLY_SECONDS)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._saved = 0  # updates
        self.updates = 0
        self.offset = 0
        """Steps of the run that are in no host's replay any more; below 0 for those that two hosts
        have counted."""

    def restore(self) -> str:
        """Load the newest complete checkpoint of this run, or else what the run starts from;
        returns what was done."""
        await_server(self._replay.connect, "the replay", self._progress.finished.is_set)
        self._sync.gather("ready", {})  # loading may be done by all devices together
        if self._sync.index == 0:
            self._checkpoint.clean_up()
        restored = "starting from scratch"
        snapshot = self._checkpoint.load()
        if snapshot is not None:
            self._agent.load(snapshot.parts["agent"])
            run = snapshot.parts["run"]
            self.updates = self._saved = int(run["updates"])
            self._round = int(run.get("round", 0))
            restored = f"resuming from {snapshot.path}"
        elif self._args.from_checkpoint:
            restored = self._start_from(Path(self._args.from_checkpoint))
        if self._args.offline:  # there are no environment steps: updates are counted
            self._position = self._replay.position().result()
            self._progress.restore(snapshot.step if snapshot else 0)
        else:
            self._restore_step(snapshot)
        return restored

    def _restore_step(self, snapshot: Snapshot | None) -> None:
        """The step of the run is that of the checkpoint, and what each host has stored since. A
        host that the checkpoint does not know has nothing new."""
        name = ""
        known: int | None = 0
        if snapshot is not None:
            name = snapshot.path.name
            known = self._sync.known_steps(snapshot.step, snapshot.parts["run"])
        self._position = self._replay.raise_position(known or 0).result()
        stored = int(self._position["steps"])
        new = 0 if known is None else stored - known
        votes = self._sync.gather("restore", {"name": name, "stored": stored, "new": new})
        if any(vote["name"] != name for vote in votes):
            names = ", ".join(vote["name"] or "none" for vote in votes)
            raise CheckpointError(
                f"The hosts find different checkpoints in {self._args.checkpoints} ({names}): use "
                "a directory that all of them share."
            )
        total = sum(vote["new"] for vote in votes) + (snapshot.step if snapshot else 0)
        self._progress.elsewhere = total - stored
        if self._sync.index == 0:
            self.offset = total - sum(vote["stored"] for vote in votes)
        self._progress.restore(stored)

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

    def is_due(self) -> bool:
        """Whether to save now: it is time, and the agent was trained since it was last saved; or a
        user asks for it, by a file."""
        if self._may_look():
            try:
                (self._args.logdir / SAVE_REQUEST).unlink()
            except OSError:
                pass
            else:
                return True
        return self.updates > self._saved and self._is_time()

    def round_is_due(self) -> bool:
        """Whether a round of evaluation is to begin now, with a checkpoint that is `pending`;
        answered once for each.

        A round that is due while another one is under way begins as soon as that one has ended.
        """
        every = self._args.eval_every
        if not every or self._progress.step // every <= self._round // every:
            return False
        if not self.round_may_begin() or self.in_round():
            return False
        # Steps that are stored, as a checkpoint counts them: some are still on their way.
        step = int(self.newest_position()["steps"]) + self._progress.elsewhere
        if step // every <= self._round // every:
            return False
        self._round = step
        return True

    def in_round(self) -> bool:
        """Whether a round is under way, or a checkpoint is being written that may begin one."""
        self.finish(wait=False)
        return self._writing is not None or self._checkpoint.pending() is not None

    def save(self, *, pending: bool = False, wait: bool = True) -> None:
        """Write a checkpoint, with the evaluation score that tells which one is the best.

        Args:
            pending: The score is found by a round of evaluation that begins with this checkpoint.
            wait: Return when it is written. Otherwise a thread writes it while the agent goes on
                learning; one at a time, so that there is one state beside the agent's at most.
        """
        self.finish()
        self._saved = self.updates
        position = self.newest_position()
        # Not the actor's count, which holds steps that are still on their way to the replay.
        step = self._progress.step if self._args.offline else int(position["steps"])
        parts: dict[str, dict[str, Any]] = {"run": {f"steps/{self._sync.index}": step}}
        score = None
        if self._sync.index == 0:  # the rest is the same on all hosts
            parts["run"] |= {"updates": self.updates, "round": self._round}
            parts["replay"] = position
            parts[BLUEPRINT] = Blueprint.of(self._agent, self._args).save()
            score = self._evaluation_score()
        self.note_end()
        if wait:  # all steps are looked at: NaN in the last one is an error
            parts = {"agent": self._agent.save(), **parts}
        state = None if wait else save_later(self._agent)

        def write() -> None:
            self._checkpoint.save(
                {"agent": state(), **parts} if state else parts,
                step=step + self.offset,
                score=score,
                pending=pending,
                host=self._sync.index,
                gather=self._sync.channel("checkpoint"),
            )
            self.health.progress()

        self._writing = self._writer.submit(write)
        if wait:
            self.finish()

    def finish(self, *, wait: bool = True) -> None:
        """Wait for the checkpoint that is being written, or only look whether it is done; raises
        what went wrong."""
        if self._writing is not None and (wait or self._writing.done()):
            writing, self._writing = self._writing, None
            while not wait_for([writing], POLL_SECONDS).done:
                self.note_end()  # however long it takes
            writing.result()

    def close(self) -> None:
        """Let a checkpoint that is being written be finished: the agent may end by an error."""
        self._writer.shutdown(wait=self._sync.count == 1)  # hosts that have failed are not there
        writing, self._writing = self._writing, None
        if writing and writing.done() and (error := writing.exception()):
            log.warning("A checkpoint was not written: %s", error)

    def note_end(self) -> None:
        """While the run ends: let the supervisor know that the end gets on."""
        if self._progress.finished.is_set():
            self.health.progress()

    def newest_position(self) -> dict[str, Any]:
        """The replay's position, with the steps of all actors, which are counted from here on; the
        last one known, if the replay is restarting."""
        try:
            self._replay.connect(_CONNECT_SECONDS)
            self._position = self._replay.position().result(_POSITION_SECONDS)
            if not self._args.offline:
                self._progress.raise_to(int(self._position["steps"]))
        except TransportError as error:
            log.warning("The checkpoint keeps an older position of the replay: %s", error)
        return self._position

    def _evaluation_score(self) -> float | None:
        """The mean score of recent evaluation episodes, if there are any."""
        may_be_there = self._args.eval_envs or self._args.bind
        if not may_be_there or self._args.eval_every:
            return None
        try:
            score = self._logger.status().result(_SCORE_SECONDS)["eval_score"]
        except TransportError as error:
            log.warning("The checkpoint is saved without an evaluation score: %s", error)
            return None
        return None if score is None else float(score)


def _summary(names: set[str]) -> str:
    """How many entries there are of each part of the agent: `params/actor (4)`."""
    parts = Counter("/".join(name.split("/")[:2]) for name in names)
    return ", ".join(f"{part} ({count})" for part, count in sorted(parts.items())) or "none"
