"""The learner's side of actors in processes of their own (`scaling.remote_actor`).

While it trains, the learner takes the agent's `policy_state` about once a second, and offers it
with a version number. Actors ask for it as often, and hear whether the run is over.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, TypedDict

import numpy as np

from dreamfleet.agents.api import Agent, Flat, policy_state
from dreamfleet.config import RunConfig
from dreamfleet.roles.addresses import listen_address, publish_address, server_name
from dreamfleet.roles.checks import Count, Name, require
from dreamfleet.roles.progress import Progress
from dreamfleet.roles.saver import Saver
from dreamfleet.transport import Server

log = logging.getLogger(__name__)

_EVERY_SECONDS = 1.0
_SHARE = 20  # taking and sending parameters may cost the learner one part in so many
_LOST_SECONDS = 10.0  # an actor reports every second
_PIECE_BYTES = 128 << 20  # half of what a frame of a message may hold


class Report(TypedDict):
    """What an actor tells the learner."""

    actor: Name
    busy: bool
    reached: bool
    present: Count


@contextmanager
def serve_parameters(
    agent: Agent, args: RunConfig, progress: Progress, saver: Saver
) -> Iterator[Callable[[], None]]:
    """Serve further actors, if the run has any; yields what is called after each update."""
    if args.actors == 1:
        yield lambda: None
        return
    with ParameterServer(agent, args, progress, lambda: saver.updates) as server:
        yield server.publish


class ParameterServer:
    """The learner's parameters, for the actors of other processes."""

    def __init__(
        self, agent: Agent, args: RunConfig, progress: Progress, updates: Callable[[], int]
    ) -> None:
        self._agent, self._args, self._progress, self._updates = agent, args, progress, updates
        self._id = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._actors: dict[str, tuple[Report, float]] = {}  # the last report of each, and when
        self._offer: dict[str, Any] = {"learner": self._id, "version": 0}
        self._due = 0.0
        self._names = [server_name("actor", number) for number in range(args.actors)]
        server = Server(listen_address(args, "learner"), "learner", keys=args.server_keys)
        server.bind("report", self.report)
        server.bind("parameters", self.parameters, workers=1)
        self._server = server

    def __enter__(self) -> Self:
        self.publish()
        self._progress.senders.append(self.busy)
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

    def report(self, message: Report) -> dict[str, Any]:
        """Note what an actor says of itself; returns where the run is."""
        require(message["actor"] in self._names[1:], "The run has no such actor.")
        with self._lock:
            self._actors[message["actor"]] = message, time.monotonic()
        progress = self._progress
        if message["reached"] and not progress.finished.is_set():
            log.info("The target score of %g is reached.", self._args.target_score)
            progress.finish()
        over = progress.finished.is_set() and progress.error is None
        return {
            "learner": self._id,
            "elsewhere": progress.elsewhere,
            "updates": self._updates(),
            "version": self._offer["version"],
            "begun": progress.begun,
            "finished": over,
            "stopped": over and progress.stopped,
        }

    # --- what the agent's process asks -----------------------------------------------------------

    def busy(self) -> bool:
        """Whether other actors still send what they have."""
        return any(report["busy"] for report in self._reports())

    def present(self) -> int:
        """Their environments that are there."""
        return sum(report["present"] for report in self._reports())

    def _reports(self) -> list[Report]:
        """The last reports of actors that were heard of lately."""
        with self._lock:
            since = time.monotonic() - _LOST_SECONDS
            return [report for report, seen in self._actors.values() if seen > since]


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
