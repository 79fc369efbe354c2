"""The actor role: replies to observations with actions, and passes transitions on."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Agent, Arrays, Mode, Player
from dreamfleet.clock import LocalClock
from dreamfleet.config import RunConfig
from dreamfleet.roles.addresses import listen_address, publish_address, server_name
from dreamfleet.roles.checks import ObservationCheck, Owners, check_acting, observed
from dreamfleet.roles.fences import ids_of
from dreamfleet.roles.health import STARTED, Health, health_path
from dreamfleet.roles.invitations import Invited
from dreamfleet.roles.logger_client import LoggerClient, video_env
from dreamfleet.roles.policy_batches import Carries, padded_policy, policy_sizes
from dreamfleet.roles.progress import Progress, hang_up_in_time
from dreamfleet.roles.runtime import POLL_SECONDS, ActorFailed
from dreamfleet.roles.scaling.shards import ReplayClient, Reply
from dreamfleet.spaces import FLAGS, LOG_PREFIX, RESET, is_frame, join_observed, without_logs
from dreamfleet.transport import (
    BatchServer,
    Client,
    Closed,
    Future,
    TransportError,
    shared_arrays,
)
from dreamfleet.transport.address import AUTO
from dreamfleet.transport.slab import Allocate

log = logging.getLogger(__name__)

_GATHER_SECONDS = 0.025
_MOST_NAMED = 8
_IN_FLIGHT = 2  # messages to the replay without a reply: one it works on, and the next
_LOGGED_IN_FLIGHT = 8  # the same to the logger
_MOST_FLUSH_SECONDS = 3600.0  # for one message to the replay, at the end of a complete run


def parallel_actor(
    agent: Agent, barrier: threading.Barrier, args: RunConfig, progress: Progress | None = None
) -> None:
    """Answer observations with actions, in batches; pass transitions on to replay and logger. The
    agent and the progress are shared with the learner."""
    progress = progress or Progress(args.steps)
    barrier.wait()  # the learner has restored the checkpoint
    if not progress.finished.is_set():  # else all steps were made before, and none is to follow
        serve_actor(agent, args, progress)


def serve_actor(
    agent: Player,
    args: RunConfig,
    progress: Progress,
    index: int = 0,
) -> None:
    """Serve actions until the run is finished, then send what was collected. Actor `index` serves
    the environments that have this number modulo `actors`."""
    name = server_name("actor", index)
    with (
        ReplayClient(args, f"{name}-replay", _IN_FLIGHT) as replay,
        LoggerClient(args, f"{name}-logger", _LOGGED_IN_FLIGHT) as logger,
        hang_up_in_time(progress, logger, replay),
    ):
        actor = Actor(agent, args, progress, replay, logger, index)
        address = listen_address(args, "actor", index)
        hooks = Invited(args.logdir).hooks() if args.bind else {}
        server = BatchServer(address, name, args.server_keys, **hooks)
        owners = Owners(server.connected)
        actor.gone = lambda ids: server.between_calls(lambda: owners.gone(ids))
        server.bind(
            "act",
            actor.act,
            actor.send,
            roles=("env",),
            check=ObservationCheck(
                observed(agent, args), args.envs_per_process, owners, check_acting(args)
            ),
            batch=args.policy_batch_of(index),
            wait=args.actor_wait,
            workers=args.actor_threads,
            gather=_GATHER_SECONDS,
            # No more than the replay's limiter tolerates at once, so that it can hold acting and
            # learning in step.
            post_rows=args.limiter_tolerance,
            on_post_error=actor.on_send_error,
        )
        gate = StartGate(args, progress, server, owners, index)
        server.start(block=False)
        should_log = LocalClock(args.log_every)
        should_log()
        try:
            publish_address(args, "actor", server.address, index)
            while not progress.finished.wait(min(args.log_every, POLL_SECONDS)):
                gate.poll()
                if args.bind:  # environments come and go: a full batch has no more than are there
                    present = server.between_calls(owners.present)
                    server.resize("act", min(present, args.policy_batch_of(index)))
                if should_log():
                    actor.log_metrics(server, gate.holds())
            if progress.error is None:
                actor.log_metrics(server, gate.holds())
        finally:
            flush = min(_MOST_FLUSH_SECONDS, progress.seconds_left())
            try:
                server.close(flush=flush if progress.error is None else 0.0)
                if progress.error is None:
                    actor.take_replies(wait=True)
            except TransportError as error:
                actor.on_send_error(error)


class Actor:
    """Policy calls (`act`), with the carry of each environment before them and the transitions that
    follow them (`send`)."""

    def __init__(
        self,
        agent: Player,
        args: RunConfig,
        progress: Progress,
        replay: ReplayClient,
        logger: Client,
        index: int = 0,
    ) -> None:
        self._agent, self._args, self._progress = agent, args, progress
        self._replay, self._logger = replay, logger
        self._index, self._policy_lock = index, progress.policy_lock
        known = max(len(args.envs_of(index)), len(range(index, args.known_envs, args.actors)))
        self._carries = Carries(agent, max(16, 2 * known))
        self._sizes = policy_sizes(args, index)
        self._video = VideoFrames(args.report_every, video_env(args))
        self.source = f"actor-{uuid.uuid4().hex}"
        """A new name for each start: a resend is recognised, a successor's batch never is."""
        self._sequence = 0
        self._stored: deque[Reply] = deque()
        self._logged: deque[Future] = deque()
        self._previous = (time.monotonic(), 0.0, 0.0)
        self._health = Health(health_path(args, server_name("actor", index)))
        self.gone: Callable[[list[int]], list[int]] = lambda _: []
        """Those of some environments that have no connection any more."""
        self._forgotten: deque[int] = deque()  # carries that are, and episodes that are to be

    # --- acting: before the reply ----------------------------------------------------------------

    def act(self, obs: dict[str, Any]) -> tuple[Arrays, Transitions]:
        """Actions for a batch of observations, and the transitions for `send`."""
        try:
            return self._act(obs)
        except Exception as error:
            self._progress.fail(error)
            raise ActorFailed(f"The policy failed: {error!r}.") from error

    def _act(self, obs: dict[str, Any]) -> tuple[Arrays, Transitions]:
        inputs = without_logs(obs)
        envids, is_eval = ids_of(inputs.pop("envid")), inputs.pop("is_eval")
        evaluated, count = int(np.count_nonzero(is_eval)), len(envids)
        with self._policy_lock:
            # An episode that began before this actor started has no carry: it is reset and not
            # stored.
            unknown = ~obs["is_first"] & ~self._carries.known(envids)
            if evaluated in (0, count):
                actions, outs = self._policy(envids, inputs, "eval" if evaluated else "train")
            else:
                actions, outs = self._mixed_policy(envids, inputs, is_eval)
        logs = {k: v for k, v in obs.items() if k in FLAGS or k.startswith(LOG_PREFIX)}
        transitions = Transitions(envids, is_eval, {**inputs, **actions, **outs}, logs)
        if unknown.any():
            transitions = transitions.where(~unknown)
        if self._args.actors == 1:
            self._progress.advance(int(np.count_nonzero(~transitions.is_eval)))
        return {**actions, RESET: obs["is_last"] | unknown}, transitions

    def _policy(self, envids: NDArray[Any], obs: Arrays, mode: Mode) -> tuple[Arrays, Arrays]:
        carry, slots = self._carries.take(envids, obs["is_first"])
        carry, actions, outs = padded_policy(self._agent, self._sizes, carry, obs, mode)
        self._carries.put(slots, carry)
        return actions, outs

    def _mixed_policy(
        self, envids: NDArray[Any], obs: Arrays, is_eval: NDArray[np.bool_]
    ) -> tuple[Arrays, Arrays]:
        """Training and evaluation rows, a policy call for each, in their order."""
        parts = []
        rows = [np.flatnonzero(~is_eval), np.flatnonzero(is_eval)]
        modes: tuple[Mode, Mode] = ("train", "eval")
        for chosen, mode in zip(rows, modes, strict=True):
            part = {key: value[chosen] for key, value in obs.items()}
            parts.append(self._policy(envids[chosen], part, mode))
        order = np.argsort(np.concatenate(rows))
        (actions, outs), (eval_actions, eval_outs) = parts
        return (
            {k: np.concatenate([v, eval_actions[k]])[order] for k, v in actions.items()},
            {k: np.concatenate([v, eval_outs[k]])[order] for k, v in outs.items()},
        )

    # --- sending: after the reply ----------------------------------------------------------------

    def send(self, batches: list[Transitions]) -> None:
        """Send transitions to the replay and the logger, in order; batches that followed each other
        quickly share a message, because a message costs more than the rows in it."""
        self.take_replies(wait=False)
        if self._args.actors > 1:  # the replay counts
            self._progress.raise_to(self._replay.position().result()["steps"])
        if forgotten := [self._forgotten.popleft() for _ in range(len(self._forgotten))]:
            self._logged.append(self._logger.call("gone", np.array(forgotten, np.int64)))
        if not (parts := [batch for batch in batches if len(batch)]):
            return
        joined = Transitions.join(parts, self._replay.memory)
        frames = self._video.frames(joined.envids, joined.steps)
        is_eval = joined.is_eval
        if is_eval.all() or not is_eval.any():
            self._store(joined, bool(is_eval.any()))
        else:
            self._store(joined.where(~is_eval), False)
            self._store(joined.where(is_eval), True)
        message = (self._progress.step, joined.envids, is_eval, joined.logs, frames)
        self._logged.append(self._logger.call("tran", *message))

    def _store(self, part: Transitions, is_eval: bool) -> None:
        self._sequence += 1
        message = (part.steps, part.envids, is_eval, self.source, self._sequence)
        self._stored.append(self._replay.call("add_batch", *message))

    def take_replies(self, *, wait: bool) -> None:
        """Take the replies that are there, or wait until the replay and the logger have confirmed
        everything that was sent."""
        while self._stored and (wait or self._stored[0].done()):
            self._stored.popleft().result()
        while self._logged and (wait or self._logged[0].done()):
            self._on_logged(self._logged.popleft())

    def on_send_error(self, error: BaseException) -> None:
        """End the run, unless it is stopped and only did not wait any longer."""
        if self._progress.stopped and isinstance(error, TransportError):
            log.warning("The run is stopped: unconfirmed steps are dropped. %s", error)
        else:
            self._progress.fail(error)

    def _on_logged(self, reply: Future) -> None:
        with suppress(Closed):  # the run ends without the logger
            if reply.result() and not self._progress.finished.is_set():
                log.info("The target score of %g is reached.", self._args.target_score)
                self._progress.finish()

    # --- metrics ---------------------------------------------------------------------------------

    def log_metrics(self, server: BatchServer, held: str | None = None) -> None:
        """Forget environments that are gone, and tell the logger how the actor is doing, and why it
        is `held` back, if it is."""
        try:
            self._log_metrics(server, held)
        except Exception as error:
            self._progress.fail(error)

    def _forget_gone(self) -> None:
        """Forget environments that have sent nothing for `episode_timeout` and have no connection
        any more. One that has may be slow, or be held up by the run itself."""
        timeout = self._args.episode_timeout
        with self._policy_lock:
            idle = self._carries.table.idle()
        silent = [envid for envid, age in idle.items() if age > timeout]
        if not silent or not (gone := self.gone(silent)):
            return
        with self._policy_lock:
            self._carries.table.remove(gone)  # one that is back in this moment is reset
        self._forgotten += gone
        log.warning(
            "%s: no connection, and no step for %.0f s; dropped, with its running episodes "
            "(episode_timeout is %g s)",
            *(_names(gone), min(idle[each] for each in gone), timeout),
        )

    def _log_metrics(self, server: BatchServer, held: str | None) -> None:
        self._forget_gone()
        with self._policy_lock:
            idle = self._carries.table.idle()
        with suppress(Closed):  # the run ends without the logger
            self._logger.wait_any((), 0.0)  # what it has answered is not in flight any more
        logger, replay, stats = self._logger.stats(), self._replay.stats(), server.stats()
        waiting = int(stats["act/waiting"])
        if held is None:
            held = waits_for(self._args, idle, waiting, replay, self._index)
        self._health.waits(held)
        if logger["inflight"] >= _LOGGED_IN_FLIGHT:
            return  # metrics are not worth a wait for a logger that is away
        then, items, batches = self._previous
        now = time.monotonic()
        self._previous = now, stats["act/items"], stats["act/batches"]
        metrics: dict[str, Any] = {
            "steps_per_second": (stats["act/items"] - items) / (now - then),
            "batches_per_second": (stats["act/batches"] - batches) / (now - then),
            "fill": stats["act/fill"],
            "wait_seconds": stats["act/wait"],
            "policy_seconds": stats["act/work"],
            "environments": float(len(idle)),
            **{f"server/{k}": v for k, v in stats.items() if "/" not in k},
            **{f"replay_client/{k}": v for k, v in replay.items()},
            **{f"logger_client/{k}": v for k, v in logger.items()},
            **self._agent.metrics(),
            **self._progress.policy_metrics(),
        }
        name = server_name("actor", self._index)
        named = {f"{name}/{key}": value for key, value in metrics.items()}
        self._logger.call("add", self._progress.step, named)


