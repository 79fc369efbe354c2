"""Connections between processes of one machine: packets over a socket file, and shared memory.

A message is one packet (`SOCK_SEQPACKET`), written and read by the thread that sends or waits,
without another one in between. Frames of 4 kB or more lie in shared memory (`slab`), and the packet
says where; without it they are inside. What is too large for a packet comes in several parts. A
packet that finds the socket full waits in the sender's outbox.

    message      how many frames, slab, slot, size and place of each, and those that are not shared
    part         a piece of a message, and whether it is the last
    slab         the descriptor of shared memory that the sender wants to use
    slab ready   the receiver has mapped it

Only Linux has all of it. Elsewhere libzmq serves socket files, too.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import socket as sockets
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

from dreamfleet.transport import wire
from dreamfleet.transport.address import Address, clean_up, file_identity, prepare
from dreamfleet.transport.codec import Buffer
from dreamfleet.transport.errors import AddressError, Disconnected, MessageError
from dreamfleet.transport.listening import FOREVER, Listener, Origin, Poller
from dreamfleet.transport.security import RUN, Identity
from dreamfleet.transport.slab import (
    LEAST_SHARED,
    MAX_SLAB,
    Memory,
    Slab,
    SlabView,
    aligned_total,
)

AVAILABLE = sys.platform == "linux"
SHARING = True
"""Whether connections that are made from now on use shared memory."""

_MESSAGE, _PART, _SLAB, _SLAB_READY = range(4)
_HEAD = struct.Struct("<4I")  # kind and count, and two numbers of that kind
_TABLE_ROW = struct.Struct("<2I")  # of each frame: its size, and its place in a slot
_KIND_SHIFT = 24
_COUNT_MASK = (1 << _KIND_SHIFT) - 1
_NONE = (1 << 32) - 1  # no slot; the place of a frame that is not in a slot
_ALIGN = 16
_PADDING = bytes(_ALIGN)

_SOCKET_BYTES = 212_992  # that every Linux grants; packets may have nearly twice that
_MAX_PACKET = 2 * _SOCKET_BYTES - 4096
_MAX_BUFFERS = 512  # of one system call
_MAX_WAITING = wire.MAX_INFLIGHT + 8  # messages in an outbox
_DESCRIPTORS = sockets.CMSG_SPACE(4)

_IN = select.POLLIN
_IN_OUT = select.POLLIN | select.POLLOUT
_ACCEPT_PAUSE_SECONDS = 1.0  # seconds without new connections after the process ran out of files
_MAX_CONNECTIONS = 4096
_TRUSTED = Identity(RUN)


class LocalSocket:
    """One end of a connection. Touched by one thread at a time.

    Args:
        socket: A connected socket for packets.
        buffer: Where packets are received; several sockets of one thread may share it.
    """

    def __init__(self, socket: sockets.socket, buffer: bytearray | None = None) -> None:
        socket.setblocking(False)
        socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, _SOCKET_BYTES)
        granted = socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF)
        self._socket = socket
        self._largest = min(_MAX_PACKET, granted - 4096)
        self._buffer = bytearray(_MAX_PACKET) if buffer is None else buffer
        self._outbox: deque[tuple[bytes, Slab | None, bool]] = deque()
        self._outbox_messages = 0  # whose last packet is in it
        self._poller: Poller | None = None
        self._watched = False  # the poller tells when there is room for more
        self._parts: list[bytes] = []
        self._slab: Slab | None = None  # of what is sent
        self._slab_number, self._slab_ready = 0, False
        self._slab_limit = MAX_SLAB // 2 if SHARING else 0  # bytes; a larger slab was denied
        self._view: SlabView | None = None  # of what is received
        self._view_number = 0
        self.ended = False
        """Whether the other side has closed it, and everything was read."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def register(self, poller: Poller) -> None:
        """Have a poller report what is to be read, and room for what waits."""
        self._poller = poller
        poller.register(self.fileno(), _IN)

    @property
    def waiting(self) -> bool:
        """Whether packets wait until the socket has room for them."""
        return bool(self._outbox)

    # --- sending ---------------------------------------------------------------------------------

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send a message, now or as soon as there is room; False if the connection has ended."""
        slot, places = self._share(frames[1:]) if len(frames) > 1 else (-1, ())
        table, paddings, total = _layout(tuple(map(len, frames)), (-1, *places))
        first = _MESSAGE << _KIND_SHIFT | len(frames)
        parts: list[Buffer] = [_HEAD.pack(first, self._slab_number, slot & _NONE, 0), table]
        for frame, padding in zip(frames, paddings, strict=True):
            if padding is not None:
                parts += (frame, padding)
        if total > self._largest:
            return self._send_parts(b"".join(parts))
        if len(parts) > _MAX_BUFFERS:
            parts = [b"".join(parts)]
        return self._push(parts)

    def memory(self, size: int) -> Memory | None:
        """Memory whose content `send` will not have to copy, if there is some."""
        if self._slab is None or not self._slab_ready or size < LEAST_SHARED:
            return None
        return self._slab.allocate(size)

    def keep(self, frames: Sequence[Buffer]) -> list[Buffer] | None:
        """Frames that stay as they are and that `send` will not have to copy, if there is shared
        memory for them. They last as long as the caller holds them."""
        slab = self._slab
        if slab is None or not self._slab_ready or sum(map(len, frames)) < LEAST_SHARED:
            return None
        slot, places = slab.find(frames)
        if slot < 0:
            return slab.fill(frames)
        return [f if place >= 0 else bytes(f) for f, place in zip(frames, places, strict=True)]

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        with suppress(OSError):  # the end is noticed by reading
            while self._outbox and self._transmit([self._outbox[0][0]], self._outbox[0][1]):
                self._outbox_messages -= self._outbox.popleft()[2]
        self._watch()

    def _watch(self) -> None:
        if self._poller and self._watched != self.waiting:
            self._watched = self.waiting
            self._poller.modify(self.fileno(), _IN_OUT if self.waiting else _IN)

    def _share(self, frames: Sequence[Buffer]) -> tuple[int, list[int]]:
        """Let frames lie in shared memory: the slot, and the place of each in it, -1 for one that
        is not there. A slot of -1 if all have to travel in the packet."""
        total = aligned_total(map(len, frames))
        if LEAST_SHARED <= total <= self._slab_limit:
            slab = self._slab
            if slab is None or slab.slot_bytes < total:
                self._offer(total)
            elif self._slab_ready:
                slot, places = slab.find(frames)
                if slot < 0 and (copies := slab.fill(frames)):
                    slot, places = slab.find(copies)
                if slot >= 0:
                    slab.send(slot)
                    return slot, places
        return -1, [-1] * len(frames)

    def _offer(self, total: int) -> None:
        """Send the descriptor of shared memory. It is used once the other side has mapped it."""
        try:
            slab = Slab(total)
        except OSError:
            self._slab_limit = total - 1
            return
        self._slab, self._slab_ready = slab, False
        self._slab_number += 1
        head = _HEAD.pack(_SLAB << _KIND_SHIFT, self._slab_number, slab.slot_bytes, 0)
        self._push([head], slab)

    def _send_parts(self, data: bytes) -> bool:
        room = self._largest - _HEAD.size
        sent = True
        for start in range(0, len(data), room):
            last = start + room >= len(data)
            head = _HEAD.pack(_PART << _KIND_SHIFT | last, 0, 0, 0)
            sent = self._push([head, data[start : start + room]], last=last)
        return sent

    def _push(
        self, parts: Sequence[Buffer], slab: Slab | None = None, *, last: bool = True
    ) -> bool:
        """Send a packet, now or as soon as there is room; False if the connection has ended. It
        ends if a packet cannot be sent, so that both sides know that a message is lost."""
        with suppress(OSError):
            if not self._outbox and self._transmit(parts, slab):
                return True
            if self._outbox_messages < _MAX_WAITING:
                self._outbox.append((b"".join(parts), slab, last))
                self._outbox_messages += last
                self._watch()
                return True
        with suppress(OSError):  # the other side has ended it
            self._socket.shutdown(sockets.SHUT_RDWR)
        return False

    def _transmit(self, parts: Sequence[Buffer], slab: Slab | None) -> bool:
        """Hand a packet to the kernel; False if there is no room for it."""
        ancillary: Sequence[Any] = ()
        if slab is not None:
            descriptor = struct.pack("i", slab.descriptor)
            ancillary = [(sockets.SOL_SOCKET, sockets.SCM_RIGHTS, descriptor)]
        try:
            self._socket.sendmsg(parts, ancillary, sockets.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as problem:
            if slab is None or problem.errno not in (errno.ETOOMANYREFS, errno.EMFILE):
                raise
            return self._transmit(parts, None)  # without memory to map
        return True

    # --- receiving -------------------------------------------------------------------------------

    def receive(self) -> list[Buffer] | None:
        """The frames of the next message; an empty list for one that is malformed, None if there is
        none now."""
        packet, ancillary = self._receive_packet()
        if not packet:
            return None
        descriptors = list(_descriptors(ancillary)) if ancillary else []
        try:
            return self._take(packet, descriptors)
        except (MessageError, struct.error):
            return []
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _receive_packet(self) -> tuple[bytes, list[tuple[int, int, bytes]]]:
        """The next packet, and what came with it; empty if there is none now."""
        for _ in range(2):
            try:
                size, ancillary, _, _ = self._socket.recvmsg_into((self._buffer,), _DESCRIPTORS)
                break
            except BlockingIOError:
                return b"", []
            except OSError:  # the other side has ended; what it had sent before is still there
                size, ancillary = 0, []
        if not size:
            self.ended = True
        return bytes(memoryview(self._buffer)[:size]), ancillary

    def _take(self, packet: bytes, descriptors: list[int]) -> list[Buffer] | None:
        first, number, more, _ = _HEAD.unpack_from(packet)
        kind, amount = first >> _KIND_SHIFT, first & _COUNT_MASK
        if kind == _MESSAGE:
            frames, shared = _unpack_frames(packet, amount)
            if shared:
                self._fill_in(frames, shared, number, more)
            return frames
        if kind == _PART:
            self._parts.append(packet[_HEAD.size :])
            if not amount:
                return None
            whole, self._parts = b"".join(self._parts), []
            if _HEAD.unpack_from(whole)[0] >> _KIND_SHIFT != _MESSAGE:
                raise MessageError("Only messages come in parts.")
            return self._take(whole, [])
        if kind == _SLAB:
            self._map(number, more, descriptors)
        elif kind == _SLAB_READY:
            self._slab_ready = self._slab is not None and number == self._slab_number
        else:
            raise MessageError("A packet of an unknown kind.")
        return None

    def _map(self, number: int, slot_bytes: int, descriptors: list[int]) -> None:
        """Map the other side's memory. If that is not possible, it goes on without."""
        if len(descriptors) != 1 or not SHARING:
            return
        try:
            self._view, self._view_number = SlabView(descriptors[0], slot_bytes), number
        except OSError:
            return
        self._push([_HEAD.pack(_SLAB_READY << _KIND_SHIFT, number, 0, 0)])

    def _fill_in(
        self, frames: list[Buffer], shared: dict[int, tuple[int, int]], number: int, slot: int
    ) -> None:
        """Put the frames that are not inside a packet into their places."""
        if self._view is None or number != self._view_number:
            raise MessageError("A message refers to memory that was not shared.")
        views = self._view.frames(slot, list(shared.values()))
        for index, frame in zip(shared, views, strict=True):
            frames[index] = frame

    def close(self) -> None:
        self._outbox.clear()
        self._slab = self._view = None
        self._socket.close()


