"""The agent role: an actor thread and a learner thread that share one agent."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from dreamfleet.agents.api import Agent
from dreamfleet.config import RunConfig
from dreamfleet.roles.actor import parallel_actor
from dreamfleet.roles.learner import parallel_learner
from dreamfleet.roles.progress import Progress
from dreamfleet.roles.runtime import (
    POLL_SECONDS,
    STOPPED,
    Factory,
    process_was_asked_to_stop,
    stop_event,
    unpack,
)
from dreamfleet.roles.scaling.sync import Sync, sync_of

log = logging.getLogger(__name__)


def parallel_agent(make_agent: Factory, args: RunConfig) -> None:
    """Act and learn until there were enough steps, or until the process is asked to stop.

    Returns when everything that was collected is in the replay and the agent is saved; raises the
    first error of either thread.
    """
    # With several hosts all of them decide together when there are enough.
    progress = Progress(args.steps if args.hosts == 1 else 0)
    stop_event(on_stop=progress.stop)
    with sync_of(args) as sync:
        _act_and_learn(unpack(make_agent)(), args, progress, sync)


def _act_and_learn(agent: Agent, args: RunConfig, progress: Progress, sync: Sync) -> None:
    barrier = threading.Barrier(2)

    def guarded(role: Callable[..., None], *more: Any) -> None:
        try:
            role(agent, barrier, args, progress, *more)
        except threading.BrokenBarrierError:
            log.info("%s ends before it began: the other thread does.", role.__name__)
        except BaseException as error:
            progress.fail(error)
            barrier.abort()

    actor, learner = (
        threading.Thread(target=guarded, args=role, name=role[0].__name__, daemon=True)
        for role in ((parallel_actor,), (parallel_learner, sync))
    )
    progress.senders.append(actor.is_alive)
    actor.start()
    learner.start()
    progress.finished.wait()
    while learner.is_alive():  # the learner makes the end, see `Progress`
        _leave_if_unprepared(progress, barrier, actor)
        learner.join(POLL_SECONDS)
    progress.wait_no_longer()
    actor.join(progress.seconds_left())
    if progress.error is not None:
        raise progress.error


def _leave_if_unprepared(
    progress: Progress, barrier: threading.Barrier, actor: threading.Thread
) -> None:
    """Leave the process if it is asked to stop while it compiles, which may take a minute. The
    actor of an agent that was restarted acts meanwhile: what it has collected is sent before."""
    if progress.prepared or not (progress.stopped and process_was_asked_to_stop()):
        return
    barrier.abort()
    actor.join(progress.seconds_left())
    with progress.preparing:  # the learner saves nothing that would be cut off
        if not progress.prepared:
            log.info("The agent is stopped before its first update: nothing is saved.")
            logging.shutdown()
            os._exit(STOPPED)
