"""The agent role: an actor thread and a learner thread that share one agent."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from dreamfleet.config import RunConfig
from dreamfleet.roles.actor import parallel_actor
from dreamfleet.roles.learner import parallel_learner
from dreamfleet.roles.progress import Progress
from dreamfleet.roles.runtime import Factory, exit_if_asked_to_stop, stop_event, unpack

log = logging.getLogger(__name__)

_LOOK_SECONDS, _ACTORS_SECONDS = 1.0, 0.05


def parallel_agent(make_agent: Factory, args: RunConfig) -> None:
    """Act and learn until there were enough steps, or until the process is asked to stop.

    Returns when everything that was collected is in the replay and the agent is saved; raises the
    first error of either thread.

    Args:
        make_agent: Returns the agent.
        args: The run.
    """
    progress = Progress(args.steps)
    stop_event(on_stop=progress.stop)
    agent = unpack(make_agent)()
    barrier = threading.Barrier(2)

    def guarded(role: Callable[..., None]) -> None:
        try:
            role(agent, barrier, args, progress)
        except threading.BrokenBarrierError:
            log.info("%s ends because the other thread failed.", role.__name__)
        except BaseException as error:
            progress.fail(error)
            barrier.abort()

    actor, learner = (
        threading.Thread(target=guarded, args=[role], name=role.__name__, daemon=True)
        for role in (parallel_actor, parallel_learner)
    )
    actor.start()
    learner.start()
    progress.finished.wait()
    if progress.stopped and not progress.prepared:
        log.info("The agent is asked to stop before it has learned anything: nothing is saved.")
        exit_if_asked_to_stop()  # compiling may take a minute
    actor.join()
    while learner.is_alive() and progress.error is None and progress.actors_busy():
        learner.join(_ACTORS_SECONDS)
    while learner.is_alive() and progress.updates_left():
        learner.join(_LOOK_SECONDS)
    progress.end_learning()
    learner.join()
    if progress.error is not None:
        raise progress.error
