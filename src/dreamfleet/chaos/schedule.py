"""What happens to a fleet, and in which order: decided by a seed, and by the fleet's roles.

Faults are dealt from a deck that holds every kind for every worker and server, shuffled; then from
the next one. So a long run has all of them, and the same seed makes the same faults. (The same
faults do not make the same run: processes take turns as the machine likes.)
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dreamfleet.chaos.fleet import SUPERVISOR

Kind = Literal[
    "kill", "terminate", "stop", "cut", "half-cut", "stall", "refuse", "lose", "attack", "fill"
]
Moment = Literal["now", "restart", "compile", "save"]
"""When a signal is sent: at once, while the process is starting again after an earlier one, while
the agent compiles, or while a checkpoint is written."""


_LOSSES = 10  # of a deck: after four of them every method had its turns
_SILENT = (16.0, 22.0)  # seconds after which heartbeats have given a process up


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    kind: Kind
    targets: tuple[str, ...] = ()
    """Workers, which are hit at the same time, or a server. Which call is lost is decided when it
    comes to that: each has its turn."""
    seconds: float = 0.0
    """How long it lasts; how long after a restart it comes."""
    moment: Moment = "now"
    way: Literal["up", "down", "both"] = "both"
    """Of connections: towards the server, or back."""

    def __str__(self) -> str:
        words = [self.kind, " and ".join(self.targets)]
        if self.moment != "now":
            words.append(f"at {self.moment}")
        if self.way != "both":
            words.append(self.way)
        return " ".join(filter(None, words))


def schedule(
    seed: int, workers: Sequence[str], servers: Sequence[str], *, threads: bool = False
) -> Iterator[Fault]:
    """Faults without an end. Signals cannot tell workers apart that are threads of one process."""
    rng = random.Random(seed)
    while True:
        deck = list(_whole_fleet(servers, rng))
        if not threads:
            deck += [*_processes(workers, rng), *_network(servers, rng)]
        rng.shuffle(deck)
        yield from deck


def _whole_fleet(servers: Sequence[str], rng: random.Random) -> Iterator[Fault]:
    yield Fault("kill", (SUPERVISOR,))
    yield Fault("terminate", (SUPERVISOR,))
    yield Fault("fill", seconds=rng.uniform(0.5, 2.5))
    for server in servers:
        yield Fault("attack", (server,))


def _processes(workers: Sequence[str], rng: random.Random) -> Iterator[Fault]:
    for worker in workers:
        yield Fault("kill", (worker,))
        yield Fault("terminate", (worker,))
        yield Fault("stop", (worker,), rng.uniform(0.2, 3.0))
    saving = [name for name in workers if name.startswith(("agent", "replay"))]
    for worker in (rng.choice(workers), *saving):
        yield Fault("kill", (worker,), rng.uniform(0.0, 1.5), moment="restart")
    for worker in saving:
        yield Fault("kill", (worker,), moment="save")
    yield Fault("kill", ("agent",), moment="compile")
    for _ in range(2):
        yield Fault("kill", _pair(workers, rng))
    yield Fault("terminate", _pair(workers, rng))
    yield Fault("stop", _pair(workers, rng), rng.uniform(0.2, 2.0))
    yield Fault("stop", (rng.choice(workers),), rng.uniform(*_SILENT))


def _pair(workers: Sequence[str], rng: random.Random) -> tuple[str, ...]:
    return tuple(rng.sample(workers, 2))


def _network(servers: Sequence[str], rng: random.Random) -> Iterator[Fault]:
    for server in servers:
        yield Fault("cut", (server,))
        yield Fault("half-cut", (server,), way=rng.choice(("up", "down")))
        yield Fault("stall", (server,), rng.uniform(0.2, 2.0), way=rng.choice(("up", "down")))
    server = rng.choice(servers)
    yield Fault("stall", (server,), rng.uniform(0.2, 2.0))
    yield Fault("refuse", (server,), rng.uniform(0.2, 2.0))
    for _ in range(_LOSSES):
        yield Fault("lose")
