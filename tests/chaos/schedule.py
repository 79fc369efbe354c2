"""Which faults, in which order: decided by a seed and by the fleet's workers.

Faults are dealt from a shuffled deck that holds every kind for every worker, then from the next
one. The same seed makes the same faults, but not the same run: the machine schedules processes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

SUPERVISOR = "supervisor"
Kind = Literal["kill", "terminate", "stop", "cut", "lose", "attack", "fill"]
Moment = Literal["now", "restart", "compile", "save"]
"""When a signal is sent: at once, while the worker restarts after an earlier kill, while the agent
compiles, or while a checkpoint is written."""
Way = Literal["up", "down", "both"]
"""Of connections: towards the server, or back."""
_LONG_STOP = (16.0, 22.0)  # seconds; heartbeats then count the process as dead


@dataclass(frozen=True)
class Fault:
    """One fault."""

    kind: Kind
    targets: tuple[str, ...] = ()
    """Workers, which are hit at the same time."""
    seconds: float = 0.0
    """How long it lasts; for `restart`, how long after the start the signal comes."""
    moment: Moment = "now"
    way: Way = "both"

    def __str__(self) -> str:
        words = [self.kind, " and ".join(self.targets)]
        words += [f"at {self.moment}"] if self.moment != "now" else []
        words += [self.way] if self.way != "both" else []
        return " ".join(filter(None, words))


def schedule(seed: int, workers: Sequence[str], *, threads: bool = False) -> Iterator[Fault]:
    """Faults without end. Workers that are `threads` of one process cannot be hit one by one."""
    rng = random.Random(seed)
    servers = [name for name in workers if not name.startswith(("env", "eval"))]
    while True:
        deck = [Fault("kill", (SUPERVISOR,)), Fault("terminate", (SUPERVISOR,))]
        deck += [Fault("fill", seconds=rng.uniform(0.5, 2.5))]
        if not threads:
            deck += [*_processes(workers, rng), *_connections(servers, rng)]
        rng.shuffle(deck)
        yield from deck


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
    yield Fault("stop", (rng.choice(workers),), rng.uniform(*_LONG_STOP))


def _pair(workers: Sequence[str], rng: random.Random) -> tuple[str, ...]:
    return tuple(rng.sample(workers, 2))


def _connections(servers: Sequence[str], rng: random.Random) -> Iterator[Fault]:
    ways: tuple[Way, ...] = ("both", "up", "down")
    for server in servers:
        for way in ways:
            yield Fault("cut", (server,), way=way)
        for _ in range(3):
            yield Fault("lose", (server,), rng.uniform(0.02, 0.3))
        yield Fault("attack", (server,))