@lru_cache(maxsize=256)
def _layout(
    sizes: tuple[int, ...], places: tuple[int, ...]
) -> tuple[bytes, tuple[bytes | None, ...], int]:
    """For a message with frames of these sizes at these places: its table of both, what follows
    each frame, and the bytes of the packet. Places of -1 are inside; nothing follows the others."""
    pairs = list(zip(sizes, places, strict=True))
    table = b"".join(_TABLE_ROW.pack(size, place & _NONE) for size, place in pairs)
    table += _PADDING[: -len(table) % _ALIGN]
    paddings = tuple(_PADDING[: -size % _ALIGN] if at < 0 else None for size, at in pairs)
    inside = sum(size + -size % _ALIGN for size, at in pairs if at < 0)
    return table, paddings, _HEAD.size + len(table) + inside


def _unpack_frames(packet: bytes, amount: int) -> tuple[list[Buffer], dict[int, tuple[int, int]]]:
    """The frames of a message, and of those that are not inside the places and sizes in a slot, by
    their index.

    Raises:
        MessageError: It is malformed.
    """
    if not 0 < amount <= wire.MAX_FRAMES or len(packet) < _HEAD.size + 8 * amount:
        raise MessageError("A packet without frames, or with too many.")
    frames: list[Buffer] = []
    shared: dict[int, tuple[int, int]] = {}
    view, start = memoryview(packet), _HEAD.size + 8 * amount + -8 * amount % _ALIGN
    for size, place in _TABLE_ROW.iter_unpack(view[_HEAD.size : _HEAD.size + 8 * amount]):
        if place == _NONE:
            frames.append(view[start : start + size])
            start += size + -size % _ALIGN
        else:
            shared[len(frames)] = place, size
            frames.append(b"")
    if start != len(packet):
        raise MessageError("A packet does not have the size that it announces.")
    return frames, shared


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> Iterator[int]:
    for level, kind, data in ancillary:
        if level == sockets.SOL_SOCKET and kind == sockets.SCM_RIGHTS:
            for (descriptor,) in struct.iter_unpack("i", data[: len(data) - len(data) % 4]):
                yield descriptor


