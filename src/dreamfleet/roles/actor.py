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

from dreamfleet.agents.api import Agent, Arrays, Mode, Player, take_rows
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


def serve_actor(agent: Player, args: RunConfig, progress: Progress, index: int = 0) -> None:
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
        spaces, most = observed(agent, args), args.envs_per_process
        server.bind(
            "act",
            workfn=actor.act,  # carries, policy, reply
            postfn=actor.send,  # after the reply, in order: replay.add_batch, logger.tran
            batch=args.policy_batch_of(index),
            wait=args.actor_wait,
            workers=args.actor_threads,
            roles=("env",),
            check=ObservationCheck(spaces, most, owners, check_acting(args, index)),
            gather=_GATHER_SECONDS,
            post_rows=args.message_steps,
            on_post_error=actor.on_send_error,
        )
        presence = Presence(args, progress, server, owners, index)
        actor.gone = presence.gone
        _serve_until_finished(actor, server, presence, args, progress, index)


class Actor:
    """Policy calls (`act`), with the carry of each environment before them and the transitions that
    follow them (`send`)."""

    def __init__(
        self,
        agent: Player,
        args: RunConfig,
        progress: Progress,
        replay: ReplayClient,
        logger: LoggerClient,
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

    def act(self, obs: Arrays) -> tuple[Arrays, list[Transitions]]:
        """Actions for a batch of observations, and the transitions for `send`."""
        try:
            is_eval = obs["is_eval"]
            evaluated = np.count_nonzero(is_eval)
            if evaluated in (0, len(is_eval)):
                actions, transitions = self._act(obs, "eval" if evaluated else "train")
                return actions, [transitions]
            return self._act_in_both_modes(obs, is_eval)
        except Exception as error:
            self._progress.fail(error)
            raise ActorFailed(f"The policy failed: {error!r}.") from error

    def _act(self, obs: Arrays, mode: Mode) -> tuple[Arrays, Transitions]:
        inputs = without_logs(obs)
        envids = ids_of(inputs.pop("envid"))
        del inputs["is_eval"]
        with self._policy_lock:
            # An episode that began before this actor started has no carry: it is reset and not
            # stored.
            carry, slots, missed = self._carries.take(envids, obs["is_first"])
            carry, actions, outs = padded_policy(self._agent, self._sizes, carry, inputs, mode)
            self._carries.put(slots, carry)
        logs = {k: v for k, v in obs.items() if k in FLAGS or k.startswith(LOG_PREFIX)}
        transitions = Transitions(envids, mode == "eval", {**inputs, **actions, **outs}, logs)
        if missed.any():
            transitions = transitions.where(~missed)
        if self._args.actors == 1 and mode == "train":
            self._progress.advance(len(transitions))
        return {**actions, RESET: obs["is_last"] | missed}, transitions

    def _act_in_both_modes(
        self, obs: Arrays, is_eval: NDArray[np.bool_]
    ) -> tuple[Arrays, list[Transitions]]:
        """Training and evaluation rows, a policy call for each; actions are in their order."""
        rows = [np.flatnonzero(~is_eval), np.flatnonzero(is_eval)]
        train, evaluation = (take_rows(obs, chosen) for chosen in rows)
        actions, trained = self._act(train, "train")
        more, evaluated = self._act(evaluation, "eval")
        order = np.argsort(np.concatenate(rows))
        joined = {key: np.concatenate([actions[key], more[key]])[order] for key in actions}
        return joined, [trained, evaluated]

    # --- sending: after the reply ----------------------------------------------------------------

    def send(self, batches: list[list[Transitions]]) -> None:
        """Send transitions to the replay and the logger, in order; batches that followed each other
        quickly share a message, because a message costs more than the rows in it."""
        self.take_replies(wait=False)
        if self._args.actors > 1:  # the replay counts
            self._progress.raise_to(self._replay.position().result()["steps"])
        if forgotten := [self._forgotten.popleft() for _ in range(len(self._forgotten))]:
            self._logged.append(self._logger.gone(np.array(forgotten, np.int64)))
        for is_eval in (False, True):
            parts = [
                part for batch in batches for part in batch if part.is_eval == is_eval and len(part)
            ]
            if parts:
                self._send(Transitions.join(parts, self._replay.memory))

    def _send(self, batch: Transitions) -> None:
        envids, steps, is_eval = batch.envids, batch.steps, batch.is_eval
        self._sequence += 1
        self._stored.append(
            self._replay.add_batch(steps, envids, is_eval, self.source, self._sequence)
        )
        frames = self._video.frames(envids, steps)
        self._logged.append(
            self._logger.tran(self._progress.step, envids, is_eval, batch.logs, frames)
        )

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
        idle = self._forget_gone()
        behind = self._logger.behind
        logger, replay, stats = self._logger.stats(), self._replay.stats(), server.stats()
        waiting = int(stats["act/waiting"])
        if held is None:
            held = waits_for(self._args, idle, waiting, replay, self._index)
        self._health.waits(held)
        if behind:
            return
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
        self._logger.add(self._progress.step, named)

    def _forget_gone(self) -> dict[int, float]:
        """Forget environments that have sent nothing for `episode_timeout` and have no connection
        any more. One that has may be slow, or be held up by the run itself. Returns seconds since
        the last observation of each one that is left."""
        timeout = self._args.episode_timeout
        with self._policy_lock:
            idle = self._carries.table.idle()
        silent = [envid for envid, age in idle.items() if age > timeout]
        if not silent or not (gone := self.gone(silent)):
            return idle
        with self._policy_lock:
            self._carries.table.remove(gone)  # one that is back in this moment is reset
        self._forgotten += gone
        log.warning(
            "%s: no connection, and no step for %.0f s; dropped, with its running episodes "
            "(episode_timeout is %g s)",
            *(_names(gone), min(idle.pop(each) for each in gone), timeout),
        )
        return idle


def _serve_until_finished(
    actor: Actor,
    server: BatchServer,
    presence: Presence,
    args: RunConfig,
    progress: Progress,
    index: int,
) -> None:
    """Serve, and log now and then. At the end of a run without an error, wait until everything
    that was collected is confirmed."""
    should_log = LocalClock(args.log_every)
    should_log()
    server.start(block=False)
    try:
        publish_address(args, "actor", server.address, index)
        while not progress.finished.wait(min(args.log_every, POLL_SECONDS)):
            held = presence.poll()
            if should_log():
                actor.log_metrics(server, held)
        if progress.error is None:
            actor.log_metrics(server, presence.poll())
    except Exception as error:
        progress.fail(error)
        raise
    finally:
        flush = min(_MOST_FLUSH_SECONDS, progress.seconds_left())
        try:
            server.close(flush=flush if progress.error is None else 0.0)
            if progress.error is None:
                actor.take_replies(wait=True)
        except TransportError as error:
            actor.on_send_error(error)


@dataclass(frozen=True, slots=True)
class Transitions:
    """What follows a batch of actions: a row for each environment."""

    envids: NDArray[np.int64]
    is_eval: bool
    steps: Arrays
    """What the replay stores."""
    logs: Arrays
    """What the logger follows episodes by."""

    def __len__(self) -> int:
        return len(self.envids)

    def where(self, rows: NDArray[np.bool_]) -> Transitions:
        """Some of the rows."""
        steps, logs = take_rows(self.steps, rows), take_rows(self.logs, rows)
        return Transitions(self.envids[rows], self.is_eval, steps, logs)

    @staticmethod
    def join(parts: Sequence[Transitions], allocate: Allocate) -> Transitions:
        """The rows of all parts, in order, of one mode; steps where they are sent from, if there is
        memory."""
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
            first.is_eval,
            steps,
            join_observed([part.logs for part in parts]),
        )


