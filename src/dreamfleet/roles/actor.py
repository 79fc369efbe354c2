"""The actor role: answers observations with actions, and passes transitions on."""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agent.api import Agent, Arrays, Mode
from dreamfleet.config import RunConfig
from dreamfleet.errors import DreamfleetError
from dreamfleet.roles.carries import Carries
from dreamfleet.roles.progress import Progress
from dreamfleet.roles.waiting import actor_waits
from dreamfleet.transport import BatchServer, Client, Future

_HAND_OVER_SECONDS = {"restart": 60.0, "stop": 1.0}
_REPLAY_BACKLOG = 8
_LOGGED = ("reward", "is_first", "is_last", "is_terminal")


class ActorFailed(DreamfleetError):
    """The policy failed, or what follows it; the agent process ends because of it."""


def parallel_actor(
    agent: Agent, barrier: threading.Barrier, args: RunConfig, progress: Progress | None = None
) -> None:
    """Serve actions until the run is finished, then hand over what was collected.

    Args:
        agent: Shared with the learner, which makes its parameters newer meanwhile.
        barrier: Passed when the learner has restored the checkpoint.
        args: Addresses, batch and waiting time.
        progress: Shared with the learner; None if there is none.
    """
    progress = progress or Progress(args.steps)
    barrier.wait()
    with (
        Client(args.replay_addr, "actor-replay", _REPLAY_BACKLOG, keys=args.run_keys) as replay,
        Client(args.logger_addr, "actor-logger", 32, keys=args.run_keys) as logger,
    ):
        acting = Acting(agent, args, progress, replay, logger)
        server = BatchServer(args.actor_addr, "actor", args.run_keys)
        server.bind(
            "act",
            acting.work,
            acting.post,
            batch=args.policy_batch,
            wait=args.actor_wait,
            workers=args.actor_threads,
        )
        with server:
            while not progress.finished.wait(args.log_every):
                acting.housekeeping(server)
            if progress.error is None:
                acting.housekeeping(server)
        if progress.error is None:
            acting.hand_over()


@dataclass(frozen=True)
class _Transitions:
    """What follows a batch whose actions have gone out."""

    envids: NDArray[np.int64]
    is_eval: NDArray[np.bool_]
    steps: Arrays
    logs: Arrays

    def where(self, rows: NDArray[np.bool_]) -> _Transitions:
        return _Transitions(
            self.envids[rows],
            self.is_eval[rows],
            {key: value[rows] for key, value in self.steps.items()},
            {key: value[rows] for key, value in self.logs.items()},
        )


