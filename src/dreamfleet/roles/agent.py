"""The agent role: an actor thread and a learner thread that share one agent."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from dreamfleet.agents.api import Agent
from dreamfleet.clock import LocalClock
from dreamfleet.config import RunConfig
from dreamfleet.roles.actor import parallel_actor
from dreamfleet.roles.addresses import find_server
from dreamfleet.roles.hosts import Hosts, hosts_of
from dreamfleet.roles.learner import parallel_learner
from dreamfleet.roles.progress import Progress
from dreamfleet.roles.runtime import (
    STOPPED,
    Factory,
    process_was_asked_to_stop,
    stop_event,
    unpack,
)
from dreamfleet.transport import Client, TransportError

log = logging.getLogger(__name__)

_LOOK_SECONDS, _ACTORS_SECONDS = 1.0, 0.05
_KEEP_UP_SECONDS = 5.0


def parallel_agent(make_agent: Factory, args: RunConfig) -> None:
    """Act and learn until there were enough steps, or until the process is asked to stop.

    Returns when everything that was collected is in the replay and the agent is saved; raises the
    first error of either thread.

    Args:
        make_agent: Returns the agent.
        args: The run.
    """
    # With several hosts all of them decide together when there are enough.
    progress = Progress(args.steps if args.hosts == 1 else 0)
    stop_event(on_stop=progress.stop)
    with hosts_of(args) as hosts:
        if hosts.count > 1:
            args.agent_type.join_hosts(
                hosts.index, hosts.count, hosts.meeting("agent"), hosts.address
            )
        with _leaving_if_it_fails(hosts):
            _act_and_learn(unpack(make_agent)(), args, progress, hosts)


@contextmanager
def _leaving_if_it_fails(hosts: Hosts) -> Iterator[None]:
    """With several hosts, leave the process at once if the block fails: JAX would wait for the
    others at its end, and they for this one."""
    try:
        yield
    except Exception:
        if hosts.count == 1 or threading.current_thread() is not threading.main_thread():
            raise
        traceback.print_exc()
        logging.shutdown()
        sys.stderr.flush()
        os._exit(1)


def _act_and_learn(agent: Agent, args: RunConfig, progress: Progress, hosts: Hosts) -> None:
    barrier = threading.Barrier(2)

    def guarded(role: Callable[..., None], *more: Any) -> None:
        try:
            role(agent, barrier, args, progress, *more)
        except threading.BrokenBarrierError:
            log.info("%s ends because the other thread failed.", role.__name__)
        except BaseException as error:
            progress.fail(error)
            barrier.abort()

    actor, learner = (
        threading.Thread(target=guarded, args=role, name=role[0].__name__, daemon=True)
        for role in ((parallel_actor,), (parallel_learner, hosts))
    )
    actor.start()
    learner.start()
    progress.finished.wait()

    def sending() -> bool:
        """Whether an actor has not sent all that it has; looks for a moment."""
        actor.join(_ACTORS_SECONDS)
        if actor.is_alive():
            return True
        return learner.is_alive() and progress.error is None and progress.actors_busy()

    if not progress.acting:
        _leave_if_unprepared(progress)
    _wait_while(sending, progress, args)
    progress.sent = True
    while learner.is_alive() and (not progress.prepared or progress.updates_left()):
        _leave_if_unprepared(progress)
        learner.join(_LOOK_SECONDS)
    if hosts.count == 1:  # several end together
        progress.end_learning()
    learner.join()
    if progress.error is not None:
        raise progress.error


def _leave_if_unprepared(progress: Progress) -> None:
    """Leave the process if it is asked to stop while it compiles, which may take a minute."""
    if progress.stopped and not progress.prepared and process_was_asked_to_stop():
        log.info("The agent is stopped before its first update: nothing is saved.")
        logging.shutdown()
        os._exit(STOPPED)


def _wait_while(sending: Callable[[], bool], progress: Progress, args: RunConfig) -> None:
    """Wait until actors have sent what they have.

    The replay holds them back while learning is behind, so the learner goes on meanwhile. A run
    that is asked to stop does not wait long for it: then the replay takes all that is left at once.
    """
    deadline = time.monotonic() + _KEEP_UP_SECONDS
    may_ask = LocalClock(_LOOK_SECONDS, first=True)  # again and again: it may be restarted
    with ExitStack() as stack:
        replay: Client | None = None
        while sending():
            if not progress.stopped or time.monotonic() < deadline or not may_ask():
                continue
            if replay is None:
                replay = Client(find_server(args, "replay"), "agent-end", keys=args.run_keys)
                stack.callback(replay.close, 0.0)
                log.info("Learning is behind: the replay stores the remaining steps at once.")
            with suppress(TransportError):
                replay.call("release").wait(_LOOK_SECONDS)
