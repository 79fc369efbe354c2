"""The role of the further actors: one in a process of its own, with the learner's parameters."""

from __future__ import annotations

import logging
import threading

from dreamfleet.agents.api import compile_policy
from dreamfleet.config import RunConfig
from dreamfleet.roles.actor import serve_actor
from dreamfleet.roles.addresses import find_server, server_name
from dreamfleet.roles.health import Health, health_path
from dreamfleet.roles.parameters import Follower
from dreamfleet.roles.policy_batches import policy_sizes
from dreamfleet.roles.progress import SharedProgress
from dreamfleet.roles.runtime import Factory, stop_event, takes, unpack
from dreamfleet.transport import Client

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2


def parallel_remote_actor(make_agent: Factory, index: int, args: RunConfig) -> None:
    """Serve actions to the environments of one of the actors, until the process is asked to stop.

    When the run is over, it sends what it has and waits. A learner that goes on, because the
    agent's process was started again, finds it ready.

    Args:
        make_agent: Returns the agent. If it takes `actor`, it is told the number, and may return
            what only acts.
        index: Which of the actors, from 1.
        args: The run.
    """
    stop = threading.Event()
    running: list[SharedProgress] = []

    def on_stop() -> None:
        stop.set()
        for progress in running:
            progress.stop()

    stop_event(on_stop=on_stop)
    name = server_name("actor", index)
    health = Health(health_path(args, name))
    make, lock = unpack(make_agent), threading.Lock()
    agent = make(actor=index) if takes(make, "actor") else make()
    with Client(find_server(args, "learner"), f"{name}-learner", keys=args.run_keys) as learner:
        while not stop.is_set():
            progress = SharedProgress(name, args, learner)
            running[:] = [progress]
            if stop.is_set():  # while it was made
                return
            with Follower(agent, progress, lock, health) as follower:
                if follower.wait():
                    with lock:
                        compile_policy(agent, policy_sizes(args, index))

                    def metrics() -> dict[str, float]:
                        return {**agent.metrics(), **follower.metrics()}

                    serve_actor(agent, args, progress, index, lock, metrics)
                progress.busy = False
                while progress.error is None and not stop.wait(_LOOK_SECONDS):
                    if progress.heard and not progress.heard["finished"]:
                        log.info("The run goes on.")
                        break
            if progress.error is not None:
                raise progress.error
        learner.close(flush=0.0)  # it knows all it has to
