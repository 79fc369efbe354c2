"""One client's connection: finding the server, connecting, greeting, noticing loss.

Touched by one thread at a time, under the client's lock; see `client`. `next` tells what has
happened, in order: `Welcome` when a server has greeted back, `Lost` when the connection to it has
ended, and messages. How bytes travel is the link's part: `local` within a machine, `remote` between
machines.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from zmq import ZMQError

from dreamfleet.transport import local, wire
from dreamfleet.transport.address import Address, endpoints, parse
from dreamfleet.transport.codec import Buffer, Encoded, encode
from dreamfleet.transport.errors import AddressError, Disconnected, MessageError
from dreamfleet.transport.listening import FOREVER
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
        self.problem = NO_SERVER
        self.bytes_in = 0
        self._find = None if isinstance(address, str) else address
        self._address = parse(address) if isinstance(address, str) else None
        self._keys, self._waker, self._wake_descriptor = keys, waker, waker.fileno()
        self._link: Link | None = None  # None: the last attempt has failed
        self._greeted = False
        self._retry_at = FOREVER
        self._pause = _FIRST_PAUSE_SECONDS
        self._away_since = time.monotonic()
        self._turn = 0  # which of the server's endpoints is tried
        problem = self._open()
        if isinstance(problem, AddressError) and self._find is None:
            raise problem

    @property
    def address(self) -> str:
        """Where the server is; empty while that is unknown."""
        return self._address.text if self._address else ""

    def send(self, frames: list[Buffer]) -> bool:
        """Send a message; False if the connection has ended, which `next` tells then."""
        if self._link is not None and self._link.send(frames):
            return True
        self._waker.wake()
        return False

    def keep(self, value: Encoded) -> Encoded:
        """A value that stays as it is now, whatever its arrays are used for later."""
        if not value.frames:
            return value
        kept = self._link.keep(value.frames) if type(self._link) is LocalLink else None
        return value.with_frames(kept or [bytes(frame) for frame in value.frames])

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

    def sleep(self, timeout: float) -> None:
        """Wait for something to read, a wake-up or the end of `timeout` seconds. Touches no
        socket, so another thread may send meanwhile."""
        if self._retry_at != FOREVER:
            timeout = min(timeout, max(0.0, self._retry_at - time.monotonic()))
        limit = None if timeout == FOREVER else 1000 * timeout
        for descriptor, events in self._poller.poll(limit):
            if descriptor == self._wake_descriptor:
                self._waker.clear()
            elif self._link:
                self._link.notice(descriptor, events)

    @property
    def readable(self) -> bool:
        """Whether a message waits that `sleep` may not notice."""
        return self._link is not None and self._link.readable

    def next(self) -> Event | None:
        """What has happened next, if anything."""
        while True:
            told = self._link.take() if self._link else None
            if type(told) is list:
                return self._read(told)
            if isinstance(told, wire.Change):
                if told.connected:
                    self.problem = "it accepts connections but sends no greeting"
                    self.greet()
                elif self._greeted:
                    return self._lose()
                else:
                    self.problem = told.problem or self.problem
                    self._hang_up()
                    self._retry_at = min(self._retry_at, time.monotonic() + self._pause)
            elif self._retry_at <= time.monotonic():
                self._retry()
            else:
                return None

    def close(self, linger: int | None = None) -> None:
        if self._link:
            self._link.close(linger)

    # --- messages --------------------------------------------------------------------------------

    def _read(self, message: list[Any]) -> Event:
        self.bytes_in += sum(map(len, message))
        try:
            header = wire.unpack(message[0] if message else b"")
            if header.kind != wire.WELCOME:
                return Message(header, message[1:])
            welcome = self._welcome(header, message[1:])
        except MessageError as problem:
            return problem
        self._greeted = True
        self._retry_at, self._pause = FOREVER, _FIRST_PAUSE_SECONDS
        return welcome

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

    # --- attempts to connect ---------------------------------------------------------------------

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

    def _open(self) -> Exception | None:
        """Make an attempt where the server is now; returns why there is none. What was queued for
        another one is forgotten: whether it is sent again is decided call by call."""
        self._hang_up()
        self._retry_at = time.monotonic() + self._pause
        self._address = self._locate()
        if self._address is None:
            return None
        try:
            self._link = self._connect(self._address)
        except (AddressError, Disconnected, OSError, ZMQError) as problem:  # or no files are left
            self.problem = str(problem).rstrip(".")
            return problem
        self._link.register(self._poller)
        if self._find is None:  # otherwise, the server may move while an attempt is under way
            self._retry_at = FOREVER
        return None

    def _connect(self, address: Address) -> Link:
        choices = endpoints(address)
        if not choices:
            raise Disconnected(_UNKNOWN_NAME)
        if self.problem == _UNKNOWN_NAME:
            self.problem = NO_SERVER
        return open_link(address, choices[self._turn % len(choices)], self._keys)

    def _hang_up(self) -> None:
        self.close(linger=0)
        self._link = None
        self._poller = select.poll()
        self._poller.register(self._wake_descriptor, select.POLLIN)

    def _lose(self) -> Lost:
        self.problem = "the connection was lost"
        self._greeted = False
        self._away_since = time.monotonic()
        lost = Lost(self.address)
        self._open()
        return lost

    def _retry(self) -> None:
        """Try again, at the name's next number if it has several, unless an attempt is under way
        where the server is now."""
        # A tenth of the time that it has been away: a server that is restarted is found at once.
        away = time.monotonic() - self._away_since
        self._pause = min(max(_FIRST_PAUSE_SECONDS, away / 10), _MAX_PAUSE_SECONDS)
        if self._link is None:
            self._turn += 1
            self._open()
        elif self._locate() != self._address:
            self._open()
        else:
            self._retry_at = time.monotonic() + self._pause
