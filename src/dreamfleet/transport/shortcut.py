"""A way around libzmq between processes of one machine, for messages that fit into a packet.

libzmq hands every message to a thread of its own, on both sides, and waking these threads takes
several times as long as most calls do. So a server with a socket file has a second one for packets
(`SOCK_SEQPACKET`), which whoever sends or waits writes and reads itself. A client that was greeted
connects there, says the token that came with the greeting, and waits for an answer to it.

A packet is taken as a whole or not at all. One that is too large, or that finds the way full, goes
by libzmq; and so does everything of those who cannot use the shortcut, for whatever reason. libzmq
also greets, and notices when the other side is gone: the end of a shortcut only means that it is
not used any more.

Calls keep their order. A client uses the shortcut while it waits for no answer to a call that went
by libzmq. A server that reads a call from libzmq first takes the packets that its sender had sent
before.
"""

from __future__ import annotations

import resource
import secrets
import select
import socket as sockets
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

from dreamfleet.transport.codec import Buffer

_ROOM = 212_992  # bytes that every Linux grants a socket; it takes packets of nearly twice that
_LARGEST = 2 * _ROOM - 4096
_MOST_FRAMES = 64
_ALIGN = 16
_BACKLOG = 1024
_MOST, _MOST_OFFERS = 4096, 8192
_NOTHING = bytes(_ALIGN)
_BYTE = bytearray(1)
_SIZE_ONLY = sockets.MSG_PEEK | sockets.MSG_TRUNC
_WORD = struct.Struct("<I")


def shortcut_path(path: Path) -> Path:
    """The socket file of the shortcut to a server with this socket file."""
    return path.with_name(f"{path.name}~")


