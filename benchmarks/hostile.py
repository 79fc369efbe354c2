"""What attacks cost: every server of an encrypted fleet gets malformed input while the fleet runs.

One process sends to all servers at a steady rate, in phases. A baseline phase without load comes
before each of them, so the cost is measured within one run on a machine whose speed drifts. Sent
are:

    malformed messages and calls with wrong arguments, by a client that has the run's key
    without a key: random bytes, handshakes that are too long, silence, one byte at a time
    the bytes of an earlier connection, again
    messages that stop in the middle
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import statistics
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from benchmarks.malformed import CURVE, addressed, malformed, raw_socket, stranger
from benchmarks.proxy import Proxy, Way
from benchmarks.report import Row, compare, helper, scratch
from benchmarks.soak import usage
from dreamfleet.config import RunConfig
from dreamfleet.fleet.factories import factories
from dreamfleet.fleet.record import read_record
from dreamfleet.parallel import combined
from dreamfleet.replay import ReplayConfig
from dreamfleet.roles.addresses import published_address
from dreamfleet.roles.invitations import read_place
from dreamfleet.training import StopTraining
from dreamfleet.transport import Client, Keys, wire
from dreamfleet.transport.address import parse
from dreamfleet.transport.codec import encode

_BURST = 100  # messages per connection; the server closes it after ten
_DISTINCT = 2000  # messages, which are repeated
_SILENT = 200  # connections without a key that stay open and say nothing
_SLOW = 20  # that send a byte now and then
_STUCK = 5  # that stop in the middle of a message


@dataclass(frozen=True)
class Plan:
    """How much is sent, and how fast."""

    messages: int = 1_000_000  # malformed ones, to each server
    rate: float = 1000.0  # of them per second, to each server
    phases: int = 10
    warm_up: float = 20.0  # seconds
    log_every: float = 1.0

    @property
    def baseline(self) -> float:
        """Seconds without load before each phase; a phase lasts three times as long."""
        return self.messages / self.rate / self.phases / 3


def run(quick: bool = False) -> Iterator[Row]:
    """A million malformed messages to every server."""
    plan = Plan(1000, 500.0, 1, 1.0, 0.5) if quick else Plan()
    with scratch() as folder:
        yield from measure(folder, plan).rows()


@dataclass
class Result:
    """What was sent, and what it cost."""

    sent: Counter[str] = field(default_factory=Counter)
    baseline: list[float] = field(default_factory=list)
    """Steps per second without load."""
    loaded: list[float] = field(default_factory=list)
    memory: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of every process, before and after, in MB."""
    sender: list[float] = field(default_factory=list)
    """The sender's own CPU time, relative to that of the machine."""
    restarts: int = 0

    def rows(self) -> Iterator[Row]:
        base, loaded, own = map(statistics.mean, (self.baseline, self.loaded, self.sender))
        note = f"the sender itself uses {own:.0%} of the CPU"
        yield compare("under load", loaded, "steps/s", "baseline", base, note)
        name = "under load, of the CPU time that the sender leaves"
        yield compare(name, loaded, "steps/s", "baseline", base * (1 - own))
        for name, count in self.sent.items():
            yield Row(name, count, "sent")
        for name, (before, after) in self.memory.items():
            yield compare(f"memory of {name}", after, "MB", "before", before)
        yield Row("restarted processes", self.restarts, "")


def measure(logdir: Path, plan: Plan) -> Result:
    """Run a fleet under load."""
    keys = Keys.generate()
    keys.save(logdir / "key")
    tcp = "tcp://127.0.0.1:{auto}"
    config = RunConfig(
        task="bundled:dummy",
        env_options={"size": (16, 16)},
        logdir=logdir,
        agent="random",
        envs=8,
        envs_per_process=4,
        steps=0,
        train_ratio=1.0,
        replay=ReplayConfig(capacity=20_000),
        keys=str(logdir / "key"),
        bind="127.0.0.1",
        replay_addr=tcp,
        logger_addr=tcp,
        log_every=plan.log_every,
        report_every=0.0,
        on_failure="stop",
    )
    result = Result()
    with ExitStack() as stack, suppress(StopTraining):
        phases = _phases(config, keys, plan, result, stack)

        def tick() -> None:
            if next(phases, None) is None:
                raise StopTraining

        combined(**vars(factories(config)), args=config, say=lambda _: None, tick=tick)
    return result


