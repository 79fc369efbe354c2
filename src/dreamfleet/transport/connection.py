"""One client's socket: connecting, greeting, noticing loss.

Touched by one thread at a time, under the client's lock; see `client`. What it learns it puts into
`events`, in order: `Welcome` when a server has greeted back, `Lost` when the connection to it has
ended, and messages.
"""

from __future__ import annotations

import secrets
import select
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from dreamfleet.transport import wire
from dreamfleet.transport.address import Address, endpoints, parse
from dreamfleet.transport.codec import encode
from dreamfleet.transport.errors import AddressError, AddressUnknown, MessageError
from dreamfleet.transport.security import Keys, RoleKey
from dreamfleet.transport.shortcut import Shortcut
from dreamfleet.transport.wire import Waker


class Welcome(msgspec.Struct, frozen=True):
    """What a server says about itself. Another incarnation is another process or object."""

    protocol: int
    name: str
    incarnation: int
    limit: int
    repeatable: frozenset[str]
    shortcut: str = ""


@dataclass(frozen=True)
class Lost:
    """The connection to the server that had greeted us has ended."""

    address: str


@dataclass(slots=True)
class Message:
    """What a server sent, other than a greeting."""

    header: wire.Header
    frames: list[Any]


_FOREVER = float("inf")
_RETRY = 0.5  # seconds, the longest pause between two attempts
_FIRST_RETRY = 0.02
_CONNECT_TIMEOUT = 3000  # ms; then there is another attempt, at the name's next number
_NOBODY = "nobody listens there"
_SILENT = "there is no answer: its machine is off, or a firewall drops the packets"
_UNKNOWN = "nobody has published its address yet"
_UNKNOWN_NAME = "the name of its machine is not known"

