"""What a hostile network costs a run: every server of a fleet is attacked while the fleet runs.

The fleet is encrypted and listens on the loopback address. One process attacks its servers in turn,
at a steady rate, in rounds; between them is peace. So what an attack costs is found within one run,
also on a machine whose speed drifts. It sends:

    malformed   with the run's key: messages that cannot be read, calls with wrong arguments
    strangers   without a key: random bytes, handshakes that are too long, silence, a byte at a time
    replayed    the bytes of an earlier connection, again
    unfinished  the first parts of messages, and never the rest
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
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from dreamfleet.benchmarks.proxy import Proxy, Way
from dreamfleet.benchmarks.report import Row, compare, helper, scratch
from dreamfleet.benchmarks.soak import usage
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
from dreamfleet.transport.codec import ARRAY, DICT, TUPLE, encode

_BURST = 100  # messages of one connection, which is ended after ten
_DIFFERENT = 2000  # messages, which come again
_HELD = 200  # connections of strangers that are kept open, and say nothing
_SLOW = 20  # that send a byte now and then
_STUCK = 5  # that stop in the middle of a message
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)


@dataclass(frozen=True)
class Plan:
    """How much, and how fast."""

    messages: int = 1_000_000  # malformed ones, at each server
    rate: float = 1000.0  # of them a second, at each server
    rounds: int = 10
    warm_up: float = 20.0  # seconds
    log_every: float = 1.0

    @property
    def peace(self) -> float:
        """Seconds before each round; the round itself lasts three times as long."""
        return self.messages / self.rate / self.rounds / 3


def run(quick: bool = False) -> list[Row]:
    """Measure what attacks cost a run: a million malformed messages at every server."""
    plan = Plan(1000, 500.0, 1, 1.0, 0.5) if quick else Plan()
    with scratch() as folder:
        return list(measure(folder, plan).rows())


@dataclass
class Result:
    """What was sent, and what it did."""

    sent: dict[str, int] = field(default_factory=dict)
    rates: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    memory: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of every process, before and after, in MB."""
    attacker: list[float] = field(default_factory=list)
    """Processor time that the attacker itself takes, as a share of the machine's."""
    restarts: int = 0

    def rows(self) -> Iterator[Row]:
        peace, attack = (statistics.mean(self.rates[each]) for each in (False, True))
        own = statistics.mean(self.attacker)
        note = f"the attacker itself takes {own:.0%} of the processors"
        yield compare("under attack", attack, "steps/s", "in peace", peace, note=note)
        name = "the same, of what the attacker leaves"
        yield compare(name, attack, "steps/s", "in peace", peace * (1 - own))
        for name, count in self.sent.items():
            yield Row(name, count, "sent")
        for name, (before, after) in self.memory.items():
            yield compare(f"memory of {name}", after, "MB", "before", before)
        yield Row("processes that had to be started again", self.restarts, "")


def measure(logdir: Path, plan: Plan) -> Result:
    """Run a fleet, and attack it."""
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
    battle = _Battle(config, keys, plan)
    with closing(battle), suppress(StopTraining):
        combined(**vars(factories(config)), args=config, say=lambda _: None, tick=battle.tick)
    return battle.result


def servers(logdir: Path) -> dict[str, str]:
    """Where the servers of a run listen that others can reach, as far as they do yet."""
    found = {role: published_address(logdir, role) for role in ("actor", "replay", "logger")}
    if place := read_place(logdir):
        found["nodes"] = f"tcp://127.0.0.1:{place.port}"
        if not found["actor"] and "actor" in place.ports:
            found["actor"] = f"tcp://127.0.0.1:{place.ports['actor']}"
    return {name: address for name, address in found.items() if address}


