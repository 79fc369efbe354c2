"""The environment role: steps environments with the actions the actor sends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.config import RunConfig
from dreamfleet.envs.base import noop
from dreamfleet.roles.common import Factory, hang_up_when_stopped, stop_event, unpack
from dreamfleet.roles.watchdog import Watchdog
from dreamfleet.transport import Client, Closed, Disconnected, RemoteError

log = logging.getLogger(__name__)

ACTOR_FAILED = "ActorFailed"
"""The kind of the error an actor answers with when the fault is its own."""
_FIRST_PATIENCE = 3600.0
_PAUSE = 1.0


def parallel_env(
    make_env: Factory, envid: int | Sequence[int], args: RunConfig, is_eval: bool = False
) -> None:
    """Run one environment, or several in lock-step, until the process is asked to end.

    An environment that raises ends the process, and so does one that hangs (`env_timeout`);
    whoever supervises it starts it again.

    When the agent is lost, the running episodes are given up, and new ones begin as soon as it is
    back: nobody knows whether it has seen the last observations.

    Args:
        make_env: Called with an environment's id, returns the environment.
        envid: Unique in the run; several share a process and a message.
        args: `actor_addr` tells where the actions come from.
        is_eval: Whether the data is for evaluation.
    """
    ids = [envid] if isinstance(envid, int) else list(envid)
    stop = stop_event(exit_process=True)
    make = unpack(make_env)
    watchdog = Watchdog(args.env_timeout)
    envs = []
    for each in ids:
        watchdog.pat(force=True)
        envs.append(make(each))
    watchdog.leave()
    rows = Rows(ids, is_eval)
    with Client(args.actor_addr, f"env-{ids[0]}", keys=args.run_keys) as client:
        hang_up_when_stopped(client)
        try:
            client.connect(_FIRST_PATIENCE)
            _play(envs, rows, client, stop, watchdog)
        except Closed:
            if not stop.is_set():
                raise
        finally:
            watchdog.leave()
            for env in envs:
                with suppress(AttributeError):
                    env.close()


def _play(
    envs: list[Any], rows: Rows, client: Client, stop: threading.Event, watchdog: Watchdog
) -> None:
    idle = [noop({k: s for k, s in env.act_space.items() if k != "reset"}) for env in envs]
    actions: list[Any] = idle
    while not stop.is_set():
        watchdog.pat()
        block = rows.fill([env.step(action) for env, action in zip(envs, actions, strict=True)])
        try:
            answer = client.call_block("act", block)
            while not answer.wait(watchdog.interval):
                watchdog.pat()  # it is the agent that takes long, not the environment
            reply = answer.result()
        except Disconnected as error:
            log.warning("The agent is away, episodes begin anew: %s", error)
            actions = idle
        except RemoteError as error:
            if error.kind != ACTOR_FAILED:
                raise
            # The agent process is about to end; whoever supervises it decides what comes next.
            stop.wait(_PAUSE)
            actions = idle
        else:
            actions = [
                {key: value[row] for key, value in reply.items()} for row in range(len(envs))
            ]


class Rows:
    """The observations of several environments as arrays with a row for each, made once."""

    def __init__(self, ids: Sequence[int], is_eval: bool) -> None:
        self._fixed = {
            "envid": np.array(ids, np.int64),
            "is_eval": np.full(len(ids), is_eval),
        }
        self._arrays: dict[str, NDArray[Any]] = {}

    def fill(self, observations: Sequence[dict[str, Any]]) -> dict[str, NDArray[Any]]:
        if not self._arrays:
            first = {key: np.asarray(value) for key, value in observations[0].items()}
            size = len(observations)
            self._arrays = {k: np.zeros((size, *v.shape), v.dtype) for k, v in first.items()}
        for row, obs in enumerate(observations):
            for key, array in self._arrays.items():
                array[row] = obs[key]
        return {**self._fixed, **self._arrays}
