"""How actors in processes of their own act with the learner's parameters.

While it trains, the learner takes the agent's `policy_state` about once a second, and offers it
with a version number (`ParameterServer`). Actors ask for it as often (`Follower`). They report
their steps to the same server, which counts them (`SharedProgress`) and says when the run is over.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypedDict

import numpy as np

from dreamfleet.agents.api import Agent, Flat, Player, load_policy, policy_state
from dreamfleet.config import RunConfig
from dreamfleet.roles.addresses import listen_address, publish_address, server_name
from dreamfleet.roles.checks import Count, Name, Owners, require
from dreamfleet.roles.health import Health
from dreamfleet.roles.progress import Progress, SharedProgress
from dreamfleet.transport import Caller, Closed, Server

log = logging.getLogger(__name__)

_EVERY_SECONDS = 1.0
_SHARE = 20  # taking and sending parameters may cost the learner one part in so many
_LOST_SECONDS = 10.0  # an actor reports every second
_PIECE_BYTES = 128 << 20  # half of what a frame of a message may hold


@dataclass
class _Actor:
    """What the learner knows of an actor."""

    source: str
    """Another one after each start."""
    steps: int = 0
    """Those that were counted."""
    unstored: int = 0
    busy: bool = True
    failures: int = 0
    env_steps: float = 0.0
    present: int = 0
    seen: float = 0.0


class Report(TypedDict):
    """What an actor tells the learner."""

    learner: str
    actor: Name
    source: Name
    steps: Count
    unstored: Count
    busy: bool
    reached: bool
    failures: Count
    env_steps: float
    present: Count


class ParameterServer:
    """The learner's parameters and the run's step counter, for the actors of other processes.

    Args:
        agent: Whose parameters they are. It is asked for them by the thread that trains it.
        args: The run.
        progress: The run's.
        updates: How many updates the learner has made.
    """

    def __init__(
        self, agent: Agent, args: RunConfig, progress: Progress, updates: Callable[[], int]
    ) -> None:
        self._agent, self._args, self._progress, self._updates = agent, args, progress, updates
        self._id = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._actors: dict[str, _Actor] = {}
        self._offer: dict[str, Any] = {"learner": self._id, "version": 0}
        self._due = 0.0
        self._server = Server(listen_address(args, "learner"), "learner", keys=args.server_keys)
        server = self._server
        self._names = [server_name("actor", number) for number in range(args.actors)]
        self._owners = Owners(
            lambda connection: server.between_calls(lambda: server.connected(connection))
        )
        self._server.bind("report", self.report, pass_caller=True)
        self._server.bind("parameters", self.parameters, workers=1)

    def __enter__(self) -> Self:
        self.publish()
        self._progress.actors_busy = self.busy
        self._progress.failures_elsewhere = self.failures
        self._progress.present_elsewhere = self.present
        self._server.start(block=False)
        publish_address(self._args, "learner", self._server.address)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.close()

    def publish(self) -> None:
        """Offer the agent's parameters of this moment, if they are new and it is time."""
        start, updates = time.monotonic(), self._updates()
        if start < self._due or self._offer.get("updates") == updates:
            return
        self._offer = {
            "learner": self._id,
            "version": self._offer["version"] + 1,
            "updates": updates,
            "state": packed(policy_state(self._agent)),
            "taken": start,
        }
        now = time.monotonic()
        self._due = now + max(_EVERY_SECONDS, _SHARE * (now - start))

    # --- what actors call ------------------------------------------------------------------------

    def parameters(self) -> dict[str, Any]:
        """The newest parameters: their `version`, the `updates` that made them, `age` in seconds
        and `state`."""
        offer = self._offer
        return {**offer, "age": time.monotonic() - offer["taken"]}

    def report(self, caller: Caller, message: Report) -> dict[str, Any]:
        """Count an actor's steps, if it knows which learner this is; returns where the run is."""
        require(message["actor"] in self._names[1:], "The run has no such actor.")
        number, first = np.array([self._names.index(message["actor"])]), np.ones(1, bool)
        self._owners.claim(caller, number, first, key=message["source"].encode())
        if message["learner"] == self._id:
            self._count(message)
        progress = self._progress
        over = progress.finished.is_set() and progress.error is None
        return {
            "learner": self._id,
            "step": progress.step,
            "updates": self._updates(),
            "version": self._offer["version"],
            "begun": progress.begun,
            "finished": over,
            "stopped": over and progress.stopped,
        }

    def _count(self, message: Report) -> None:
        with self._lock:
            name, source = message["actor"], message["source"]
            actor = self._actors.get(name)
            if actor is None or actor.source != source:
                if actor is not None and actor.busy:
                    lost = min(actor.steps, actor.unstored)
                    log.info("%s was started again; up to %d of its steps are lost.", name, lost)
                    self._progress.retract(lost)
                actor = self._actors[name] = _Actor(source)
            new, actor.steps = message["steps"] - actor.steps, message["steps"]
            actor.unstored, actor.busy = message["unstored"], message["busy"]
            actor.failures, actor.env_steps = message["failures"], message["env_steps"]
            actor.present, actor.seen = message["present"], time.monotonic()
            self._progress.advance(new)
        if message["reached"] and not self._progress.finished.is_set():
            log.info("The target score of %g is reached.", self._args.target_score)
            self._progress.finish()

    # --- what the agent's process asks -----------------------------------------------------------

    def busy(self) -> bool:
        """Whether actors that are there have steps that are not stored yet."""
        with self._lock:
            since = time.monotonic() - _LOST_SECONDS
            return any(actor.busy and actor.seen > since for actor in self._actors.values())

    def present(self) -> int:
        """Environments of actors that are there."""
        with self._lock:
            since = time.monotonic() - _LOST_SECONDS
            return sum(each.present for each in self._actors.values() if each.seen > since)

    def failures(self) -> tuple[int, float]:
        """Failures of the environments of these actors, and their steps."""
        with self._lock:
            actors = self._actors.values()
            return sum(each.failures for each in actors), sum(each.env_steps for each in actors)