class Presence:
    """Which environments of an actor are there. Their actions are held back until those that the
    run expects are there, and the updates before the first step (`pretrain`) are made.

    The first actor decides, which hears from the learner's server how many the others have. One
    that is started again, in a run that has begun, does not wait."""

    def __init__(
        self, args: RunConfig, progress: Progress, server: BatchServer, owners: Owners, index: int
    ) -> None:
        self._args, self._progress, self._index = args, progress, index
        self._server, self._owners = server, owners
        self._note = None if index else health_path(args, STARTED)
        if self._note and self._note.exists():
            progress.begun = True
        self.held = bool(args.expect_envs or args.pretrain) and not progress.begun
        """Whether actions are held back."""
        if self.held:
            server.hold("act")
        else:
            self._note_beginning()

    def gone(self, envids: list[int]) -> list[int]:
        """Those of these environments that have no connection any more."""
        return self._server.between_calls(lambda: self._owners.gone(envids))

    def poll(self) -> str | None:
        """Let the actor act, if it may now. Returns why actions are held back, as far as this actor
        knows it; None if they are not."""
        args, progress = self._args, self._progress
        if self.held:
            self._server.forget_gone("act")
            if progress.may_begin(self._present(), args.expect_envs):
                self.held = False
                self._note_beginning()
                self._server.hold("act", held=False)
        if args.bind:  # environments come and go: a full batch has no more than are there
            self._server.resize("act", min(self._present(), args.policy_batch_of(self._index)))
        if not self.held:
            return None
        if not self._note or progress.pretraining:  # the first actor knows of the others
            return ""
        return (
            f"the run begins when {args.expect_envs} environments are there (expect_envs): "
            f"{progress.present} are"
        )

    def _present(self) -> int:
        return self._server.between_calls(self._owners.present)

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
