"""Connections between machines: TCP by libzmq, encrypted where there are keys.

libzmq connects, greets, pings and notices loss in a thread of its own. Its sockets belong to no
thread, but to one at a time. They signal a message once: a send may swallow the signal of one that
came meanwhile, so both sides look again after they have sent.
"""

from __future__ import annotations

import logging
import secrets
import select
import struct
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import zmq

from dreamfleet.transport import wire
from dreamfleet.transport.address import Address, prepare
from dreamfleet.transport.codec import Buffer, encode
from dreamfleet.transport.errors import AddressError
from dreamfleet.transport.guard import Guard, shut_down
from dreamfleet.transport.listening import FOREVER, Listener, Origin, Poller
from dreamfleet.transport.security import (
    RUN,
    Authenticator,
    Identify,
    Identity,
    Keys,
    Revoked,
    RoleKey,
)

log = logging.getLogger(__name__)

# Plain numbers: pyzmq's enums do their arithmetic in Python, which shows at this rate.
_POLLIN = int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
_send = zmq.backend.Socket.send  # without the options of the class above it
_get = zmq.backend.Socket.get
_EVENTS = zmq.SocketOption.EVENTS

_TRUSTED = Identity(RUN)
_REVOKED_CHECK_SECONDS = 1.0  # between two looks at what is revoked
_NO_RECONNECT = 3_600_000  # ms; without reconnection libzmq drops answers that it has received
_CONNECT_TIMEOUT = 3000  # ms; then there is another attempt, at the name's next number
_PROBE = wire.pack(wire.STALE, 0, encode(None))  # which a client ignores
_SILENT = "there is no answer: its machine is off, or a firewall drops the packets"


