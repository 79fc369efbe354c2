"""Further actors, each in a process of its own, with the learner's parameters."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Self

from dreamfleet.agents.api import Player, compile_policy, load_policy
from dreamfleet.config import RunConfig
from dreamfleet.roles.actor import serve_actor
from dreamfleet.roles.addresses import find_server, server_name
from dreamfleet.roles.health import Health, health_path
from dreamfleet.roles.policy_batches import policy_sizes
from dreamfleet.roles.progress import Progress
from dreamfleet.roles.runtime import (
    POLL_SECONDS,
    Factory,
    stop_event,
    takes,
    unpack,
    when_stopped,
)
from dreamfleet.roles.scaling.parameters import unpacked
from dreamfleet.transport import Client, Closed, Disconnected

log = logging.getLogger(__name__)

_EVERY_SECONDS = 1.0  # between two reports


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
    stop = stop_event()
    name = server_name("actor", index)
    health = Health(health_path(args, name))
    make = unpack(make_agent)
    agent = make(actor=index) if takes(make, "actor") else make()
    with Client(find_server(args, "learner"), f"{name}-learner", keys=args.run_keys) as learner:
        while not stop.is_set():
            progress = RemoteProgress(name, args, learner)
            when_stopped(progress.stop)
            with Follower(agent, progress, health) as follower:
                if follower.wait():
                    with progress.policy_lock:
                        compile_policy(agent, policy_sizes(args, index))
                    serve_actor(agent, args, progress, index)
                progress.busy = False
                while progress.error is None and not stop.wait(POLL_SECONDS):
                    if not progress.over():
                        log.info("The run continues.")
                        break
            if progress.error is not None:
                raise progress.error
        learner.close(flush=0.0)  # it knows all it has to


class RemoteProgress(Progress):
    """The progress of a run as an actor in a process of its own knows it: the replay counts its
    steps, and the learner says whether the run begins and ends."""

    def __init__(self, name: str, args: RunConfig, learner: Client) -> None:
        # With several hosts all of them decide together when there are enough.
        super().__init__(args.steps if args.hosts == 1 else 0)
        self.name = name
        self.busy = True
        """Whether there are steps that this actor has not sent yet."""
        self.heard: dict[str, Any] = {}
        """What the learner said last; empty as long as it has said nothing."""
        self._learner = learner
        self._reached = False

    def report(self) -> None:
        """Tell the learner about this actor, and hear from it; waits until it is there. Without it
        an actor that is asked to stop goes on."""
        message = {
            "actor": self.name,
            "busy": self.busy,
            "reached": self._reached,
            "present": self.present,
        }
        if (reply := self.ask("report", message)) is None:
            return
        self.heard, self.elsewhere = reply, reply["elsewhere"]
        if reply["stopped"]:
            self.stop()
        elif reply["finished"]:
            self.finished.set()

    def ask(self, method: str, *args: Any) -> Any:
        """The learner's reply; None if there is no learner, and the run needs none any more."""
        while True:
            try:
                self._learner.connect(POLL_SECONDS)
                future = self._learner.call(method, *args)
                while not future.wait(POLL_SECONDS):
                    if self.finished.is_set() and not self._learner.stats()["connected"]:
                        return None
                return future.result()
            except Disconnected:
                if self.finished.is_set():
                    return None

    def over(self) -> bool:
        """Whether the run is over, as far as this actor has heard."""
        enough = 0 < self._limit <= self.step
        return enough or not self.heard or bool(self.heard["finished"])

    def may_begin(self, present: int, expected: int) -> bool:  # noqa: ARG002 - the learner decides
        self.present = present
        self.begun = bool(self.heard.get("begun"))
        return self.begun

    def finish(self) -> None:
        """The score is reached, as the learner has to know."""
        self._reached = True
        self.report()


class Follower:
    """Keeps the parameters of an actor near those of the learner, with a thread of its own."""

    def __init__(self, agent: Player, progress: RemoteProgress, health: Health) -> None:
        self._agent, self._progress, self._health = agent, progress, health
        progress.policy_metrics = self.metrics
        self._version = ("", 0)
        self._updates, self._made = 0, 0.0
        self._loaded, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="parameters", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def wait(self) -> bool:
        """Wait until the actor may act: it has parameters, and the run is not over."""
        while not self._progress.finished.is_set():
            if self._loaded.wait(_EVERY_SECONDS):
                return not self._progress.finished.is_set()
        return False

    def metrics(self) -> dict[str, float]:
        """How far the parameters are behind those of the learner, as far as that was heard of."""
        return {
            "policy/version": float(self._version[1]),
            "policy/updates_behind": float(self._progress.heard["updates"] - self._updates),
            "policy/seconds_behind": time.monotonic() - self._made,
        }

    def _run(self) -> None:
        try:
            step = 0
            while True:
                self._progress.report()
                self._load()
                if self._progress.step != step:
                    step = self._progress.step
                    self._health.progress()
                if self._ended.wait(_EVERY_SECONDS):
                    return
        except Closed:
            return
        except BaseException as error:
            log.exception("This actor cannot get parameters from the learner.")
            self._progress.fail(error)

    def _load(self) -> None:
        """Take the learner's parameters over if they are others."""
        heard = self._progress.heard
        if not heard or (heard["learner"], heard["version"]) == self._version:
            return
        if (offer := self._progress.ask("parameters")) is None:
            return
        state = unpacked(offer["state"])
        with self._progress.policy_lock:
            load_policy(self._agent, state)
        self._made = time.monotonic() - offer["age"]
        self._version, self._updates = (offer["learner"], offer["version"]), offer["updates"]
        self._loaded.set()
