"""One client's socket: connecting, greeting, noticing loss.

Touched by one thread at a time, under the client's lock; see `client`. What it learns it puts into
`news`, in order: `Welcome` when a server has greeted back, `Lost` when that server has gone, and
messages.
"""

from __future__ import annotations

import secrets
import select
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from dreamfleet.transport import wire
from dreamfleet.transport.address import parse
from dreamfleet.transport.codec import encode
from dreamfleet.transport.errors import MessageError
from dreamfleet.transport.security import Keys
from dreamfleet.transport.waker import Waker


class Welcome(msgspec.Struct, frozen=True):
    """What a server says about itself. Another incarnation is another process or object."""

    protocol: int
    name: str
    incarnation: int
    limit: int
    repeatable: frozenset[str]


@dataclass(frozen=True)
class Lost:
    """The server that had greeted us has gone."""


@dataclass(slots=True)
class Message:
    header: wire.Header
    frames: list[Any]


_FOREVER = float("inf")
_RETRY = 0.5  # seconds

News = Welcome | Lost | Message | MessageError

_HANDSHAKE_FAILURES = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed; is the server given the same key?",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "the handshake failed; do both sides have a key?",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the server refused the key",
}
_EVENTS = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class Connection:
    def __init__(self, address: str, keys: Keys | None, waker: Waker) -> None:
        self.news: deque[News] = deque()
        self.trouble = "nobody listens there"
        self.bytes_in = 0
        self._address = parse(address)
        self._keys = keys if self._address.kind == "tcp" else None
        self._waker = waker
        self._greeted = False
        self._open()

    def _open(self) -> None:
        # One context, and so one I/O thread of libzmq, serves all clients of a process.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        wire.set_limits(self._socket)
        self._socket.linger = 1000
        self._socket.reconnect_ivl = 20
        self._socket.reconnect_ivl_max = 500
        self._socket.ipv6 = ":" in self._address.host
        if self._keys:
            self._keys.protect_client(self._socket)
        # Without a limit: libzmq's only I/O thread blocks on a monitor that is full, and nobody
        # reads this one while the client is idle.
        endpoint = f"inproc://monitor-{secrets.token_hex(8)}"
        self._socket.monitor(endpoint, _EVENTS)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.rcvhwm = 0
        self._monitor.linger = 0
        self._monitor.connect(endpoint)
        self._monitor_descriptor = self._monitor.fileno()
        self._alarmed = True  # its descriptor tells of changes, so it is looked at once before
        self._retry_at = _FOREVER
        self._bell = select.poll()
        for source in (self._socket, self._monitor, self._waker):
            self._bell.register(source.fileno(), select.POLLIN)
        self._socket.connect(self._address.endpoint)

    def send(self, frames: list[Any]) -> None:
        wire.send(self._socket, frames)

    def sleep(self, timeout: float) -> None:
        """Wait for a sign of news, a wake-up or the end of `timeout` seconds. Touches no socket,
        so another thread may send meanwhile."""
        timeout = min(timeout, max(0.0, self._retry_at - time.monotonic()))
        self._hear(None if timeout == _FOREVER else 1000 * timeout)

    def rings(self) -> bool:
        """Whether there is a sign of news. Does not wait."""
        return self._hear(0.0) or self._retry_at <= time.monotonic()

    def _hear(self, milliseconds: float | None) -> bool:
        signs = self._bell.poll(milliseconds)
        for descriptor, _ in signs:
            if descriptor == self._waker.fileno():
                self._waker.clear()
            elif descriptor == self._monitor_descriptor:
                self._alarmed = True
        return bool(signs)

    @property
    def readable(self) -> bool:
        """Whether a message is waiting."""
        return wire.readable(self._socket)

    def collect(self) -> None:
        """Turn what has come into news, one thing at a time."""
        if not self.news:
            if self._alarmed:
                self._watch()  # it may send, and so must come before the look at the socket
            if not self.news and (message := wire.receive(self._socket)):
                self._read(message)
            if self._retry_at <= time.monotonic():
                self._reopen()

    def close(self, linger: int | None = None) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger)

    def _read(self, message: list[Any]) -> None:
        frames = message[1:]
        self.bytes_in += sum(map(len, message))
        try:
            header = wire.unpack(message[0])
            if header.kind == wire.WELCOME:
                self.news.append(self._welcome(header, frames))
                self._greeted = True
            else:
                self.news.append(Message(header, frames))
        except MessageError as problem:
            self.news.append(problem)

    def _welcome(self, header: wire.Header, frames: list[Any]) -> Welcome:
        try:
            welcome = msgspec.convert(wire.value_of(header, frames), Welcome)
        except msgspec.ValidationError as problem:
            raise MessageError(f"The greeting of {self._address.text} is odd: {problem}") from None
        if welcome.protocol != wire.PROTOCOL:
            raise MessageError(
                f"{welcome.name} at {self._address.text} speaks protocol {welcome.protocol} and "
                f"this client {wire.PROTOCOL}: use the same version of Dreamfleet on both sides."
            )
        return welcome

    def _watch(self) -> None:
        self._alarmed = False
        while True:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.trouble = "it takes connections but does not greet"
                self.send(wire.pack(wire.HELLO, 0, encode(None)))
            elif event == zmq.Event.DISCONNECTED:
                if self._greeted:
                    self._lose()
                    return
            else:
                self.trouble = _HANDSHAKE_FAILURES[zmq.Event(event)]
                if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                    # After this one libzmq does not try again by itself.
                    self._retry_at = time.monotonic() + _RETRY

    def _lose(self) -> None:
        while message := wire.receive(self._socket):
            self._read(message)  # what the server had answered before it went still counts
        self.trouble = "the server has gone"
        self._greeted = False
        self.news.append(Lost())
        # libzmq would connect again by itself. A fresh socket forgets what was queued for the old
        # server: whether that is sent again is decided call by call.
        self._reopen()

    def _reopen(self) -> None:
        self.close(linger=0)
        self._open()
