"""The network of a fleet: a proxy before each server, which follows messages and can lose any.

What travels is ZMTP (rfc.zeromq.org/spec/23): a greeting, then frames with a length each. Without
encryption the first frame of a message is one of `dreamfleet.transport.wire`, whose beginning names
the method. With it only lengths are seen, which is enough where a server has a single method.

Between socket files messages are packets with the same frames (`transport.local`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Self
from weakref import WeakSet

from dreamfleet.benchmarks.proxy import Proxy, Way
from dreamfleet.roles.addresses import DirectoryBook
from dreamfleet.transport.codec import Buffer
from dreamfleet.transport.local import split_packet
from dreamfleet.transport.wire import CALL, ERROR, REPLY, Header

Part = Literal["request", "reply", "server"]
"""What is lost with a connection: a request before it arrives, or its reply after the server has
done its work; with `server`, the server itself is killed at that moment."""
PARTS: tuple[Part, ...] = ("reply", "request", "server")

_GREETING, _MECHANISM = 64, slice(12, 32)
_HEAD = 1024  # bytes of a frame that name the call, or all of a greeting
_MORE, _LONG, _COMMAND = 1, 2, 4
# Bytes of an encrypted call, and of a reply; a greeting has 46, a heartbeat 38 or 40.
_LEAST: dict[Way, int] = {"up": 52, "down": 44}
_ENCRYPTED = "act"


class Message(NamedTuple):
    """What can be seen of a message."""

    kind: int
    number: int = 0
    method: str = ""


@dataclass
class Loss:
    """A message that is to be lost."""

    method: str
    part: Part
    kill: Callable[[], object]
    claim: tuple[_Messages, int] | None = None
    """The call whose reply is to be lost: its client and its number."""
    at: float = 0.0
    """When it was, on the monotonic clock."""
    happened: threading.Event = field(default_factory=threading.Event)


class Line:
    """The connections to one server, through a proxy."""

    def __init__(self, name: str, logdir: Path, listen: str | Path) -> None:
        self.name = name
        self.methods: Counter[str] = Counter()
        """Calls so far, by method."""
        self.replies = 0
        """Calls that were answered so far."""
        self.direct = 0
        """Calls that went around libzmq so far."""
        self._connections: WeakSet[_Messages] = WeakSet()
        self._firsts: list[tuple[float, float]] = []  # of connections: opened, first answered
        self._loss: Loss | None = None
        self.proxy = Proxy(
            partial(DirectoryBook().find, logdir, name), listen=listen, tap=partial(_Messages, self)
        )

    def first_reply(self, after: float) -> float | None:
        """When the first call was answered by connections that were opened after this time of the
        monotonic clock; None if none was."""
        times = [answered for opened, answered in list(self._firsts) if opened >= after]
        return min(times, default=None)

    def lose(self, method: str, part: Part, kill: Callable[[], object]) -> Loss:
        """Lose a part of the next call of a method, with its connection."""
        self._loss = Loss(method, part, kill)
        return self._loss

    def keep(self) -> None:
        """Lose nothing more."""
        self._loss = None

    # --- in the proxy's thread -------------------------------------------------------------------

    def open(self, connection: _Messages) -> None:
        """There is another connection."""
        self._connections.add(connection)

    def see(self, connection: _Messages, way: Way, message: Message) -> None:
        """Count a message, or lose it."""
        loss = self._loss
        if way == "up" and message.kind == CALL:
            self.methods[message.method] += 1
            self.direct += connection.packets
            if loss and loss.method == message.method:
                if loss.part == "request":
                    self._lost(loss, connection)
                loss.claim = connection, message.number
        elif way == "down" and message.kind in (REPLY, ERROR):
            if loss and loss.claim == (connection, message.number):
                if loss.part == "server":
                    loss.kill()
                self._lost(loss, connection)
            self.replies += 1
            if not connection.answered:
                connection.answered = True
                self._firsts.append((connection.opened, time.monotonic()))

    def _lost(self, loss: Loss, connection: _Messages) -> None:
        self._loss = None
        loss.at = time.monotonic()
        connection.reset()
        loss.happened.set()
        raise ConnectionResetError


class _Messages:
    """Follows the messages of one connection: the tap of a proxy."""

    def __init__(self, line: Line, reset: Callable[[], None], packets: bool) -> None:
        self._line, self.reset, self.packets = line, reset, packets
        self._frames: dict[Way, _Frames] = {"up": _Frames(), "down": _Frames()}
        self._welcomed = False
        self.opened = time.monotonic()
        self.answered = False
        line.open(self)

    def __call__(self, way: Way, data: bytes) -> None:
        if self.packets:
            if (parts := split_packet(data)) and (message := read_header(parts[0])):
                self._line.see(self, way, message)
            return
        frames = self._frames[way]
        for head, size in frames.feed(data):
            if message := self._encrypted(way, size) if frames.encrypted else read_header(head):
                self._line.see(self, way, message)

    def _encrypted(self, way: Way, size: int) -> Message | None:
        if size < _LEAST[way]:
            return None
        if way == "up":
            return Message(CALL, method=_ENCRYPTED)
        if self._welcomed:
            return Message(REPLY)
        self._welcomed = True  # the first one greets back
        return None


class _Frames:
    """Finds the first frame of each message in a stream of bytes."""

    def __init__(self) -> None:
        self.encrypted: bool | None = None
        self._buffer = bytearray()
        self._skip = 0  # bytes of a frame that was seen
        self._inside = False  # of a message whose first frame was seen

    def feed(self, data: bytes) -> Iterator[tuple[bytes, int]]:
        """The beginning of each, as soon as it is there, and its size."""
        buffer = self._buffer
        buffer += data
        if self.encrypted is None:
            if len(buffer) < _GREETING:
                return
            self.encrypted = buffer[_MECHANISM].rstrip(b"\0") == b"CURVE"
            del buffer[:_GREETING]
        while True:
            skipped = min(self._skip, len(buffer))
            del buffer[:skipped]
            self._skip -= skipped
            if len(buffer) < 2:
                return
            flags = buffer[0]
            start = 9 if flags & _LONG else 2
            if len(buffer) < start:
                return
            size = int.from_bytes(buffer[1:start], "big")
            if len(buffer) < start + min(size, _HEAD):
                return
            self._skip = start + size
            if flags & _COMMAND:
                continue
            first, self._inside = not self._inside, bool(flags & _MORE)
            if first:
                yield bytes(buffer[start : start + min(size, _HEAD)]), size


def read_header(frame: Buffer) -> Message | None:
    """Kind, number and method of a header (msgpack) by its beginning; None if it is no header."""
    head = bytes(frame[:_HEAD])
    try:
        if head[0] != _ARRAY:
            return None
        number, place = _read_int(head, 2)
        _, place = _read_int(head, place)
        tag, place = head[place], place + 1
        length = tag & 0x1F
        if tag == 0xD9:
            length, place = head[place], place + 1
        return Message(head[1], number, head[place : place + length].decode())
    except (LookupError, UnicodeDecodeError):
        return None


_ARRAY = 0x90 + len(Header.__struct_fields__)
_INT_BYTES = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}


def _read_int(data: bytes, place: int) -> tuple[int, int]:
    tag = data[place]
    if tag < 0x80:
        return tag, place + 1
    end = place + 1 + _INT_BYTES[tag]
    return int.from_bytes(data[place + 1 : end], "big"), end


@dataclass
class Network:
    """All connections of a fleet. A context manager, which closes them."""

    logdir: Path
    servers: Mapping[str, bool]
    folder: Path
    lines: dict[str, Line] = field(default_factory=dict)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name, by_port in self.servers.items():
                line = Line(name, self.logdir, "127.0.0.1" if by_port else self.folder / name)
                stack.enter_context(line.proxy)
                self.lines[name] = line
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def addresses(self) -> dict[str, str]:
        """Where clients connect, by server."""
        return {name: line.proxy.address for name, line in self.lines.items()}