# --- servers -------------------------------------------------------------------------------------


class LocalOrigin(Origin):
    """A connection of a process of this machine."""

    __slots__ = ("address", "socket")

    address: str

    def __init__(self, peer: bytes, socket: LocalSocket, address: str) -> None:
        super().__init__(peer, _TRUSTED)
        self.socket, self.address = socket, address


class LocalListener(Listener):
    """Listens at a socket file.

    Raises:
        AddressError: Another server is alive there, or the file cannot be made.
        SecurityError: Others can enter its directory.
    """

    def __init__(self, address: Address, name: str) -> None:
        prepare(address)
        self.address = address
        self._listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
        try:
            address.path.unlink(missing_ok=True)  # of a server that was killed
            self._listener.setblocking(False)
            self._listener.bind(str(address.path))
            self._listener.listen(wire.BACKLOG)
        except OSError as problem:
            self._listener.close()
            raise AddressError(f"{name} cannot bind {address.text}: {problem}.") from None
        self.file = file_identity(address)
        self._poller: Poller  # which reports everything that happens here
        self._accept_at = FOREVER  # when connections are accepted again
        self._numbers = count(1)
        self._by_peer: dict[bytes, LocalOrigin] = {}
        self._by_descriptor: dict[int, LocalOrigin] = {}
        self._readable: deque[int] = deque()
        self._buffer = bytearray(_MAX_PACKET)
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = min(_MAX_CONNECTIONS, files // 4) if files > 0 else _MAX_CONNECTIONS

    @property
    def due(self) -> float:
        return self._accept_at

    def register(self, poller: Poller) -> None:
        self._poller = poller
        poller.register(self._listener.fileno(), _IN)

    def notice(self, descriptor: int, events: int) -> None:
        if origin := self._by_descriptor.get(descriptor):
            if events & select.POLLOUT:
                origin.socket.flush()
            if events & ~select.POLLOUT:
                self._readable.append(descriptor)
        elif descriptor == self._listener.fileno():
            self._accept()

    def receive(self) -> tuple[Origin, list[Any]] | None:
        while self._readable:
            origin = self._by_descriptor.get(self._readable.popleft())
            if origin is None:  # it has ended meanwhile
                continue
            if (frames := origin.socket.receive()) is not None:
                return origin, frames
            if origin.socket.ended:
                self._drop(origin)
        return None

    def send(self, peer: bytes, frames: list[Buffer]) -> bool:
        origin = self._by_peer.get(peer)
        return origin is not None and origin.socket.send(frames)

    def memory(self, peer: bytes, size: int) -> Memory | None:
        origin = self._by_peer.get(peer)
        return origin.socket.memory(size) if origin else None

    def connected(self, peer: bytes) -> bool:
        origin = self._by_peer.get(peer)
        if origin is None:
            return False
        poller = select.poll()
        poller.register(origin.socket.fileno(), 0)
        return not poller.poll(0)  # which tells of nothing but the end

    def hang_up(self, origin: Origin) -> None:
        known = self._by_peer.get(origin.peer)
        if known is not None:
            self.ended += 1
            self._drop(known)

    def on_due(self) -> None:
        self._accept_at = FOREVER
        self._poller.register(self._listener.fileno(), _IN)

    def close(self) -> None:
        clean_up(self.address, self.file)  # while the address is still ours
        self._listener.close()
        for origin in list(self._by_peer.values()):
            origin.socket.close()
        self._by_peer.clear()
        self._by_descriptor.clear()

    def _accept(self) -> None:
        try:
            socket, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # there are no files left
            self._poller.unregister(self._listener.fileno())
            self._accept_at = time.monotonic() + _ACCEPT_PAUSE_SECONDS
            return
        if len(self._by_peer) >= self._most:
            socket.close()
            return
        credentials = socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, 12)
        process = struct.unpack("3i", credentials)[0]
        peer = str(next(self._numbers)).encode()
        origin = LocalOrigin(peer, LocalSocket(socket, self._buffer), f"process {process}")
        self._by_peer[peer] = self._by_descriptor[socket.fileno()] = origin
        origin.socket.register(self._poller)

    def _drop(self, origin: LocalOrigin) -> None:
        descriptor = origin.socket.fileno()
        del self._by_peer[origin.peer], self._by_descriptor[descriptor]
        self._poller.unregister(descriptor)
        origin.socket.close()