def servers(logdir: Path) -> dict[str, str]:
    """Addresses of the run's servers that listen already."""
    found = {role: published_address(logdir, role) for role in ("actor", "replay", "logger")}
    if place := read_place(logdir):
        found["nodes"] = f"tcp://127.0.0.1:{place.port}"
        if not found["actor"] and "actor" in place.ports:
            found["actor"] = f"tcp://127.0.0.1:{place.ports['actor']}"
    return {name: address for name, address in found.items() if address}


def _phases(
    config: RunConfig, keys: Keys, plan: Plan, result: Result, stack: ExitStack
) -> Iterator[str]:
    """Continued whenever the run logs: baseline, load, baseline, ... until all is measured."""
    while len(found := servers(config.logdir)) < 4:
        yield "starting"
    logger = stack.enter_context(Client(found["logger"], "bench", keys=keys, timeout=60))

    def step() -> int:
        return int(logger.status().result()["step"])

    def wait(seconds: float) -> Iterator[str]:
        end = time.monotonic() + seconds
        yield "waiting"
        while time.monotonic() < end:
            yield "waiting"

    def memory() -> dict[str, float]:
        record = read_record(config.logdir)
        used = {
            each.name: usage(each.pid) for each in (record.workers if record else ()) if each.pid
        }
        return {name: values["memory"] for name, values in used.items() if values}

    while step() < 100:
        yield "starting"
    yield from wait(plan.warm_up)
    before = memory()
    for phase in range(plan.phases):
        begin, first = time.monotonic(), step()
        yield from wait(plan.baseline)
        result.baseline.append((step() - first) / (time.monotonic() - begin))
        begin, first = time.monotonic(), step()
        sender = stack.enter_context(closing(Sender(found, keys.secret.hex(), plan, phase)))
        while (done := sender.result()) is None:
            yield "load"
        sent, cpu_seconds = done
        seconds = time.monotonic() - begin
        result.loaded.append((step() - first) / seconds)
        result.sender.append(cpu_seconds / seconds / len(os.sched_getaffinity(0)))
        result.sent += sent
    after = memory()
    result.memory = {name: (before[name], after[name]) for name in before if name in after}
    record = read_record(config.logdir)
    result.restarts = sum(each.restarts for each in record.workers) if record else -1


# --- the process that sends ----------------------------------------------------------------------


class Sender:
    """A process that sends one phase of load.

    libzmq aborts a process that closes a socket while its connection ends in the middle of a
    message. Then another process repeats the phase; what the aborted one sent is not counted.
    """

    def __init__(self, *task: Any) -> None:
        self._task = task
        self._start()

    def _start(self) -> None:
        self._channel, theirs = multiprocessing.Pipe()
        self._process = helper(_send, theirs, *self._task)
        self._process.start()

    def result(self) -> tuple[Counter[str], float] | None:
        """How much of each kind was sent, and the CPU time of that; None before the end."""
        alive = self._process.is_alive()
        if self._channel.poll(0):
            found: tuple[Counter[str], float] = self._channel.recv()
            return found
        if not alive:
            if self._process.exitcode != -signal.SIGABRT:
                raise RuntimeError("The sender has died.")
            self._start()
        return None

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _send(channel: Any, targets: dict[str, str], secret: str, plan: Plan, phase: int) -> None:
    keys, sent = Keys.from_text(secret), Counter[str]()
    loads = [_Load(name, target, keys, sent, phase) for name, target in targets.items()]
    goal, cpu, begin = plan.messages // plan.phases, time.process_time(), time.monotonic()
    while min(load.messages for load in loads) < goal:
        for load in loads:
            if load.messages < min(goal, plan.rate * (time.monotonic() - begin)):
                load.send()
        time.sleep(0.001)
    for load in loads:
        load.close()
        sent[f"malformed messages, to the {load.name}"] = load.messages
    channel.send((sent, time.process_time() - cpu))