@dataclass(frozen=True, slots=True)
class Transitions:
    """What follows a batch of actions: a row for each environment."""

    envids: NDArray[np.int64]
    is_eval: NDArray[np.bool_]
    steps: Arrays
    """What the replay stores."""
    logs: Arrays
    """What the logger follows episodes by."""

    def __len__(self) -> int:
        return len(self.envids)

    def where(self, rows: NDArray[np.bool_]) -> Transitions:
        """Some of the rows."""
        return Transitions(
            self.envids[rows],
            self.is_eval[rows],
            {key: value[rows] for key, value in self.steps.items()},
            {key: value[rows] for key, value in self.logs.items()},
        )

    @staticmethod
    def join(parts: Sequence[Transitions], allocate: Allocate) -> Transitions:
        """The rows of all parts, in order; steps where they are sent from, if there is memory."""
        if len(parts) == 1:
            return parts[0]
        first, rows = parts[0], sum(map(len, parts))
        shapes = {
            key: ((rows, *value.shape[1:]), value.dtype) for key, value in first.steps.items()
        }
        steps = shared_arrays(allocate, shapes)
        for key, array in steps.items():
            np.concatenate([part.steps[key] for part in parts], out=array)
        return Transitions(
            np.concatenate([part.envids for part in parts]),
            np.concatenate([part.is_eval for part in parts]),
            steps,
            join_observed([part.logs for part in parts]),
        )