# --- clients -------------------------------------------------------------------------------------


class LocalLink(LocalSocket):
    """A client's connection to a socket file.

    Raises:
        Disconnected: No server takes connections there now.
    """

    readable = False
    """Whether a message waits that a poller may not report."""

    def __init__(self, path: Path) -> None:
        made = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
        try:
            made.setblocking(False)
            made.connect(str(path))
        except OSError as problem:
            made.close()
            text = _REFUSALS.get(problem.errno or 0, f"its socket file cannot be used: {problem}")
            raise Disconnected(text) from None
        super().__init__(made)
        self._is_new = True
        self._readable = False

    def notice(self, descriptor: int, events: int) -> None:
        if descriptor == self.fileno():
            self._readable |= bool(events & ~select.POLLOUT)

    def take(self) -> list[Any] | wire.Change | None:
        """What has happened next: a message, or a change of the connection."""
        if self._is_new:
            self._is_new = False
            return wire.Change(connected=True)
        if self._outbox:
            self.flush()
        if not self._readable:
            return None
        self._readable = False
        message = self.receive()
        return wire.Change(connected=False) if message is None and self.ended else message

    def close(self, linger: int | None = None) -> None:
        del linger  # what was sent is in the other side's socket
        super().close()


_REFUSALS = {
    errno.ENOENT: wire.NO_SERVER,
    errno.ECONNREFUSED: wire.NO_SERVER,
    errno.EAGAIN: "its queue of new connections is full",
    errno.EPROTOTYPE: "another program, or another version of Dreamfleet, listens there",
}