class Shortcut:
    """One end of a connection. Touched by one thread at a time."""

    def __init__(self, socket: sockets.socket) -> None:
        socket.setblocking(False)
        socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, _ROOM)
        self._socket = socket
        self.ready = False
        """Whether the server has answered, and so reads what is sent."""
        self.ended = False
        """Whether the other side has closed it, and everything was read."""

    @classmethod
    def open(cls, path: Path, token: str) -> Shortcut | None:
        """Connect to a server that listens there, if possible."""
        with suppress(OSError, AttributeError):  # which a system without such sockets raises
            socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
            try:
                shortcut = cls(socket)
                socket.connect(str(shortcut_path(path)))
                socket.send(token.encode())
            except OSError:
                socket.close()
                raise
            return shortcut
        return None

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send a message; False if that is not possible now, or with this message."""
        if not self.ready or len(frames) > _MOST_FRAMES:
            return False
        sizes = tuple(map(len, frames))
        parts: list[Buffer] = [_beginning(sizes)]
        for frame, size in zip(frames, sizes, strict=True):
            parts.append(frame)
            if padding := -size % _ALIGN:
                parts.append(_NOTHING[:padding])
        try:
            self._socket.sendmsg(parts, (), sockets.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def receive(self) -> list[Buffer] | None:
        """The frames of the next message; an empty list for one that is malformed, None if there is
        none now."""
        for _ in range(2):
            try:
                size = self._socket.recv_into(_BYTE, 1, _SIZE_ONLY)
                break
            except BlockingIOError:
                return None
            except OSError:  # the other side has ended; what it had sent before is still there
                size = 0
        if not size:
            self.ended = True
            return None
        return split_packet(self._socket.recv(min(size, _LARGEST)))

    def close(self) -> None:
        self._socket.close()


@lru_cache(maxsize=256)
def _beginning(sizes: tuple[int, ...]) -> bytes:
    """How many frames follow, and how large they are."""
    words = struct.pack(f"<{1 + len(sizes)}I", len(sizes), *sizes)
    return words + _NOTHING[: -len(words) % _ALIGN]


def split_packet(packet: bytes) -> list[Buffer]:
    """The frames of a packet; none if it is malformed."""
    count = _WORD.unpack_from(packet)[0] if len(packet) >= _WORD.size else 0
    if not 0 < count <= _MOST_FRAMES or len(packet) < _WORD.size * (1 + count):
        return []
    view, frames = memoryview(packet), list[Buffer]()
    start = _aligned(_WORD.size * (1 + count))
    for size in struct.unpack_from(f"<{count}I", packet, _WORD.size):
        frames.append(view[start : start + size])
        start = _aligned(start + size)
    return frames if start == len(packet) else []


def _aligned(size: int) -> int:
    return size + -size % _ALIGN


Origin = TypeVar("Origin")


class Shortcuts(Generic[Origin]):
    """Those that lead to a server. Touched under its lock.

    Args:
        path: The socket file of the server.

    Raises:
        OSError: There are no such sockets here.
    """

    def __init__(self, path: Path) -> None:
        self._path = shortcut_path(path)
        self._listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
        self._poll = select.epoll()
        try:
            self._path.unlink(missing_ok=True)  # of a server that was killed
            self._listener.setblocking(False)
            self._listener.bind(str(self._path))
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            self._poll.close()
            raise
        self._poll.register(self._listener, select.EPOLLIN)
        self._file = self._path.stat().st_ino
        self._tokens: dict[bytes, str] = {}  # by the name of the peer
        self._offers: dict[str, tuple[bytes, Origin]] = {}  # by token
        self._strangers: dict[int, sockets.socket] = {}  # which have not said their token
        self._ways: dict[int, tuple[Shortcut, bytes, Origin]] = {}  # by descriptor
        self._by_peer: dict[bytes, Shortcut] = {}
        self._readable: deque[int] = deque()
        # Connections of libzmq need files, too.
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = min(_MOST, files // 4) if files > 0 else _MOST

    def fileno(self) -> int:
        """A descriptor that is readable while there is something to do."""
        return self._poll.fileno()

    def offer(self, peer: bytes, origin: Origin) -> str:
        """The token with which a peer may use a shortcut, whose messages then have this origin."""
        if len(self._offers) >= _MOST_OFFERS:
            self._offers.clear()
            self._tokens.clear()
        token = self._tokens.setdefault(peer, secrets.token_hex(16))
        self._offers[token] = peer, origin
        return token

    def receive(self) -> tuple[Origin, list[Buffer]] | None:
        """The next message of anybody, if there is one."""
        while True:
            if not self._readable:
                self._readable.extend(descriptor for descriptor, _ in self._poll.poll(0))
                if not self._readable:
                    return None
            descriptor = self._readable.popleft()
            if descriptor in self._ways:
                shortcut, peer, origin = self._ways[descriptor]
                if (frames := shortcut.receive()) is not None:
                    return origin, frames
                if shortcut.ended:
                    self.drop(peer)
            elif descriptor in self._strangers:
                self._greet(self._strangers.pop(descriptor))
            elif descriptor == self._listener.fileno():
                self._accept()

    def receive_from(self, peer: bytes) -> Iterator[list[Buffer]]:
        """The messages of one peer that are there."""
        if shortcut := self._by_peer.get(peer):
            while (frames := shortcut.receive()) is not None:
                yield frames

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """Send a message to a peer; False if that is not possible."""
        shortcut = self._by_peer.get(peer)
        return shortcut is not None and shortcut.send(frames)

    def drop(self, peer: bytes) -> None:
        """Close the shortcut of a peer, if it has one."""
        if shortcut := self._by_peer.pop(peer, None):
            del self._ways[shortcut.fileno()]
            self._poll.unregister(shortcut.fileno())
            shortcut.close()
        self._offers.pop(self._tokens.pop(peer, ""), None)

    def close(self) -> None:
        for shortcut in self._by_peer.values():
            shortcut.close()
        for socket in self._strangers.values():
            socket.close()
        self._listener.close()
        self._poll.close()
        with suppress(OSError):
            if self._path.stat().st_ino == self._file:
                self._path.unlink()

    def _accept(self) -> None:
        try:
            socket, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # there are no files left: those who come from now on have libzmq
            self._poll.unregister(self._listener)
            self._listener.close()
            return
        if len(self._ways) + len(self._strangers) >= self._most:
            socket.close()
            return
        socket.setblocking(False)
        self._strangers[socket.fileno()] = socket
        self._poll.register(socket, select.EPOLLIN)

    def _greet(self, socket: sockets.socket) -> None:
        """Somebody says a token, or has ended."""
        try:
            token = socket.recv(_WORD.size * 16).decode("ascii", "replace")
        except OSError:
            token = ""
        peer, origin = self._offers.get(token, (b"", None))
        if origin is None or peer in self._by_peer:
            self._poll.unregister(socket)
            socket.close()
            return
        shortcut = self._by_peer[peer] = Shortcut(socket)
        self._ways[socket.fileno()] = shortcut, peer, origin
        shortcut.ready = True
        shortcut.send([b"ready"])


def remove_shortcut(path: Path) -> None:
    """Remove the file of a shortcut to a server that is gone, whose socket file this was."""
    with suppress(OSError):
        shortcut_path(path).unlink()