Event = Welcome | Lost | Message | MessageError

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
    """A socket that is connected to wherever the server is.

    Args:
        address: Where the server listens, or a function that says where it listens now.
        keys: The run key, or the key of a role.
        waker: Ends a `sleep`.
    """

    def __init__(
        self, address: str | Callable[[], str], keys: Keys | RoleKey | None, waker: Waker
    ) -> None:
        self.events: deque[Event] = deque()
        self.problem = _NOBODY
        self.bytes_in = 0
        self._address: Address | None = None
        self._find: Callable[[], str] | None = None
        if isinstance(address, str):
            self._address = parse(address)
        else:
            self._find = address
        self._keys = keys
        self._waker = waker
        self._greeted = False
        self._pause = _FIRST_RETRY
        self._away_since = time.monotonic()
        self._turn = 0  # which of the server's endpoints is tried
        self._open(self._locate())

    @property
    def address(self) -> str:
        """Where the server is; empty while that is unknown."""
        return self._address.text if self._address else ""

    def _locate(self) -> Address | None:
        """Where the server is now, or None while nobody knows."""
        if self._find is None:
            return self._address
        try:
            text = self._find()
            address = parse(text) if text else None
            if address is None:
                self.problem = _UNKNOWN
            elif address != self._address:
                self.problem = _NOBODY
            return address
        except AddressUnknown as problem:
            self.problem = str(problem) or _UNKNOWN
        except Exception as problem:
            # The next attempt may succeed. If none does, the message shows this one.
            self.problem = f"its address cannot be found: {problem!r}"
        return None

    def _open(self, address: Address | None) -> None:
        self._address = address
        self._shortcut: Shortcut | None = None
        self._shortcut_descriptor = -1
        self._packets = False  # there may be some to read
        self._messages = True  # libzmq may have some; its descriptor only tells of changes
        self._by_libzmq: set[int] = set()  # calls that went there and have no answer
        # One context, and so one I/O thread of libzmq, serves all clients of a process.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        wire.set_limits(self._socket)
        self._socket.linger = 1000
        self._socket.reconnect_ivl = 20
        self._socket.reconnect_ivl_max = 500
        tcp = address is not None and address.kind == "tcp"
        choices = endpoints(address) if address else []
        endpoint = choices[self._turn % len(choices)] if choices else ""
        self._socket.ipv6 = "[" in endpoint
        if tcp:
            # An attempt whose packets are lost would be repeated after ever longer pauses, up to a
            # minute after the network is back.
            self._socket.connect_timeout = _CONNECT_TIMEOUT
        if address is not None and address.named:
            # One attempt, because the next one may be at another number of the same name.
            self._socket.reconnect_ivl = -1
        if self._keys and address and address.kind == "tcp":
            self._keys.protect_client(self._socket)
        # Without a limit: libzmq's only I/O thread blocks on a monitor that is full, and nobody
        # reads this one while the client is idle.
        events = f"inproc://monitor-{secrets.token_hex(8)}"
        self._socket.monitor(events, _EVENTS | zmq.Event.CLOSED if tcp else _EVENTS)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.rcvhwm = 0
        self._monitor.linger = 0
        self._monitor.connect(events)
        self._monitor_descriptor = self._monitor.fileno()
        self._monitor_ready = True  # its descriptor only tells of changes after this
        self._final = False  # libzmq has given up, and does not try again by itself
        self._failed = False  # the attempt at one number of a name has, or the connection has ended
        self._attempt_at = time.monotonic()
        self._retry_at = time.monotonic() + self._pause if self._find else _FOREVER
        self._poller = select.poll()
        for source in (self._socket, self._monitor, self._waker):
            self._poller.register(source.fileno(), select.POLLIN)
        if address:
            if not endpoint:
                self.problem = _UNKNOWN_NAME
                self._try_another()
            elif self.problem == _UNKNOWN_NAME:
                self.problem = _NOBODY
            self._connect(address, endpoint or address.endpoint)

    def _connect(self, address: Address, endpoint: str) -> None:
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            text = (
                f"{address.text} is no address to connect to: write the name or number of the "
                "machine where the server runs"
            )
            if self._find is None:
                self.close(linger=0)
                raise AddressError(f"{text}.") from None
            self.problem = text

    def send(self, frames: list[Any], call: int = 0) -> None:
        """Send a message: a call with this number, or a greeting. A connection that has ended takes
        none, and is lost."""
        if call and self._shortcut and not self._by_libzmq and self._shortcut.send(frames):
            return
        if call and self._shortcut:
            self._by_libzmq.add(call)
        self._messages = True  # because sending may swallow the signal of one that came
        try:
            wire.send(self._socket, frames)
        except zmq.Again:
            self._try_another()
            self._waker.wake()

    def greet(self) -> None:
        """Have the server greet back, after it has read what was sent before."""
        self.send(wire.pack(wire.HELLO, 0, encode(None)))

    def sleep(self, timeout: float) -> None:
        """Wait for something to read, a wake-up or the end of `timeout` seconds. Touches no
        socket, so another thread may send meanwhile."""
        timeout = min(timeout, max(0.0, self._retry_at - time.monotonic()))
        self._poll(None if timeout == _FOREVER else 1000 * timeout)

    def has_events(self) -> bool:
        """Whether there is something to `collect`. Does not wait."""
        return self._poll(0.0) or self._retry_at <= time.monotonic()

    def _poll(self, milliseconds: float | None) -> bool:
        ready = self._poller.poll(milliseconds)
        for descriptor, _ in ready:
            if descriptor == self._shortcut_descriptor:
                self._packets = True
                continue
            self._messages = True
            if descriptor == self._waker.fileno():
                self._waker.clear()
            elif descriptor == self._monitor_descriptor:
                self._monitor_ready = True
        return bool(ready)

    @property
    def readable(self) -> bool:
        """Whether a message is waiting."""
        return wire.readable(self._socket)

    def collect(self) -> None:
        """Turn what has come into events, one at a time."""
        if not self.events:
            if self._monitor_ready:
                self._read_monitor()  # it may send, so it comes before the look at the socket
            if not self.events and self._shortcut and self._packets:
                self._read_packet(self._shortcut)
            if not self.events and self._messages:
                if message := wire.receive(self._socket):
                    self._read(message)
                else:
                    self._messages = False
            if self._retry_at <= time.monotonic():
                if self._greeted:
                    self._lose()
                else:
                    self._retry()

    def close(self, linger: int | None = None) -> None:
        self._end_shortcut()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger)

    def _read(self, message: list[Any]) -> None:
        frames = message[1:]
        self.bytes_in += sum(map(len, message))
        try:
            header = wire.unpack(message[0])
            if header.kind == wire.WELCOME:
                welcome = self._welcome(header, frames)
                self.events.append(welcome)
                if not self._greeted:
                    self._open_shortcut(welcome.shortcut)
                self._greeted = True
                self._retry_at, self._pause = _FOREVER, _FIRST_RETRY
            else:
                self._by_libzmq.discard(header.id)
                self.events.append(Message(header, frames))
        except MessageError as problem:
            self.events.append(problem)

    def _open_shortcut(self, token: str) -> None:
        if token and self._address and self._address.kind != "tcp":
            self._shortcut = Shortcut.open(self._address.path, token)
        if self._shortcut:
            self._shortcut_descriptor = self._shortcut.fileno()
            self._poller.register(self._shortcut_descriptor, select.POLLIN)

    def _end_shortcut(self) -> None:
        if self._shortcut:
            self._poller.unregister(self._shortcut_descriptor)
            self._shortcut_descriptor = -1
            self._shortcut.close()
            self._shortcut = None

    def _read_packet(self, shortcut: Shortcut) -> bool:
        """Read a packet, the first of which only says that the server reads ours; False if there is
        none."""
        message = shortcut.receive()
        if message is None:
            self._packets = False
            if shortcut.ended:
                self._end_shortcut()
            return False
        if shortcut.ready:
            self._read(message or [b""])
        shortcut.ready = True
        return True

    def _welcome(self, header: wire.Header, frames: list[Any]) -> Welcome:
        try:
            welcome = msgspec.convert(wire.value_of(header, frames), Welcome)
        except msgspec.ValidationError as problem:
            raise MessageError(f"The greeting of {self.address} is not valid: {problem}") from None
        if welcome.protocol != wire.PROTOCOL:
            raise MessageError(
                f"{welcome.name} at {self.address} speaks protocol {welcome.protocol} and "
                f"this client {wire.PROTOCOL}: use the same version of Dreamfleet on both sides."
            )
        return welcome

    def _read_monitor(self) -> None:
        self._monitor_ready = False
        while True:
            try:
                # Its first two bytes; zmq.utils.monitor would import asyncio to say so.
                message = self._monitor.recv_multipart(zmq.NOBLOCK)[0]
            except zmq.Again:
                return
            event = int.from_bytes(message[:2], sys.byteorder)
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.problem = "it takes connections but does not greet"
                self.greet()
            elif event in (zmq.Event.DISCONNECTED, zmq.Event.CLOSED):
                if self._greeted:
                    self._lose()
                    return
                if event == zmq.Event.CLOSED:
                    now = time.monotonic()
                    silent = now - self._attempt_at >= 0.9e-3 * _CONNECT_TIMEOUT
                    self.problem, self._attempt_at = _SILENT if silent else _NOBODY, now
                if self._address and self._address.named:
                    self._try_another()
            else:
                self.problem = _HANDSHAKE_FAILURES[zmq.Event(event)]
                if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                    self._final = True
                    self._retry_at = time.monotonic() + _RETRY

    def _try_another(self) -> None:
        """Try the name's next number after a pause."""
        self._failed = True
        self._retry_at = min(self._retry_at, time.monotonic() + self._pause)

    def _lose(self) -> None:
        # What the server had answered before it went still counts.
        while self._shortcut and self._read_packet(self._shortcut):
            pass
        while message := wire.receive(self._socket):
            self._read(message)
        self.problem = "the connection was lost"
        self._greeted = False
        self._away_since = time.monotonic()
        self.events.append(Lost(self.address))
        # libzmq would connect again by itself. A fresh socket forgets what was queued for the old
        # server: whether that is sent again is decided call by call.
        self._reopen(self._locate())

    def _retry(self) -> None:
        """Try again where the server is now. At the same number libzmq tries again by itself,
        except after a failure that it takes for final."""
        # A tenth of the time that it has been away: a server that is restarted is found at once.
        self._pause = min(max(_FIRST_RETRY, (time.monotonic() - self._away_since) / 10), _RETRY)
        address = self._locate()
        if self._failed:
            self._turn += 1
        if self._final or self._failed or address != self._address:
            self._reopen(address)
        else:
            self._retry_at = time.monotonic() + self._pause

    def _reopen(self, address: Address | None) -> None:
        self.close(linger=0)
        self._open(address)
