"""One client's connection: finding the server, connecting, greeting, noticing loss.

Touched by one thread at a time, under the client's lock; see `client`. What it learns it puts into
`events`, in order: `Welcome` when a server has greeted back, `Lost` when the connection to it has
ended, and messages. How bytes travel is the link's part: `local` within a machine, `remote` between
machines.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from dreamfleet.transport import local, wire
from dreamfleet.transport.address import Address, endpoints, parse
from dreamfleet.transport.codec import Encoded, encode
from dreamfleet.transport.errors import (
    AddressError,
    Disconnected,
    MessageError,
)
from dreamfleet.transport.local import LocalLink
from dreamfleet.transport.remote import RemoteLink
from dreamfleet.transport.security import Keys, RoleKey
from dreamfleet.transport.slab import Memory
from dreamfleet.transport.wire import NO_SERVER, Waker


class Welcome(msgspec.Struct, frozen=True):
    """What a server says about itself. Another incarnation is another process or object."""

    protocol: int
    name: str
    incarnation: int
    limit: int
    repeatable: frozenset[str]


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
_MAX_PAUSE_SECONDS = 0.5  # seconds, the longest pause between two attempts
_FIRST_PAUSE_SECONDS = 0.02
_UNKNOWN = "its address is not published yet"
_UNKNOWN_NAME = "the name of its machine is not known"

Event = Welcome | Lost | Message | MessageError
Link = LocalLink | RemoteLink


def open_link(address: Address, endpoint: str, keys: Keys | RoleKey | None) -> Link:
    """A connection to one of the endpoints of an address, over which nothing was said yet."""
    if address.kind != "tcp" and local.AVAILABLE:
        return LocalLink(address.path)
    return RemoteLink(address, endpoint, keys)


class Connection:
    """A connection to wherever the server is.

    Args:
        address: Where the server listens, or a function that says where it listens now.
        keys: The run key, or the key of a role.
        waker: Ends a `sleep`.
    """

    def __init__(
        self, address: str | Callable[[], str], keys: Keys | RoleKey | None, waker: Waker
    ) -> None:
        self.events: deque[Event] = deque()
        self.problem = NO_SERVER
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
        self._pause = _FIRST_PAUSE_SECONDS
        self._away_since = time.monotonic()
        self._turn = 0  # which of the server's endpoints is tried
        self._open(self._locate())

    @property
    def address(self) -> str:
        """Where the server is; empty while that is unknown."""
        return self._address.text if self._address else ""

    def _locate(self) -> Address | None:
        """Where the server is now, or None while that is unknown."""
        if self._find is None:
            return self._address
        try:
            text = self._find()
            address = parse(text) if text else None
            if address is None:
                self.problem = _UNKNOWN
            elif address != self._address:
                self.problem = NO_SERVER
            return address
        except Exception as problem:
            # The next attempt may succeed. If none does, the message shows this one.
            self.problem = f"its address cannot be found: {problem!r}"
        return None

    def _open(self, address: Address | None) -> None:
        self._address = address
        self._link: Link | None = None
        self._failed = False  # the attempt has, or the connection has ended
        self._retry_at = time.monotonic() + self._pause if self._find else _FOREVER
        self._poller = select.poll()
        self._poller.register(self._waker.fileno(), select.POLLIN)
        try:
            self._link = self._connect(address) if address else None
        except Disconnected as problem:
            self.problem = str(problem)
            self._try_again()
        if self._link:
            self._link.register(self._poller)
        # A local connection is made at once, or never. libzmq signals when it has made one.
        if isinstance(self._link, LocalLink) and (change := self._link.change()):
            self._on_change(change)

    def _connect(self, address: Address) -> Link | None:
        if address.kind != "tcp":
            return open_link(address, address.text, self._keys)
        choices = endpoints(address)
        if not choices:
            raise Disconnected(_UNKNOWN_NAME)
        if self.problem == _UNKNOWN_NAME:
            self.problem = NO_SERVER
        try:
            return open_link(address, choices[self._turn % len(choices)], self._keys)
        except AddressError as problem:
            if self._find is None:
                raise
            self.problem = str(problem).rstrip(".")
            return None

    def send(self, frames: list[Any]) -> bool:
        """Send a message; False if the connection has ended, which is lost then."""
        if self._link is not None and self._link.send(frames):
            return True
        self._try_again()
        self._waker.wake()
        return False

    def keep(self, value: Encoded) -> Encoded:
        """A value that stays as it is now, whatever its arrays are used for later."""
        if not value.frames:
            return value
        kept = self._link.keep(value.frames) if self._link else None
        return value.snapshot() if kept is None else value.with_frames(kept)

    def memory(self, size: int) -> Memory | None:
        """Memory whose content `send` does not copy, if there is some."""
        return self._link.memory(size) if type(self._link) is LocalLink else None

    @property
    def waiting(self) -> bool:
        """Whether something that was sent waits until there is room for it."""
        return self._link is not None and self._link.waiting

    def greet(self) -> None:
        """Have the server greet back, after it has read what was sent before."""
        self.send(wire.pack(wire.HELLO, 0, encode(None)))

    def direct_link(self) -> LocalLink | None:
        """The link, if it is within the machine and has nothing to do but to carry a call."""
        link = self._link
        if type(link) is LocalLink and link.idle and not self.events and self._retry_at == _FOREVER:
            return link
        return None

    def poll(self, timeout: float | None) -> bool:
        """Wait as `sleep` does; returns whether something has come."""
        return bool(self._poller.poll(None if timeout is None else 1000 * timeout))

    def sleep(self, timeout: float) -> None:
        """Wait for something to read, a wake-up or the end of `timeout` seconds. Touches no
        socket, so another thread may send meanwhile."""
        timeout = min(timeout, max(0.0, self._retry_at - time.monotonic()))
        for descriptor, events in self._poller.poll(
            None if timeout == _FOREVER else 1000 * timeout
        ):
            if descriptor == self._waker.fileno():
                self._waker.clear()
            if self._link:  # a wake-up may stand for a signal that a send has swallowed
                self._link.notice(descriptor, events)

    @property
    def readable(self) -> bool:
        """Whether a message waits that `sleep` may not notice."""
        return self._link is not None and self._link.readable

    def collect(self) -> None:
        """Turn what has come into events, one at a time."""
        link = self._link
        while link and link is self._link and not self.events:
            # A change may send, so it comes before the look at what has come.
            if change := link.change():
                self._on_change(change)
            elif (message := link.receive()) is not None:
                self._read(message)
            elif not link.has_changed:
                break
        if not self.events and self._retry_at <= time.monotonic():
            if self._greeted:
                self._lose()
            else:
                self._retry()

    def _on_change(self, change: wire.Change) -> None:
        if change.connected:
            self.problem = "it accepts connections but sends no greeting"
            self.greet()
        elif self._greeted:
            self._lose()
        else:
            self.problem = change.problem or self.problem
            self._try_again()

    def close(self, linger: int | None = None) -> None:
        if self._link:
            self._link.close(linger)

    def _read(self, message: list[Any]) -> None:
        self.bytes_in += sum(map(len, message))
        try:
            header = wire.unpack(message[0] if message else b"")
            if header.kind == wire.WELCOME:
                self.events.append(self._welcome(header, message[1:]))
                self._greeted = True
                self._retry_at, self._pause = _FOREVER, _FIRST_PAUSE_SECONDS
            else:
                self.events.append(Message(header, message[1:]))
        except MessageError as problem:
            self.events.append(problem)

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

    def _try_again(self) -> None:
        """Make another attempt after a pause: at the name's next number, if it has several."""
        self._failed = True
        self._retry_at = min(self._retry_at, time.monotonic() + self._pause)

    def _lose(self) -> None:
        if self._link:
            for message in self._link.drain():  # what was answered before the end still counts
                self._read(message)
        self.problem = "the connection was lost"
        self._greeted = False
        self._away_since = time.monotonic()
        self.events.append(Lost(self.address))
        # What was queued for the old server is forgotten: whether it is sent again is decided call
        # by call.
        self._reopen(self._locate())

    def _retry(self) -> None:
        """Try again where the server is now, unless an attempt there is under way."""
        # A tenth of the time that it has been away: a server that is restarted is found at once.
        self._pause = min(
            max(_FIRST_PAUSE_SECONDS, (time.monotonic() - self._away_since) / 10),
            _MAX_PAUSE_SECONDS,
        )
        address = self._locate()
        if self._failed:
            self._turn += 1
        if self._failed or address != self._address:
            self._reopen(address)
        else:
            self._retry_at = time.monotonic() + self._pause

    def _reopen(self, address: Address | None) -> None:
        self.close(linger=0)
        self._open(address)
