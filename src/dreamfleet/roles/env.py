"""The environment role: steps environments with the actions that the actor sends."""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.config import RunConfig
from dreamfleet.envs.base import noop
from dreamfleet.roles.addresses import find_server
from dreamfleet.roles.runtime import Factory, close_when_stopped, stop_event, unpack
from dreamfleet.spaces import without_reset
from dreamfleet.transport import Client, Closed, Disconnected, RemoteError

log = logging.getLogger(__name__)

ACTOR_FAILED = "ActorFailed"
"""The kind of the error that an actor replies with when the fault is its own."""
_FIRST_TIMEOUT = 3600.0
_PAUSE = 1.0


def parallel_env(
    make_env: Factory, envid: int | Sequence[int], args: RunConfig, is_eval: bool = False
) -> None:
    """Run one environment, or several in lock-step, until the process is asked to stop.

    An environment that raises ends the process, and so does one that hangs (`env_timeout`);
    whoever supervises it starts it again.

    When the connection to the agent is lost, the running episodes are given up and all environments
    are reset as soon as it is back: nobody knows whether it received the last observations.

    Args:
        make_env: Called with an environment's id, returns the environment.
        envid: Unique in the run; several share a process and a message.
        args: The run; tells where the actions come from.
        is_eval: Whether the data is for evaluation.
    """
    ids = [envid] if isinstance(envid, int) else list(envid)
    stop = stop_event(exit_process=True)
    make = unpack(make_env)
    watchdog = Watchdog(args.env_timeout)
    envs = []
    for each in ids:
        watchdog.reset(now=True)
        envs.append(make(each))
    watchdog.pause()
    block = ObservationBlock(ids, is_eval)
    server = find_server(args, "actor")
    with Client(server, f"env-{ids[0]}", keys=args.run_keys) as client:
        close_when_stopped(client)
        try:
            client.connect(_FIRST_TIMEOUT)
            _step_all(envs, block, client, stop, watchdog)
        except Closed:
            if not stop.is_set():
                raise
        finally:
            watchdog.pause()
            for env in envs:
                if close := getattr(env, "close", None):  # which an environment need not have
                    close()


def _step_all(
    envs: list[Any],
    block: ObservationBlock,
    client: Client,
    stop: threading.Event,
    watchdog: Watchdog,
) -> None:
    resets = [noop(without_reset(env.act_space)) for env in envs]
    actions: list[Any] = resets
    while not stop.is_set():
        watchdog.reset()
        obs = block.fill([env.step(action) for env, action in zip(envs, actions, strict=True)])
        try:
            future = client.call_block("act", obs)
            while not future.wait(watchdog.interval):
                watchdog.reset()  # it is the agent that takes long, not the environment
            reply = future.result()
        except Disconnected as error:
            log.warning("The connection to the agent is lost, all environments reset: %s", error)
            actions = resets
        except RemoteError as error:
            if error.kind != ACTOR_FAILED:
                raise
            # The agent process is about to end; whoever supervises it decides what comes next.
            stop.wait(_PAUSE)
            actions = resets
        else:
            actions = [
                {key: value[row] for key, value in reply.items()} for row in range(len(envs))
            ]


class ObservationBlock:
    """The observations of several environments as arrays with a row for each, allocated once."""

    def __init__(self, ids: Sequence[int], is_eval: bool) -> None:
        self._fixed = {
            "envid": np.array(ids, np.int64),
            "is_eval": np.full(len(ids), is_eval),
        }
        self._arrays: dict[str, NDArray[Any]] = {}

    def fill(self, observations: Sequence[dict[str, Any]]) -> dict[str, NDArray[Any]]:
        """One observation of each environment, in the order of their ids."""
        if not self._arrays:
            first = {key: np.asarray(value) for key, value in observations[0].items()}
            size = len(observations)
            self._arrays = {k: np.zeros((size, *v.shape), v.dtype) for k, v in first.items()}
        for row, obs in enumerate(observations):
            for key, array in self._arrays.items():
                array[row] = obs[key]
        return {**self._fixed, **self._arrays}


class Watchdog:
    """Ends this process, with its tracebacks in the log, when it was not reset for a while.

    The timer is a thread of the interpreter that needs no lock of it, so that code that hangs in C
    is ended too. Setting the timer costs a thread, so it is set only now and then. Outside of the
    main thread, where the process holds more than what is watched, nothing is done.

    Args:
        seconds: The timeout; 0 for none.
    """

    _PARTS = 10

    def __init__(self, seconds: float) -> None:
        main = threading.current_thread() is threading.main_thread()
        self._seconds = seconds if main else 0.0
        self._next = 0.0

    @property
    def interval(self) -> float | None:
        """Seconds to wait for others at most before the next reset; None for no limit."""
        return self._seconds / self._PARTS if self._seconds else None

    def reset(self, *, now: bool = False) -> None:
        """Start the timeout again; with `now` exactly now, otherwise up to a tenth later."""
        if not self._seconds:
            return
        time_now = time.monotonic()
        if time_now >= self._next or now:
            self._next = time_now + self._seconds / self._PARTS
            # Longer by a part: resets within the interval do not set the timer.
            faulthandler.dump_traceback_later(self._seconds * (1 + 1 / self._PARTS), exit=True)

    def pause(self) -> None:
        """Stop watching until the next reset."""
        if self._seconds:
            faulthandler.cancel_dump_traceback_later()
            self._next = 0.0