class StartGate:
    """Holds the actions of an actor back until the environments that the run expects are there,
    and the updates before the first step (`pretrain`) are made.

    The first actor decides, which hears from the learner's server how many the others have. One
    that is started again, in a run that has begun, does not wait."""

    def __init__(
        self, args: RunConfig, progress: Progress, server: BatchServer, owners: Owners, index: int
    ) -> None:
        self._args, self._progress = args, progress
        self._server, self._owners = server, owners
        self._note = None if index else health_path(args, STARTED)
        if self._note and self._note.exists():
            progress.begun = True
        self.closed = bool(args.expect_envs or args.pretrain) and not progress.begun
        if self.closed:
            server.hold("act")
        else:
            self._note_beginning()

    def poll(self) -> None:
        """Let the actor act, if it may now."""
        if not self.closed:
            return
        self._server.forget_gone("act")
        present = self._server.between_calls(self._owners.present)
        if not self._progress.may_begin(present, self._args.expect_envs):
            return
        self.closed = False
        self._note_beginning()
        self._server.hold("act", held=False)

    def holds(self) -> str | None:
        """Why actions are held back, as far as this actor knows it; None if they are not."""
        if not self.closed:
            return None
        if not self._note or self._progress.pretraining:  # the first actor knows of the others
            return ""
        return (
            f"the run begins when {self._args.expect_envs} environments are there (expect_envs): "
            f"{self._progress.present} are"
        )

    def _note_beginning(self) -> None:
        if self._note:
            with suppress(OSError):
                self._note.parent.mkdir(parents=True, exist_ok=True)
                self._note.touch()