class _Load:
    """What one server is sent."""

    def __init__(self, name: str, address: str, keys: Keys, sent: Counter[str], phase: int) -> None:
        self.name, self._address, self._keys, self._sent = name, address, keys, sent
        self.messages = 0
        """Malformed ones so far."""
        place = parse(address)
        self._place = (place.host, place.port)
        self._malformed = cycle(list(islice(malformed(f"{name} {phase}"), _DISTINCT)))
        self._rng = random.Random(f"{name} {phase}")
        self._silent: list[socket.socket] = []
        self._slow: list[socket.socket] = []
        self._stuck: deque[ExitStack] = deque()
        self._recorded = self._record()
        others = self._noise, self._handshake, self._silence, self._trickle, self._repeat
        self._others: Iterator[Callable[[], None]] = cycle((*others, self._stop_in_the_middle))

    def send(self) -> None:
        """One connection with a burst of malformed messages, and one of the other kinds."""
        with (
            suppress(zmq.ZMQError),
            raw_socket(self._address, self._keys) as (peer, incarnation),
            peer.get_monitor_socket(zmq.Event.DISCONNECTED) as ended,
        ):
            for frames in islice(self._malformed, _BURST):
                peer.send_multipart(addressed(frames, incarnation), zmq.NOBLOCK)
                self.messages += 1
            # The server closes the connection. Closing it meanwhile could abort this process.
            ended.poll(1000)
        with suppress(OSError, zmq.ZMQError):
            next(self._others)()

    def close(self) -> None:
        """End all connections."""
        for peer in (*self._silent, *self._slow):
            peer.close()
        self._silent, self._slow = [], []
        while self._stuck:
            self._stuck.pop().close()

    def _count(self, what: str, count: int = 1) -> None:
        self._sent[f"{what}, to the {self.name}"] += count

    def _connect(self) -> socket.socket:
        return socket.create_connection(self._place, timeout=10)

    def _noise(self) -> None:
        for _ in range(5):
            with self._connect() as peer:
                peer.sendall(stranger(self._rng))
                self._count("connections that send random bytes")

    def _handshake(self) -> None:
        with self._connect() as peer:
            peer.sendall(CURVE)
            peer.sendall(b"\x06" + struct.pack(">Q", wire.MAX_MESSAGE) + bytes(1 << 20))
            self._count("handshakes that are too long")

    def _silence(self) -> None:
        if len(self._silent) < _SILENT:
            self._silent += [self._connect() for _ in range(10)]
            self._count("connections that send nothing", 10)

    def _trickle(self) -> None:
        if len(self._slow) < _SLOW:
            self._slow.append(self._connect())
        for peer, byte in zip(self._slow, CURVE, strict=False):
            with suppress(OSError):
                peer.sendall(bytes([byte]))
                self._count("bytes of slow senders")

    def _record(self) -> bytes:
        """The bytes of a client that makes a call."""
        with (
            closing(Tap(self._place)) as tap,
            raw_socket(tap.address, self._keys) as (peer, incarnation),
        ):
            peer.send_multipart(wire.pack(wire.CALL, 1, encode(()), incarnation, "nothing"))
            peer.recv_multipart()
            return bytes(tap.sent)

    def _repeat(self) -> None:
        with self._connect() as peer:
            peer.sendall(self._recorded)
            self._count("recorded connections")

    def _stop_in_the_middle(self) -> None:
        if len(self._stuck) >= _STUCK:
            self._stuck.popleft().close()
        with ExitStack() as stack:
            tap = stack.enter_context(closing(Tap(self._place)))
            peer, incarnation = stack.enter_context(raw_socket(tap.address, self._keys))
            tap.limit = len(tap.sent) + 500_000
            value = encode((np.zeros(100_000, np.uint8),) * 10)
            peer.send_multipart(wire.pack(wire.CALL, 1, value, incarnation, "nothing"))
            self._count("messages that stop in the middle")
            self._stuck.append(stack.pop_all())


class Tap(Proxy):
    """Keeps what clients send, and stops passing it on in the middle if it is told to."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.sent = bytearray()
        self.limit = 1 << 62
        """Bytes of clients after which nothing more is passed on."""
        super().__init__(f"tcp://{target[0]}:{target[1]}", tap=self._see)

    def _see(self, way: Way, data: bytes) -> None:
        if way == "up":
            self.sent += data
            if len(self.sent) >= self.limit:
                self.flow[way].clear()
