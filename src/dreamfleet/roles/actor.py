"""The actor role: answers observations with actions, and passes transitions on."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Agent, Arrays, Mode
from dreamfleet.config import RunConfig
from dreamfleet.errors import DreamfleetError
from dreamfleet.roles.camera import Camera
from dreamfleet.roles.carries import Carries
from dreamfleet.roles.outbox import IN_FLIGHT, Outbox, Transitions
from dreamfleet.roles.padding import padded_policy, policy_sizes
from dreamfleet.roles.progress import Progress
from dreamfleet.roles.waiting import actor_waits
from dreamfleet.transport import BatchServer, Client

log = logging.getLogger(__name__)

_HAND_OVER_SECONDS = {"restart": 60.0, "stop": 1.0}
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
        Client(args.replay_addr, "actor-replay", IN_FLIGHT, keys=args.run_keys) as replay,
        Client(args.logger_addr, "actor-logger", 8, keys=args.run_keys) as logger,
    ):
        acting = Acting(agent, args, progress, replay, logger)
        server = BatchServer(args.actor_addr, "actor", args.run_keys)
        server.bind(
            "act",
            acting.work,
            batch=args.policy_batch,
            wait=args.actor_wait,
            workers=args.actor_threads,
        )
        with server:
            while not progress.finished.wait(args.log_every):
                acting.housekeeping(server)
            if progress.error is None:
                acting.housekeeping(server)
            else:
                acting.drop()
        if progress.error is None:
            acting.hand_over()


class Acting:
    """Policy calls, with the memory of each environment before them and what follows them."""

    def __init__(
        self, agent: Agent, args: RunConfig, progress: Progress, replay: Client, logger: Client
    ) -> None:
        self._agent, self._args, self._progress = agent, args, progress
        self._replay, self._logger = replay, logger
        self._carries = Carries(agent, max(16, 2 * args.all_envs))
        self._policy_lock = threading.Lock()
        self._sizes = policy_sizes(args)
        self._outbox = Outbox(
            replay,
            logger,
            Camera(args.report_every),
            rows=args.limiter_tolerance,
            step=lambda: progress.step,
            heard=self._heard,
            failed=progress.fail,
        )
        self._previous = (time.monotonic(), 0.0, 0.0)

    def work(self, obs: dict[str, Any]) -> tuple[Arrays, None]:
        """Actions for a batch of observations. What follows is put into the outbox, which is as
        good as nothing to wait for while replay and logger keep up."""
        try:
            return self._work(obs), None
        except Exception as error:
            self._progress.fail(error)
            raise ActorFailed(f"The policy failed: {error!r}.") from error

    def _work(self, obs: dict[str, Any]) -> Arrays:
        envids, is_eval = obs.pop("envid"), obs.pop("is_eval")
        evaluated, count = int(np.count_nonzero(is_eval)), len(envids)
        seen = {key: value for key, value in obs.items() if not key.startswith("log/")}
        with self._policy_lock:
            # Of an episode whose beginning this actor has not seen it knows no state, and what came
            # before may not be stored: nothing of it is kept, and a new one is begun.
            missed = ~obs["is_first"] & ~self._carries.known(envids)
            if evaluated in (0, count):
                actions, outs = self._policy(envids, seen, "eval" if evaluated else "train")
            else:
                actions, outs = self._mixed_policy(envids, seen, is_eval)
        logs = {k: v for k, v in obs.items() if k in _LOGGED or k.startswith("log/")}
        transitions = Transitions(envids, is_eval, {**seen, **actions, **outs}, logs)
        if missed.any():
            transitions = transitions.where(~missed)
        if len(transitions.envids) and self._outbox.put(transitions):
            self._progress.advance(int(np.count_nonzero(~transitions.is_eval)))
        return {**actions, "reset": obs["is_last"] | missed}

    def _policy(self, envids: NDArray[Any], obs: Arrays, mode: Mode) -> tuple[Arrays, Arrays]:
        carry, slots = self._carries.take(envids, obs["is_first"])
        carry, actions, outs = padded_policy(self._agent, self._sizes, carry, obs, mode)
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

    def _heard(self, target_reached: bool) -> None:
        """What the logger answers to transitions."""
        if target_reached and not self._progress.finished.is_set():
            log.info("The target score of %g is reached.", self._args.target_score)
            self._progress.finish()

    def housekeeping(self, server: BatchServer) -> None:
        try:
            self._housekeeping(server)
        except Exception as error:
            self._progress.fail(error)

    def _housekeeping(self, server: BatchServer) -> None:
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
        metrics: dict[str, Any] = {
            "actor/steps_per_second": (stats["act/items"] - items) / (now - then),
            "actor/batches_per_second": (stats["act/batches"] - batches) / (now - then),
            "actor/fill": stats["act/fill"],
            "actor/wait_seconds": stats["act/wait"],
            "actor/policy_seconds": stats["act/work"],
            "actor/environments": float(count),
            **{f"actor/server/{k}": v for k, v in stats.items() if "/" not in k},
            **{f"actor/replay_client/{k}": v for k, v in replay.items()},
            **{f"actor/logger_client/{k}": v for k, v in self._logger.stats().items()},
            "actor/waiting": actor_waits(
                self._args, silent, int(stats["act/waiting"]), replay, IN_FLIGHT
            ),
        }
        self._logger.call("add", self._progress.step, metrics)

    def hand_over(self) -> None:
        """Wait until replay and logger have everything that was answered.

        One of them may be away, and comes back only if failures are mended.
        """
        here = self._replay.stats()["connected"] and self._logger.stats()["connected"]
        self._outbox.hand_over(_HAND_OVER_SECONDS["restart" if here else self._args.on_failure])

    def drop(self) -> None:
        """Let nobody wait for replay or logger any longer: the run has failed."""
        self._outbox.drop()