class VideoFrames:
    """Chooses the frames that the logger gets: whole episodes of one environment, now and then, and
    what is in the same batches. Frames are most of an observation's bytes, so no others are sent.

    Args:
        every: Seconds between the starts of two videos; 0 for none.
        envid: The environment.
    """

    def __init__(self, every: float, envid: int = 0) -> None:
        self._envid = envid
        self._due = LocalClock(every, first=True)
        self._recording = False

    def frames(
        self, envids: NDArray[Any], obs: Mapping[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        """The images of this environment, if one of its episodes in this batch is recorded."""
        rows = (envids == self._envid).nonzero()[0]
        recording = self._recording
        if obs["is_first"][rows].any():
            self._recording = self._due()
        if not rows.size or not (recording or self._recording):
            return {}
        return {k: v[rows] for k, v in obs.items() if is_frame(v.dtype, v.shape[1:])}


def waits_for(
    args: RunConfig,
    idle: Mapping[int, float],
    observations: int,
    replay: Mapping[str, float],
    actor: int = 0,
) -> str:
    """Why there are no steps, if there are none; empty if the actor does not wait.

    Args:
        args: Which environments there are, and how many make a batch.
        idle: Seconds since the last observation of each environment that is known.
        observations: How many wait for the next policy call.
        replay: Statistics of the client that sends steps to the replay.
        actor: Which of the run's actors it is.
    """
    who = server_name("actor", actor) if actor else "the actor"
    batch = args.policy_batch_of(actor)
    if replay["inflight"] and not replay["connected"]:
        where = "" if AUTO in args.replay_addr else f" at {args.replay_addr}"
        return f"{who} has no connection to the replay{where}"
    if replay["inflight"] >= _IN_FLIGHT:
        return f"{who} waits for the replay to take {replay['inflight']:g} batches of steps"
    reasons = []
    if 0 < observations < batch and args.actor_wait > args.log_every:
        reasons.append(
            f"{who} waits for a full batch: it has {observations} of {batch} "
            f"observations, and uses a smaller batch after {args.actor_wait:g} s"
        )
    own = () if args.bind and args.remote_envs else args.envs_of(actor)
    late = {**dict.fromkeys(own, inf), **idle}
    late = {envid: age for envid, age in late.items() if age > args.log_every}
    # Environments whose observations wait are not late. Which ones they are is not known here.
    count = len(late) - observations
    if count > 0:
        some = "" if count == len(late) else f"{count} of "
        seconds = min(late.values())
        since = "yet" if seconds == inf else f"for {seconds:.0f} s or more"
        reasons.append(f"no observation from {some}{_names(late)} {since}")
    return "; ".join(reasons)


def _names(envids: Collection[int]) -> str:
    ids = sorted(envids)
    text = ", ".join(map(str, ids[:_MOST_NAMED])) + (" ..." if len(ids) > _MOST_NAMED else "")
    return f"environment {text}" if len(ids) == 1 else f"{len(ids)} environments ({text})"
