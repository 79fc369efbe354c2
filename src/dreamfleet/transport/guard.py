"""What connections hold that have not finished a message, and when they are ended for it.

libzmq keeps the parts of a message until the last one is here, and of a handshake whatever it is
sent: it has a limit for one part, and none for all of them. So a server looks at its connections
from outside. The system tells which there are and how many bytes came by each (TCP_INFO), and the
server adds up the sizes of the messages that it read. What has come and was not read is not
finished. All that a message costs is this addition.

Only for TCP, and only on Linux, which tells both. Whoever connects to a socket file is a process of
the same user, who could end the server as well.
"""

from __future__ import annotations

import os
import resource
import socket as sockets
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dreamfleet.transport import wire

_FILES = Path("/proc/self/fd")
_INFO_BYTES, _RECEIVED = 136, 128  # of the kernel's struct tcp_info: its start, and where
_GREETING = 1 << 16  # bytes; a handshake and a greeting have one
_PAUSE, _SHORT_PAUSE, _LONGEST_PAUSE = 1.0, 0.1, 2.0  # seconds between two looks
_MUCH = 1 << 20  # bytes that are a reason to look again soon
_IDLE, _PINGS, _MOST_PINGS = 4096, 32.0, 1 << 20  # bytes, a second, and however long


@dataclass(slots=True)
class _Connection:
    """A connection of the server, as the system shows it."""

    descriptor: int
    inode: int
    accepted: float
    heard: float  # when a message last came by it
    greeted: bool = False  # one has
    received: int = 0  # bytes that have come
    holds: int = 0  # of them not finished, or pings
    looks: int = 0  # in a row at which it held the same message
    held_for: float = 0.0  # seconds


class Guard:
    """Ends connections that hold more than they may.

    Args:
        port: Where the server listens.
        seconds: That a message may take, from its first part to its last.
        total: Bytes of unfinished messages, of all connections.
        strangers: Connections that no message has come by yet.
        most: Connections that have greeted; no more than half of the files that a process may open.
        clock: Seconds, rising.
    """

    def __init__(
        self,
        port: int,
        seconds: float = wire.MESSAGE_SECONDS,
        total: int = wire.MAX_UNFINISHED,
        strangers: int = wire.MAX_STRANGERS,
        most: int = wire.MAX_CONNECTIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port, self._clock = port, clock
        self._seconds, self._total, self._strangers = seconds, total, strangers
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = min(most, files // 2) if files > 0 else most
        self._connections: dict[int, _Connection] = {}  # by descriptor
        self._others: dict[int, int] = {}  # sockets that are none of ours: their inodes
        self._looked = clock()
        self.pause = _PAUSE
        """Seconds until the next look."""

    @staticmethod
    def works() -> bool:
        """Whether this system tells what there is to know."""
        return _FILES.is_dir() and hasattr(sockets, "TCP_INFO")

    def look(self, read: Mapping[int, int]) -> int:
        """End what has to end; returns how many.

        Args:
            read: The bytes of the messages that were read since the last look, by descriptor.
        """
        now = self._clock()
        # A server that was too busy to look was too busy to read: nobody is blamed for that.
        passed, self._looked = min(now - self._looked, _LONGEST_PAUSE), now
        for each in self._scan(now):
            self._weigh(each, read.get(each.descriptor), now, passed)
        ended = [each for each in list(self._to_end()) if _hang_up(each)]
        for each in ended:
            del self._connections[each.descriptor]
        much = sum(each.holds for each in self._connections.values() if each.looks) > _MUCH
        self.pause = _SHORT_PAUSE if ended or much else _PAUSE
        return len(ended)

    def _weigh(self, each: _Connection, read: int | None, now: float, passed: float) -> None:
        received = _received(each)
        each.holds += received - each.received
        each.received = received
        # Pings come as long as a connection is idle, and nobody reads them.
        pings = _IDLE + int(min(_MOST_PINGS, _PINGS * (now - each.heard)))
        if read is not None:  # what was not finished at the last look is now
            each.holds = max(0, each.holds - read - pings)
            each.greeted, each.heard = True, now
            each.looks, each.held_for, passed, pings = 0, 0.0, 0.0, _IDLE
        if each.holds > pings:
            each.looks += 1
            each.held_for += passed
        else:
            each.looks, each.held_for = 0, 0.0

    def _to_end(self) -> Iterator[_Connection]:
        """Who holds something for too long or too much, and who are too many."""
        left: list[_Connection] = []
        for each in self._connections.values():
            stranger = each.looks > 0 and each.holds > _GREETING and not each.greeted
            if each.held_for > self._seconds or stranger:
                yield each
            else:
                left.append(each)
        # Seen at one look, it may be whole and only not read yet; seen at two, it is not.
        holding = sorted((c for c in left if c.looks > 1), key=lambda c: c.holds)
        over = sum(each.holds for each in holding) - self._total
        while over > 0:
            over -= holding[-1].holds
            yield holding.pop()
        left.sort(key=lambda c: c.accepted)
        strangers = [each for each in left if not each.greeted]
        # Of strangers the oldest go, because a handshake is short; of all others the newest.
        yield from strangers[: max(0, len(strangers) - self._strangers)]
        yield from [each for each in left if each.greeted][self._most :]

    def _scan(self, now: float) -> list[_Connection]:
        """The connections of the server, as they are now."""
        found: dict[int, _Connection] = {}
        others: dict[int, int] = {}
        for entry in os.scandir(_FILES):
            descriptor = int(entry.name)
            try:
                status = os.stat(descriptor)
            except OSError:  # closed meanwhile
                continue
            if not stat.S_ISSOCK(status.st_mode):
                continue
            inode = status.st_ino
            known = self._connections.get(descriptor)
            if known is not None and known.inode == inode:
                found[descriptor] = known
            elif self._others.get(descriptor) == inode or not self._is_ours(descriptor):
                others[descriptor] = inode
            else:
                found[descriptor] = _Connection(descriptor, inode, now, now)
        self._connections, self._others = found, others
        return list(found.values())

    def _is_ours(self, descriptor: int) -> bool:
        try:
            with sockets.socket(fileno=os.dup(descriptor)) as copy:
                if copy.family not in (sockets.AF_INET, sockets.AF_INET6):
                    return False
                copy.getpeername()  # raises an error if it listens
                return bool(copy.getsockname()[1] == self._port)
        except OSError:
            return False


def _received(each: _Connection) -> int:
    """Bytes that have come by a connection."""
    with suppress(OSError, struct.error):
        with sockets.socket(fileno=os.dup(each.descriptor)) as copy:
            info = copy.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _INFO_BYTES)
        return int(struct.unpack_from("Q", info, _RECEIVED)[0])
    return each.received


def _hang_up(each: _Connection) -> bool:
    """End a connection; libzmq notices it as if the peer had hung up, and frees what it held."""
    try:
        with sockets.socket(fileno=os.dup(each.descriptor)) as copy:
            if os.fstat(copy.fileno()).st_ino != each.inode:
                return False  # it has ended, and its number is another's by now
            copy.shutdown(sockets.SHUT_RDWR)
    except OSError:
        return False
    return True