class Follower:
    """Keeps the parameters of an actor near those of the learner, with a thread of its own.

    Args:
        agent: Acts; it is given parameters while the lock is free.
        progress: The actor's, which talks to the learner.
        lock: Held while the agent chooses actions.
        health: Told when there is progress.
    """

    def __init__(
        self,
        agent: Player,
        progress: SharedProgress,
        lock: threading.Lock,
        health: Health,
    ) -> None:
        self._agent, self._progress = agent, progress
        self._lock, self._health = lock, health
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
            log.exception("The learner cannot be followed.")
            self._progress.fail(error)

    def _load(self) -> None:
        """Take the learner's parameters over if they are others."""
        heard = self._progress.heard
        if not heard or (heard["learner"], heard["version"]) == self._version:
            return
        if (offer := self._progress.ask("parameters")) is None:
            return
        state = unpacked(offer["state"])
        with self._lock:
            load_policy(self._agent, state)
        self._made = time.monotonic() - offer["age"]
        self._version, self._updates = (offer["learner"], offer["version"]), offer["updates"]
        self._loaded.set()


def packed(state: Flat) -> dict[str, Any]:
    """A state as it is sent: plain values, arrays, and those that are too large for a frame in
    pieces."""
    return {name: _packed(value) for name, value in state.items()}


def _packed(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return value
    array = np.asarray(value)
    if array.nbytes <= _PIECE_BYTES:
        return array
    flat, size = np.ravel(array), _PIECE_BYTES // array.itemsize
    pieces = [flat[start : start + size] for start in range(0, len(flat), size)]
    return {"shape": list(array.shape), "pieces": pieces}


def unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state that `packed` made this of."""
    return {
        name: np.concatenate(value["pieces"]).reshape(value["shape"])
        if isinstance(value, dict)
        else value
        for name, value in state.items()
    }