class Acting:
    """The two halves of a policy call: the answer, and what follows it."""

    def __init__(
        self, agent: Agent, args: RunConfig, progress: Progress, replay: Client, logger: Client
    ) -> None:
        self._agent, self._args, self._progress = agent, args, progress
        self._replay, self._logger = replay, logger
        self._carries = Carries(agent, max(16, 2 * args.all_envs))
        self._policy_lock = threading.Lock()
        # A fresh name for each life: a resend is recognised, a successor's batch is never.
        self._source = f"actor-{uuid.uuid4().hex}"
        self._sequence = 0
        self._sent: deque[Future] = deque()
        self._unposted = 0  # batches whose actions have gone out, and whose steps have not
        self._posted = threading.Condition()
        self._previous = (time.monotonic(), 0.0, 0.0)

    def work(self, obs: dict[str, Any]) -> tuple[Arrays, _Transitions]:
        """Actions for a batch of observations."""
        try:
            answer = self._work(obs)
            with self._posted:
                self._unposted += 1
            return answer
        except Exception as error:
            self._progress.fail(error)
            raise ActorFailed(f"The policy failed: {error!r}.") from error

    def _work(self, obs: dict[str, Any]) -> tuple[Arrays, _Transitions]:
        envids, is_eval = obs.pop("envid"), obs.pop("is_eval")
        seen = {key: value for key, value in obs.items() if not key.startswith("log/")}
        with self._policy_lock:
            # Of an episode whose beginning this actor has not seen it knows no state, and what came
            # before may not be stored: nothing of it is kept, and a new one is begun.
            missed = ~obs["is_first"] & ~self._carries.known(envids)
            if is_eval.all() or not is_eval.any():
                actions, outs = self._policy(envids, seen, "eval" if is_eval[0] else "train")
            else:
                actions, outs = self._mixed_policy(envids, seen, is_eval)
        logs = {k: v for k, v in obs.items() if k in _LOGGED or k.startswith("log/")}
        transitions = _Transitions(envids, is_eval, {**seen, **actions, **outs}, logs)
        if missed.any():
            transitions = transitions.where(~missed)
        return {**actions, "reset": obs["is_last"] | missed}, transitions

    def _policy(self, envids: NDArray[Any], obs: Arrays, mode: Mode) -> tuple[Arrays, Arrays]:
        carry, slots = self._carries.take(envids, obs["is_first"])
        carry, actions, outs = self._agent.policy(carry, obs, mode)
        self._carries.put(slots, carry)
        return actions, outs

    def _mixed_policy(
        self, envids: NDArray[Any], obs: Arrays, is_eval: NDArray[np.bool_]
    ) -> tuple[Arrays, Arrays]:
        """Training and evaluation rows, a policy call for each, put together again."""
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

    def post(self, transitions: _Transitions) -> None:
        """Send a batch to replay and logger, in order. Waits when the replay lets nothing in."""
        try:
            if self._progress.error is None and len(transitions.envids):
                self._post(transitions)
        except Exception as error:
            self._progress.fail(error)
            raise
        finally:
            with self._posted:
                self._unposted -= 1
                self._posted.notify_all()

    def _post(self, t: _Transitions) -> None:
        while self._sent and self._sent[0].done():
            self._sent.popleft().result()
        for is_eval in (False, True):
            rows = t.is_eval == is_eval
            if rows.all():
                self._add(t.steps, t.envids, is_eval)
            elif rows.any():
                self._add({k: v[rows] for k, v in t.steps.items()}, t.envids[rows], is_eval)
        # Counted before the logger hears of it, so that the newest line has the newest step.
        step = self._progress.advance(int((~t.is_eval).sum()))
        self._sent.append(self._logger.call("tran", step, t.envids, t.is_eval, t.logs))

    def _add(self, steps: Arrays, envids: NDArray[Any], is_eval: bool) -> None:
        self._sequence += 1
        self._sent.append(
            self._replay.call("add_batch", steps, envids, is_eval, self._source, self._sequence)
        )

    def housekeeping(self, server: BatchServer) -> None:
        """Forget environments that have gone, and tell the logger how the actor is doing."""
        with self._policy_lock:
            silent = self._carries.silent()
            self._carries.evict(self._args.episode_timeout)
            count = len(self._carries)
        replay = self._replay.stats()
        stats = server.stats()
        then, items, batches = self._previous
        now = time.monotonic()
        self._previous = now, stats["act/items"], stats["act/batches"]
        metrics = {
            "actor/steps_per_second": (stats["act/items"] - items) / (now - then),
            "actor/batches_per_second": (stats["act/batches"] - batches) / (now - then),
            "actor/fill": stats["act/fill"],
            "actor/wait_seconds": stats["act/wait"],
            "actor/policy_seconds": stats["act/work"],
            "actor/environments": float(count),
            **{f"actor/replay_client/{k}": v for k, v in replay.items()},
            "actor/waiting": actor_waits(
                self._args, silent, int(stats["act/waiting"]), replay, _REPLAY_BACKLOG
            ),
        }
        try:
            self._logger.call("add", self._progress.step, metrics)
        except Exception as error:
            self._progress.fail(error)

    def hand_over(self) -> None:
        """Wait until replay and logger have everything.

        The server has ended, but not necessarily what follows its batches: the replay may let
        nothing in at the moment, or be away, and come back only if failures are mended.
        """
        seconds = _HAND_OVER_SECONDS["restart" if self._connected else self._args.on_failure]
        with self._posted:
            if not self._posted.wait_for(lambda: not self._unposted, seconds):
                raise ActorFailed(f"{self._unposted} batches of steps could not be stored.")
        while self._sent:
            self._sent.popleft().result(seconds)

    @property
    def _connected(self) -> bool:
        return bool(self._replay.stats()["connected"] and self._logger.stats()["connected"])