class _Battle:
    """Goes on whenever the run logs: peace, attack, peace, ..."""

    def __init__(self, config: RunConfig, keys: Keys, plan: Plan) -> None:
        self.result = Result()
        self._config, self._keys, self._plan = config, keys, plan
        self._stack = ExitStack()
        self._logger: Client | None = None
        self._phases = self._course()

    def tick(self) -> None:
        if next(self._phases, None) is None:
            raise StopTraining

    def close(self) -> None:
        self._stack.close()

    def _course(self) -> Iterator[str]:
        while len(found := servers(self._config.logdir)) < 4:
            yield "starting"
        self._logger = self._stack.enter_context(
            Client(found["logger"], "besieged", keys=self._keys, timeout=60)
        )
        while self._step() < 100:
            yield "starting"
        yield from self._wait(self._plan.warm_up)
        attacker = self._stack.enter_context(Attacker(found, self._keys, self._plan))
        before = self._memory()
        for _ in range(self._plan.rounds):
            yield from self._phase(attacker, attack=False)
            yield from self._phase(attacker, attack=True)
        self.result.sent = attacker.sent()
        after = self._memory()
        self.result.memory = {name: (before[name], after[name]) for name in before if name in after}
        record = read_record(self._config.logdir)
        self.result.restarts = sum(each.restarts for each in record.workers) if record else -1

    def _phase(self, attacker: Attacker, attack: bool) -> Iterator[str]:
        begin, step = time.monotonic(), self._step()
        if attack:
            attacker.begin()
            while not attacker.rests:
                yield "attack"
        else:
            yield from self._wait(self._plan.peace)
        seconds = time.monotonic() - begin
        self.result.rates[attack].append((self._step() - step) / seconds)
        if attack:
            self.result.attacker.append(attacker.seconds / seconds / len(os.sched_getaffinity(0)))

    def _wait(self, seconds: float) -> Iterator[str]:
        end = time.monotonic() + seconds
        yield "peace"
        while time.monotonic() < end:
            yield "peace"

    def _step(self) -> int:
        assert self._logger
        return int(self._logger.status().result()["step"])

    def _memory(self) -> dict[str, float]:
        record = read_record(self._config.logdir)
        workers = record.workers if record else ()
        found = {each.name: usage(each.pid) for each in workers if each.pid}
        return {name: values["memory"] for name, values in found.items() if values}


# --- the attacker --------------------------------------------------------------------------------


class Attacker:
    """A process that attacks whenever it is told to.

    libzmq aborts a process that closes a socket in the very moment in which its connection is ended
    in the middle of a message, which may happen to one that attacks. Then another one attacks from
    the beginning of the round; what the dead one has sent in that round is not counted.
    """

    def __init__(self, targets: dict[str, str], keys: Keys, plan: Plan) -> None:
        self._what = targets, keys.secret.hex(), plan
        self._rounds = 0
        self.seconds = 0.0
        """Processor time of the last round."""
        self._start()

    def _start(self) -> None:
        self._channel, theirs = multiprocessing.Pipe()
        self._process = helper(_attack, theirs, *self._what, self._rounds)
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def begin(self) -> None:
        self._channel.send("attack")

    @property
    def rests(self) -> bool:
        """Whether the round is over."""
        if not self._process.is_alive():
            if self._process.exitcode != -signal.SIGABRT:
                raise RuntimeError("The attacker has died.")
            self._start()
            self.begin()
        if not self._channel.poll(0):
            return False
        self.seconds = self._channel.recv()
        self._rounds += 1
        return True

    def sent(self) -> dict[str, int]:
        self._channel.send("tell")
        return dict(self._channel.recv())

    def __enter__(self) -> Attacker:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()


