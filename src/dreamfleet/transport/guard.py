"""Limits of connections that libzmq does not have.

libzmq limits the size of one part of a message (`MAX_MESSAGE`) and the time of a handshake, but
neither the number of connections nor the parts of a message that it keeps until the last one has
come. So a server follows its connections: libzmq tells which it has accepted, the system how many
bytes came by each (TCP_INFO), and the server adds up the sizes of the messages that it has read.
The difference is not finished.

Only for TCP, and bytes only on Linux. A process that connects to a socket file has the same user,
and could end the server as well.
"""

from __future__ import annotations

import os
import resource
import socket as sockets
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from dreamfleet.transport import wire

_INFO_BYTES, _RECEIVED = 136, 128  # of the kernel's struct tcp_info: its start, and where
_HANDSHAKE_BYTES = 1 << 16  # of a handshake and a greeting, at most
_PAUSE, _SHORT_PAUSE, _LONGEST_PAUSE = 1.0, 0.1, 2.0  # seconds between two checks
_MUCH = 1 << 20  # unfinished bytes that are a reason to check again soon
_IDLE, _PINGS, _MAX_PINGS = 4096, 32.0, 1 << 20  # bytes, a second, and in any time


@dataclass(slots=True)
class _Connection:
    """A connection that libzmq has accepted."""

    descriptor: int
    heard: float  # when a message last came by it
    greeted: bool = False  # one has
    received: int = 0  # bytes that have come
    unfinished: int = 0  # of them, or pings
    checks: int = 0  # in a row that found the same message unfinished
    seconds: float = 0.0  # for which it is


class Guard:
    """Ends connections that are too many or hold too much.

    Args:
        port: Where the server listens.
        seconds: That a message may take, from its first part to its last.
        total: Bytes of unfinished messages, of all connections.
        unauthenticated: Connections that no message has come by yet; the oldest are ended first,
            because a handshake is short.
        most: Other connections, and no more than half of the files that a process may open; the
            newest are ended first.
        clock: Seconds, rising.
    """

    def __init__(
        self,
        port: int,
        seconds: float = wire.MESSAGE_SECONDS,
        total: int = wire.MAX_UNFINISHED,
        unauthenticated: int = wire.MAX_UNAUTHENTICATED,
        most: int = wire.MAX_CONNECTIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port, self._clock = port, clock
        self._seconds, self._total, self._unauthenticated = seconds, total, unauthenticated
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = min(most, files // 2) if files > 0 else most
        self._connections: dict[int, _Connection] = {}  # by descriptor, the oldest first
        self._checked = clock()
        self.due = self._checked
        """When the next check is."""

    def accepted(self, descriptor: int) -> None:
        """libzmq has accepted a connection."""
        self.closed(descriptor)
        now = self._clock()
        self._connections[descriptor] = _Connection(descriptor, now)
        self.due = min(self.due, now + _SHORT_PAUSE)

    def closed(self, descriptor: int) -> None:
        """A connection has ended."""
        self._connections.pop(descriptor, None)

    def check(self, read: Mapping[int, int]) -> int:
        """End what has to end; returns how many.

        Args:
            read: The bytes of the messages that were read since the last check, by descriptor.
        """
        now = self._clock()
        # A server that was too busy to check was too busy to read, which is no fault of a peer.
        passed, self._checked = min(now - self._checked, _LONGEST_PAUSE), now
        for each in self._connections.values():
            self._account(each, read.get(each.descriptor), now, passed)
        ended = [each for each in self._excess() if shut_down(each.descriptor, self._port)]
        for each in ended:
            self.closed(each.descriptor)
        much = sum(each.unfinished for each in self._connections.values() if each.checks) > _MUCH
        self.due = now + (_SHORT_PAUSE if ended or much else _PAUSE)
        return len(ended)

    def _account(self, each: _Connection, read: int | None, now: float, passed: float) -> None:
        received = _received(each)
        each.unfinished += received - each.received
        each.received = received
        # Pings come as long as a connection is idle, and are not read as messages.
        pings = _IDLE + int(min(_MAX_PINGS, _PINGS * (now - each.heard)))
        if read is not None:  # what was not finished at the last check is now
            each.unfinished = max(0, each.unfinished - read - pings)
            each.greeted, each.heard = True, now
            each.checks, each.seconds, passed, pings = 0, 0.0, 0.0, _IDLE
        if each.unfinished > pings:
            each.checks += 1
            each.seconds += passed
        else:
            each.checks, each.seconds = 0, 0.0

    def _excess(self) -> Iterator[_Connection]:
        """Connections that hold something for too long or too much, or are too many."""
        left: list[_Connection] = []
        for each in self._connections.values():
            too_much = each.checks and each.unfinished > _HANDSHAKE_BYTES and not each.greeted
            if each.seconds > self._seconds or too_much:
                yield each
            else:
                left.append(each)
        # Seen at one check, it may be whole and only not read yet; seen at two, it is not.
        holding = sorted((c for c in left if c.checks > 1), key=lambda c: c.unfinished)
        over = sum(each.unfinished for each in holding) - self._total
        while over > 0:
            over -= holding[-1].unfinished
            yield holding.pop()
        new = [each for each in left if not each.greeted]
        yield from new[: max(0, len(new) - self._unauthenticated)]
        yield from [each for each in left if each.greeted][self._most :]


def _received(each: _Connection) -> int:
    """Bytes that have come by a connection."""
    with suppress(OSError, struct.error, AttributeError):
        with sockets.socket(fileno=os.dup(each.descriptor)) as copy:
            info = copy.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _INFO_BYTES)
        return int(struct.unpack_from("Q", info, _RECEIVED)[0])
    return each.received


def shut_down(descriptor: int, port: int, peer: str = "") -> bool:
    """End a connection to this port; False if it is not there, or no files are left. libzmq has no
    call for that; it notices it as if the peer had hung up, and frees what it held.

    Args:
        descriptor: Of the connection.
        port: Where the server listens; 0 for a socket file.
        peer: The address of the other side, if it is known.
    """
    with suppress(OSError), sockets.socket(fileno=os.dup(descriptor)) as copy:
        # The connection may have ended, and its descriptor may be another one's by now.
        if not port or (copy.getsockname()[1] == port and peer in ("", str(copy.getpeername()[0]))):
            copy.shutdown(sockets.SHUT_RDWR)
            return True
    return False