def send(socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    """Hand a whole message to libzmq, which copies it.

    Raises:
        zmq.ZMQError: It cannot be delivered.
    """
    for frame in frames[:-1]:
        _send(socket, frame, _NOBLOCK_MORE)
    _send(socket, frames[-1], _NOBLOCK)


def receive(socket: zmq.Socket[bytes]) -> tuple[zmq.Frame, list[Any]] | None:
    """Read one whole message, if one is waiting: its first frame, which also knows about the
    connection, and the others; none of them if they are too many."""
    if not readable(socket):  # far cheaper than the exception that an empty socket raises
        return None
    first = frame = socket.recv(_NOBLOCK, copy=False)
    frames: list[Any] = []
    while frame.more:
        frame = socket.recv(copy=False)
        if len(frames) <= wire.MAX_FRAMES:
            frames.append(frame.buffer)
    return first, frames if len(frames) <= wire.MAX_FRAMES else []


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message is waiting."""
    return bool(int(_get(socket, _EVENTS)) & _POLLIN)


def set_limits(socket: zmq.Socket[bytes]) -> None:
    """Bound what one peer may cost, and notice a peer that no longer responds."""
    socket.maxmsgsize = wire.MAX_MESSAGE
    socket.sndhwm = socket.rcvhwm = wire.MAX_INFLIGHT + 8
    socket.heartbeat_ivl = wire.HEARTBEAT
    socket.heartbeat_timeout = wire.HEARTBEAT_TIMEOUT
    socket.heartbeat_ttl = wire.HEARTBEAT_TIMEOUT
    socket.handshake_ivl = wire.HANDSHAKE_TIMEOUT


def monitor(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """A socket that tells of a socket's connections.

    Without a limit: libzmq's only I/O thread blocks on a monitor that is full.
    """
    address = f"inproc://monitor-{secrets.token_hex(8)}"
    socket.monitor(address, events)
    made: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    made.rcvhwm = made.linger = 0
    made.connect(address)
    return made


def next_event(events: zmq.Socket[bytes]) -> tuple[int, int] | None:
    """What a monitor tells next, and the descriptor or number with it."""
    if not readable(events):
        return None
    # zmq.utils.monitor would import asyncio to read these six bytes.
    event, value = struct.unpack("=hi", events.recv_multipart()[0])
    return event, value


# --- servers -------------------------------------------------------------------------------------


class RemoteOrigin(Origin):
    """A connection of libzmq, which a message came by."""

    __slots__ = ("_frame",)

    def __init__(self, frame: zmq.Frame, identity: Identity) -> None:
        super().__init__(frame.bytes, identity)
        self._frame = frame

    @property
    def address(self) -> str:
        try:
            text = str(self._frame.get("Peer-Address"))
        except zmq.ZMQError:  # a peer that speaks a protocol of libzmq's early days
            return "an unknown address"
        # libzmq's words for peers on the same machine: localhost:UID:GID:PID
        return f"process {text.rpartition(':')[2]}" if text.startswith("localhost:") else text

    @property
    def descriptor(self) -> int:
        """The descriptor of the connection; -1 if it is not known."""
        try:
            return int(self._frame.get(zmq.SRCFD))
        except zmq.ZMQError:
            return -1


class RemoteListener(Listener):
    """Listens at a port.

    Args:
        address: Where.
        name: Shown in errors.
        keys: The run key, if connections are encrypted.
        roles: The roles that may call some method.
        identify: What keys stand for that do not follow from the run key.
        revoked: Names that lose their connections.

    Raises:
        AddressError: The address is taken, or none of this machine's.
    """

    def __init__(
        self,
        address: Address,
        name: str,
        keys: Keys | None,
        roles: Collection[str],
        identify: Identify | None,
        revoked: Revoked | None,
    ) -> None:
        self._name, self._revoked = name, revoked if keys else None
        self._ending: set[int] = set()  # descriptors of connections that were hung up on
        self._named: dict[int, RemoteOrigin] = {}  # by descriptor: who was invited
        self._read_by: dict[int, int] = {}  # bytes of messages since the guard looked
        self._noticed = True  # there may be events; descriptors only tell of changes
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._authenticator = (
                Authenticator(self._context, keys, roles, identify) if keys else None
            )
            self._socket, self.address = self._bind(address, keys)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._revoked_at = -FOREVER if self._revoked else FOREVER
        self._part_cost = wire.CURVE_PART_COST if keys else wire.PART_COST
        self._guard = Guard(self.address.port) if self.address.kind == "tcp" else None
        self._sockets = [self._socket, self._monitor]
        if self._authenticator:
            self._sockets.append(self._authenticator.socket)
        self._descriptors = {int(socket.fileno()) for socket in self._sockets}

    def _bind(self, address: Address, keys: Keys | None) -> tuple[zmq.Socket[bytes], Address]:
        socket = self._context.socket(zmq.ROUTER)
        set_limits(socket)
        socket.backlog = wire.BACKLOG
        socket.router_mandatory = True  # an answer that cannot be delivered is counted, not lost
        socket.linger = 1000
        socket.ipv6 = ":" in address.host
        if keys:
            keys.protect_server(socket)
        self._monitor = monitor(socket, zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED)
        prepare(address)
        try:
            if address.kind == "tcp" and address.port == 0:
                socket.bind(address.text.replace("{auto}", "*"))
                endpoint = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0")
                address = Address("tcp", address.host, int(endpoint.rpartition(b":")[2]))
            else:
                socket.bind(address.text)
        except zmq.ZMQError as problem:
            raise AddressError(f"{self._name} cannot bind {address.text}: {problem}.") from None
        return socket, address

    @property
    def due(self) -> float:
        return min(self._guard.due if self._guard else FOREVER, self._revoked_at)

    def register(self, poller: Poller) -> None:
        for descriptor in self._descriptors:
            poller.register(descriptor, select.POLLIN)

    def notice(self, descriptor: int, events: int) -> None:
        del events
        self._noticed |= descriptor in self._descriptors

    def _follow_connections(self) -> None:
        """Answer what libzmq asks about keys, and follow which connections there are."""
        while self._authenticator and readable(self._authenticator.socket):
            self.refused += not self._authenticator.answer()
        while event := next_event(self._monitor):
            kind, descriptor = event
            self._ending.discard(descriptor)
            self._named.pop(descriptor, None)
            if self._guard and kind == zmq.Event.ACCEPTED:
                self._guard.accepted(descriptor)
            elif self._guard:
                self._guard.closed(descriptor)

    def receive(self) -> tuple[Origin, list[Any]] | None:
        if self._noticed:
            self._noticed = False
            self._follow_connections()
        while message := receive(self._socket):
            frame, frames = message
            origin = self._origin(frame)
            if self._guard:
                size = sum(map(len, frames)) + self._part_cost * len(frames)
                self._read_by[origin.descriptor] = self._read_by.get(origin.descriptor, 0) + size
            if not (self._authenticator and origin.identity.name in self._authenticator.revoked):
                return origin, frames
            self.hang_up(origin)  # it came after the name was revoked
        return None

    def _origin(self, frame: zmq.Frame) -> RemoteOrigin:
        """Who a message is from. What its key stands for was found out when it connected."""
        if self._authenticator is None:
            return RemoteOrigin(frame, _TRUSTED)
        identity = self._authenticator.identities[str(frame.get("User-Id"))]
        origin = RemoteOrigin(frame, identity)
        if identity.name:
            known = self._named.get(origin.descriptor)
            # Messages of a peer that has gone come late, when its descriptor is another one's.
            if known is None or (known.peer != origin.peer and self.connected(origin.peer)):
                self._named[origin.descriptor] = origin
        return origin

    def send(self, peer: bytes, frames: list[Buffer]) -> bool:
        try:
            send(self._socket, [peer, *frames])
        except zmq.ZMQError:
            return False
        return True

    def connected(self, peer: bytes) -> bool:
        """libzmq refuses a message to a peer that is not connected."""
        try:
            send(self._socket, [peer, *_PROBE])
        except zmq.ZMQError as problem:
            return problem.errno == zmq.EAGAIN  # it is, but it does not read
        return True

    def readable(self) -> bool:
        return readable(self._socket)

    def hang_up(self, origin: Origin) -> None:
        descriptor = origin.descriptor if isinstance(origin, RemoteOrigin) else -1
        # What it had sent until then still comes.
        if descriptor in self._ending or not self.connected(origin.peer):
            return
        if shut_down(descriptor, self.address.port, origin.address):
            self._ending.add(descriptor)
            self.ended += 1

    def on_due(self) -> None:
        """End the connections of those who were revoked, and those that hold more of unfinished
        messages than they may."""
        now = time.monotonic()
        self._follow_connections()
        if self._guard and self._guard.due <= now:
            self.ended += self._guard.check(self._read_by)
            self._read_by.clear()
        if self._revoked and self._authenticator and self._revoked_at <= now:
            self._revoked_at = now + _REVOKED_CHECK_SECONDS
            self._end_revoked(self._revoked, self._authenticator)

    def _end_revoked(self, revoked: Revoked, authenticator: Authenticator) -> None:
        try:
            authenticator.revoked = frozenset(revoked())
        except Exception:
            log.exception("%s: the revoked names cannot be read.", self._name)
        for origin in list(self._named.values()):
            if origin.identity.name in authenticator.revoked:
                self.hang_up(origin)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()  # which waits until all sockets are closed


# --- clients -------------------------------------------------------------------------------------

_CHANGES: dict[int, str] = {  # with the problem of an attempt that has failed
    zmq.Event.HANDSHAKE_SUCCEEDED: "",
    zmq.Event.DISCONNECTED: "",
    zmq.Event.CONNECT_RETRIED: wire.NO_SERVER,  # follows CLOSED, and comes without it at EMFILE
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed: use the same key on both sides",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "the handshake failed: use a key on both sides",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the server refused the key",
}


class RemoteLink:
    """A client's connection to a port: one attempt, because the next one may be at another number
    of the same name.

    Args:
        address: Where the server listens.
        endpoint: What libzmq is told: one of the numbers that the address stands for.
        keys: The run key, or the key of a role.

    Raises:
        AddressError: It is no address to connect to.
    """

    waiting = False
    """Whether something that was sent waits for room; libzmq sees to that."""

    def __init__(self, address: Address, endpoint: str, keys: Keys | RoleKey | None) -> None:
        # One context, and so one I/O thread of libzmq, serves all clients of a process.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        set_limits(self._socket)
        self._socket.linger = 1000
        self._socket.reconnect_ivl = _NO_RECONNECT
        self._socket.ipv6 = "[" in endpoint
        if address.kind == "tcp":
            # An attempt whose packets are lost would be repeated after ever longer pauses, up to a
            # minute after the network is back.
            self._socket.connect_timeout = _CONNECT_TIMEOUT
            if keys:
                keys.protect_client(self._socket)
        self._monitor = monitor(self._socket, sum(_CHANGES))
        self._monitor_ready = True  # its descriptor only tells of changes after this
        self._changes: deque[wire.Change] = deque()
        self._attempt_at = time.monotonic()
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self.close(linger=0)
            raise AddressError(
                f"{address.text} is not an address to connect to: write the host name or IP "
                "address of the server's machine."
            ) from None

    def fileno(self) -> int:
        return self._socket.fileno()

    def register(self, poller: Poller) -> None:
        for socket in (self._socket, self._monitor):
            poller.register(socket.fileno(), select.POLLIN)

    def notice(self, descriptor: int, events: int) -> None:
        del events
        if descriptor == self._monitor.fileno():
            self._monitor_ready = True

    def take(self) -> list[Any] | wire.Change | None:
        """What has happened next: a message, or a change of the connection."""
        if self._monitor_ready:
            self._read_monitor()
        if message := receive(self._socket):  # what came before the end of a connection, first
            return [message[0].bytes, *message[1]]
        return self._changes.popleft() if self._changes else None

    def _read_monitor(self) -> None:
        self._monitor_ready = False
        while told := next_event(self._monitor):
            event, problem = told[0], _CHANGES[told[0]]
            silent = time.monotonic() - self._attempt_at >= 0.9e-3 * _CONNECT_TIMEOUT
            if event == zmq.Event.CONNECT_RETRIED and silent:
                problem = _SILENT
            self._changes.append(wire.Change(event == zmq.Event.HANDSHAKE_SUCCEEDED, problem))

    def send(self, frames: list[Buffer]) -> bool:
        self._read_monitor()  # libzmq takes messages also for a server that has gone
        if any(not change.connected for change in self._changes):
            return False
        try:
            send(self._socket, frames)
        except zmq.Again:  # it reads nothing
            self._changes.append(wire.Change(connected=False))
            return False
        return True

    @property
    def readable(self) -> bool:
        """Whether a message waits that a poller may not report."""
        return readable(self._socket)

    def close(self, linger: int | None = None) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger)