def _attack(channel: Any, targets: dict[str, str], secret: str, plan: Plan, rounds: int) -> None:
    keys, sent = Keys.from_text(secret), Counter[str]()
    weapons = {name: _Weapons(name, target, keys, sent) for name, target in targets.items()}
    with ExitStack() as stack:
        for each in weapons.values():
            stack.callback(each.cease)
        fired, aim = list(weapons.values()), rounds * (plan.messages // plan.rounds)
        for each in fired:
            each.fired = aim  # by those before this one
        while channel.recv() == "attack":
            aim += plan.messages // plan.rounds
            used, begin, before = time.process_time(), time.monotonic(), [e.fired for e in fired]
            while min(each.fired for each in fired) < aim:
                for each, start in zip(fired, before, strict=True):
                    # Not faster than the rate, and not more than was planned.
                    due = start + plan.rate * (time.monotonic() - begin)
                    if each.fired < min(aim, due):
                        each.fire()
                time.sleep(0.001)
            for each in fired:
                each.cease()
            channel.send(time.process_time() - used)
        for name, each in weapons.items():
            sent[f"malformed messages, at the {name}"] = each.fired
        channel.send(sent)


class _Weapons:
    """What is done to one server."""

    def __init__(self, name: str, address: str, keys: Keys, sent: Counter[str]) -> None:
        self._name, self._address, self._keys, self._sent = name, address, keys, sent
        self.fired = 0
        """Malformed messages so far."""
        place = parse(address)
        self._place = (place.host, place.port)
        self._messages = cycle(list(islice(malformed(name), _DIFFERENT)))
        self._rng = random.Random(name)
        self._held: list[socket.socket] = []
        self._slow: list[socket.socket] = []
        self._stuck: deque[ExitStack] = deque()
        self._recorded = self._record()
        self._others: Iterator[Callable[[], None]] = cycle(
            (
                self._noise,
                self._handshake,
                self._hold,
                self._trickle,
                self._replay,
                self._stop_in_the_middle,
            )
        )

    def fire(self) -> None:
        """One connection with a burst of malformed messages, and one of the other things."""
        with (
            suppress(zmq.ZMQError),
            raw_socket(self._address, self._keys) as (peer, incarnation),
            peer.get_monitor_socket(zmq.Event.DISCONNECTED) as ended,
        ):
            burst = [addressed(frames, incarnation) for frames in islice(self._messages, _BURST)]
            for frames in burst:
                peer.send_multipart(frames, zmq.NOBLOCK)
                self.fired += 1
            # The server ends the connection. Closing it meanwhile could abort this process.
            ended.poll(1000)
        with suppress(OSError, zmq.ZMQError):
            next(self._others)()

    def cease(self) -> None:
        """Leave in peace."""
        for peer in (*self._held, *self._slow):
            peer.close()
        self._held, self._slow = [], []
        while self._stuck:
            self._stuck.pop().close()

    def _count(self, what: str, count: int = 1) -> None:
        self._sent[f"{what}, at the {self._name}"] += count

    def _noise(self) -> None:
        for _ in range(5):
            with socket.create_connection(self._place, timeout=10) as peer:
                peer.sendall(self._rng.randbytes(self._rng.randrange(1, 5000)))
                self._count("strangers with random bytes")

    def _handshake(self) -> None:
        with socket.create_connection(self._place, timeout=10) as peer:
            peer.sendall(_GREETING)
            peer.sendall(b"\x06" + struct.pack(">Q", wire.MAX_MESSAGE) + bytes(1 << 20))
            self._count("handshakes that are too long")

    def _hold(self) -> None:
        if len(self._held) < _HELD:
            self._held += [socket.create_connection(self._place, timeout=10) for _ in range(10)]
            self._count("strangers that say nothing", 10)

    def _trickle(self) -> None:
        if len(self._slow) < _SLOW:
            self._slow.append(socket.create_connection(self._place, timeout=10))
        for peer, byte in zip(self._slow, _GREETING, strict=False):
            with suppress(OSError):
                peer.sendall(bytes([byte]))
                self._count("bytes of slow senders")

    def _record(self) -> bytes:
        """What a client sends that makes a call."""
        with (
            closing(Tap(self._place)) as tap,
            raw_socket(tap.address, self._keys) as (peer, incarnation),
        ):
            peer.send_multipart(wire.pack(wire.CALL, 1, encode(()), incarnation, "nothing"))
            peer.recv_multipart()
            return bytes(tap.sent)

    def _replay(self) -> None:
        with socket.create_connection(self._place, timeout=10) as peer:
            peer.sendall(self._recorded)
            self._count("recorded connections")

    def _stop_in_the_middle(self) -> None:
        if len(self._stuck) >= _STUCK:
            self._stuck.popleft().close()
        with ExitStack() as stack:
            tap = stack.enter_context(closing(Tap(self._place)))
            peer, incarnation = stack.enter_context(raw_socket(tap.address, self._keys))
            tap.most = len(tap.sent) + 500_000
            value = encode((np.zeros(100_000, np.uint8),) * 10)
            peer.send_multipart(wire.pack(wire.CALL, 1, value, incarnation, "nothing"))
            self._count("messages that stop in the middle")
            self._stuck.append(stack.pop_all())


class Tap(Proxy):
    """Passes connections on, keeps what clients send, and stops in the middle if it is told to."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.sent = bytearray()
        self.most = 1 << 62
        """Bytes of clients after which nothing more is passed on; the piece that they are in is."""
        super().__init__(f"tcp://{target[0]}:{target[1]}", tap=lambda *_: self._see)

    def _see(self, way: Way, data: bytes) -> None:
        if way == "up":
            self.sent += data
            if len(self.sent) >= self.most:
                self._flow[way].clear()


@contextmanager
def raw_socket(address: str, keys: Keys | None = None) -> Iterator[tuple[zmq.Socket[bytes], int]]:
    """A peer that speaks ZeroMQ, greets the server, and then sends what it likes; with the server's
    incarnation."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    peer.reconnect_ivl = -1
    peer.sndtimeo = peer.rcvtimeo = 20_000
    if keys:
        keys.protect_client(peer)
    peer.connect(address)
    try:
        peer.send_multipart(wire.pack(wire.HELLO, 0, encode(None)))
        first, *rest = peer.recv_multipart()
        yield peer, wire.value_of(wire.unpack(first), rest)["incarnation"]
    finally:
        peer.close()
        context.term()


# --- messages ------------------------------------------------------------------------------------

_TO = 0x1122334455667788  # stands for the server's incarnation until it is known
_METHODS = ("echo", "act", "add_batch", "sample_batch_train", "tran", "add", "status", "join")


def addressed(frames: list[bytes], incarnation: int) -> list[bytes]:
    """A message with the incarnation in its place, so that it gets past the address."""
    here, to = _TO.to_bytes(8, "big"), incarnation.to_bytes(8, "big")
    return [frame.replace(here, to) for frame in frames]


def _header(schema: Any, plain: Any = (), blob: bytes = b"", **fields: Any) -> bytes:
    values = {"kind": wire.CALL, "id": 1, "to": _TO, "method": "echo", "rows": 0, **fields}
    packed = schema if isinstance(schema, bytes) else msgspec.msgpack.encode(schema)
    return msgspec.msgpack.encode([*values.values(), packed, list(plain), blob])


LIES: list[list[bytes]] = [
    [b""],
    [b"", b""],
    [b"\xc1"],
    [b"\x91" * 10_000],
    [_header([TUPLE, [[ARRAY, 5, 2**62]]])],
    [_header([TUPLE, [[ARRAY, 5, 2**62]]]), b"x"],
    [_header([TUPLE, [[ARRAY, 5, -1]]]), b"x" * 5000],
    [_header([TUPLE, [[ARRAY, 99, 5000]]]), b"x" * 5000],
    [_header([TUPLE, [[ARRAY, "O", 5000]]]), b"x" * 5000],
    [_header([TUPLE, [[ARRAY, 5, 5000]]])],
    [_header([TUPLE, [[ARRAY, 5, 5000]]]), b"x" * 4999],
    [_header([TUPLE, [[ARRAY, 5, 5000]]]), b"x" * 5000, b"more"],
    [_header([TUPLE, [0]])],
    [_header([TUPLE, [0]], [1, 2])],
    [_header([TUPLE, [0]], [{"a": 1}])],
    [_header(0, [1])],
    [_header([DICT, ["a"], [0]], [1])],
    [_header([DICT, [f"k{n}" for n in range(30_000)], [0] * 30_000], [0] * 30_000)],
    [_header([TUPLE, [0] * 1_000_000], [0] * 10)],
    [_header([TUPLE, [0] * 10], [0] * 1_000_000)],
    [_header(b"\x92\x02\x91" * 10_000 + b"\x00")],
    [_header([TUPLE, []], method="")],
    [_header([TUPLE, []], method="x" * 500_000)],
    [_header([TUPLE, []], method="__class__")],
    [_header([TUPLE, []], id=0)],
    [_header([TUPLE, []], id=-1)],
    [_header([TUPLE, []], rows=-1)],
    [_header([TUPLE, []], rows=2**62)],
    [_header([TUPLE, [[ARRAY, 5, 3]]], blob=b"x" * 8, rows=7, method="act")],
    [_header([TUPLE, []], kind=99)],
    [_header([TUPLE, []], kind=wire.REPLY)],
    [_header([TUPLE, []], kind=wire.WELCOME)],
    [_header([TUPLE, []], kind=wire.ERROR)],
    [_header([TUPLE, []], method=b"bytes")],
    [_header([TUPLE, []], id="one")],
    [b"x" * (2 << 20)],
    [b"x"] * (wire.MAX_FRAMES + 10),
]
"""Messages that are wrong in every way that we could think of."""


def malformed(seed: object) -> Iterator[list[bytes]]:
    """Lies, then random bytes, and good messages with bytes changed, cut off or added."""
    rng = random.Random(str(seed))
    yield from LIES
    value = ({"x": np.arange(3, dtype=np.float32), "big": np.zeros(3000)}, 1, "text")
    good = [
        [bytes(frame) for frame in wire.pack(wire.CALL, 1, encode(value), _TO, method)]
        for method in _METHODS
    ]
    while True:
        frames = list(rng.choice(good))
        kind = rng.randrange(5)
        if kind == 0:
            frames = [rng.randbytes(rng.randrange(300)) for _ in range(rng.randrange(1, 4))]
        elif kind == 1:
            data = bytearray(frames[0])
            for _ in range(rng.randrange(1, 8)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            frames[0] = bytes(data)
        elif kind == 2:
            cut = rng.randrange(len(frames))
            frames[cut] = frames[cut][: rng.randrange(len(frames[cut]))]
        elif kind == 3:
            frames.insert(rng.randrange(len(frames) + 1), rng.randbytes(rng.randrange(50)))
        else:
            rng.shuffle(frames)
            frames = frames[: rng.randrange(1, 3)]
        yield frames
