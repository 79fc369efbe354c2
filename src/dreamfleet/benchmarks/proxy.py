"""A proxy of connections that does to them what bad networks do: delay, stalls, cuts.

For measurements and tests on one machine: clients are given `Proxy.address`, and the server stays
where it is, at a port or at a socket file. Bytes are passed on as they are, so encrypted
connections work as well; and so are the packets of socket files (`transport.local`), with the
descriptors of shared memory.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar

from dreamfleet.transport.address import Address, parse

Way = Literal["up", "down"]
"""From the clients to the server, and from the server to the clients."""
BOTH: tuple[Way, Way] = ("up", "down")

Tap = Callable[[Way, bytes], None]
"""Sees what is about to be passed on in one connection, piece by piece. `ConnectionError` resets
the connection instead."""
MakeTap = Callable[[Callable[[], None], bool], Tap]
"""Called at every new connection with what resets it, and whether its pieces are packets."""

_T = TypeVar("_T")
_CHUNK = 1 << 16
_PACKET = 1 << 20  # bytes; more than any has
_PACKET_ROOM = 212_992  # bytes, as at both ends
_BACKLOG = 1024
_QUEUED = 256  # chunks of one connection and way that are in the proxy; then it stops reading


class Proxy:
    """Passes connections on to a server, from when it is made until it is closed.

    `delay` may be set at any time, and every method called from any thread.

    Args:
        target: The server's address, such as tcp://127.0.0.1:5551, or a function that says where it
            is now; asked at every new connection.
        delay: Seconds that bytes take, each way.
        listen: Where: a machine, with a free port, or a socket file that does not exist yet.
        tap: Makes what looks at the bytes of a connection.
    """

    def __init__(
        self,
        target: str | Callable[[], str],
        delay: float = 0.0,
        listen: str | Path = "127.0.0.1",
        tap: MakeTap | None = None,
    ) -> None:
        self.delay = delay
        self._tap = tap or (lambda *_: _look_away)
        self.connections = 0
        """Connections that were accepted so far."""
        self.bytes = {"up": 0, "down": 0}
        """Bytes that were passed on so far, or are about to be."""
        self._target = target
        self._links: set[_Link] = set()
        self._begun: set[asyncio.Task[Any]] = set()  # of connections
        self._refusing = False
        # Others round waiting times up to milliseconds.
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._flow = {way: asyncio.Event() for way in BOTH}
        self.resume()
        self._packets: socket.socket | None = None
        self._server: asyncio.Server | None = None
        if isinstance(listen, Path):
            self.address = f"ipc://{listen}"
            self._packets = _packet_socket()
            self._packets.bind(str(listen))
            self._packets.listen(_BACKLOG)
            asyncio.run_coroutine_threadsafe(self._accept_packets(self._packets), self._loop)
        else:
            server = self._server = self._call(asyncio.start_server(self._accept, listen, 0))
            self.address = f"tcp://{listen}:{server.sockets[0].getsockname()[1]}"

    # --- what the network does -------------------------------------------------------------------

    def stall(self, ways: Iterable[Way] = BOTH) -> None:
        """Pass nothing on, and keep what comes, until `resume`; in one way the connections are half
        open. Nobody is told."""
        self._each([self._flow[way] for way in ways], asyncio.Event.clear)

    def resume(self) -> None:
        """Pass on what was kept, and whatever comes."""
        self._each(self._flow.values(), asyncio.Event.set)

    def cut(self) -> None:
        """Reset all connections: both sides notice at once. New ones are accepted."""
        self._each(self._links, _Link.abort)

    def half_cut(self, way: Way = "up") -> None:
        """Lose one way of all connections for good. The side that sends is told nothing; the one
        that receives sees the end of what it was sent."""
        self._each(self._links, lambda link: link.end(way))

    def refuse(self, refuse: bool = True) -> None:
        """Reset new connections at once, as if nobody listened, until it is called with False."""
        self._refusing = refuse

    def close(self) -> None:
        """Cut all connections and listen no more."""
        if self._loop.is_closed():
            return
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- in the proxy's thread -------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def _each(self, items: Iterable[_T], action: Callable[[_T], None]) -> None:
        async def run() -> None:
            for item in list(items):
                action(item)

        self._call(run())

    async def _close(self) -> None:
        self._refusing = True  # connections that were accepted and have not begun: they end then
        # Closing them now would leave such a one open.
        for listener in self._server.sockets if self._server else ():
            self._loop.remove_reader(listener.fileno())
        while asyncio.all_tasks() - {asyncio.current_task()}:
            while self._begun:
                self._begun.pop().cancel()
            await asyncio.sleep(0)
        if self._server is not None:
            self._server.close()
        if self._packets is not None:
            self._packets.close()
        await asyncio.sleep(0)  # in which sockets are closed

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._begin(_Stream(reader, writer))

    async def _accept_packets(self, listener: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._begun.add(task)
        while True:
            accepted, _ = await self._loop.sock_accept(listener)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PACKET_ROOM)
            self._loop.create_task(self._begin(_PacketStream(accepted)))

    async def _begin(self, client: _Side) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._begun.add(task)
        try:
            # Closing cancels it, which asyncio would report as an error.
            with suppress(asyncio.CancelledError):
                await self._serve(client)
        finally:
            self._begun.discard(task)
            client.close()

    async def _serve(self, client: _Side) -> None:
        self.connections += 1
        try:
            if self._refusing:
                raise ConnectionRefusedError
            address = parse(self._target() if callable(self._target) else self._target)
            server = await client.connect(address)
        except (OSError, ValueError):
            return
        link = _Link(client, server, self._tap)
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._pass(client, link, "up"))
                ways.create_task(self._pass(server, link, "down"))
        except* OSError:
            pass  # one side has gone, so the other is told
        finally:
            self._links.discard(link)
            link.abort()
            server.close()

    async def _pass(self, source: _Side, link: _Link, way: Way) -> None:
        """Pass on what comes from one side until its end, each chunk when it has taken its time."""
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._read(source, chunks))
            while True:
                due, data = await chunks.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                await self._flow[way].wait()
                if not data:
                    break
                self.bytes[way] += len(data)  # first: what has arrived is counted
                await link.send(way, data)
            link.end(way)

    async def _read(self, source: _Side, chunks: asyncio.Queue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            data = await source.read()
            await chunks.put((self._loop.time() + self.delay, data))


def _look_away(way: Way, data: bytes) -> None:
    del way, data


class _Side(Protocol):
    """One end of a connection that is passed on."""

    async def connect(self, server: Address) -> _Side:
        """A connection of the same kind to the server."""

    async def read(self) -> bytes:
        """What has come, at least a byte; nothing at the end."""

    async def write(self, data: bytes) -> None: ...

    def end(self) -> None:
        """Tell the other end that nothing more is sent."""

    def abort(self) -> None:
        """Tell the other end that it is over."""

    def close(self) -> None: ...


class _Stream:
    """A connection of libzmq."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def connect(self, server: Address) -> _Stream:
        return _Stream(*await asyncio.open_connection(server.host, server.port))

    async def read(self) -> bytes:
        return await self._reader.read(_CHUNK)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def end(self) -> None:
        if not self._writer.is_closing():
            self._writer.write_eof()

    def abort(self) -> None:
        self._writer.transport.abort()

    close = abort


class _Packet(bytes):
    """A packet, and the descriptors that came with it."""

    descriptors: Sequence[int] = ()

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()

    __del__ = close


class _PacketStream:
    """A connection of socket files. Packets stay whole."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._loop = connected, asyncio.get_running_loop()

    async def connect(self, server: Address) -> _PacketStream:
        made = _packet_socket()
        try:
            await self._loop.sock_connect(made, str(server.path))
        except OSError:
            made.close()
            raise
        return _PacketStream(made)

    async def read(self) -> bytes:
        await self._ready(self._loop.add_reader, self._loop.remove_reader)
        data, descriptors, _, _ = socket.recv_fds(self._socket, _PACKET, 1)
        packet = _Packet(data)
        packet.descriptors = descriptors
        return packet

    async def write(self, data: bytes) -> None:
        if not (isinstance(data, _Packet) and data.descriptors):
            await self._loop.sock_sendall(self._socket, data)
            return
        await self._ready(self._loop.add_writer, self._loop.remove_writer)
        socket.send_fds(self._socket, [data], data.descriptors)
        data.close()

    async def _ready(self, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
        """Wait until the socket can be read, or written."""
        descriptor, ready = self._socket.fileno(), self._loop.create_future()
        add(descriptor, lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
        finally:
            remove(descriptor)

    def end(self) -> None:
        with suppress(OSError):  # the other end has gone
            self._socket.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # closed once nobody reads it any more

    def close(self) -> None:
        self._socket.close()


def _packet_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PACKET_ROOM)
    return made


class _Link:
    """One connection of a client, and the one to the server that belongs to it."""

    def __init__(self, client: _Side, server: _Side, tap: MakeTap) -> None:
        self._tap = tap(self.abort, isinstance(client, _PacketStream))
        self._sinks: dict[Way, _Side] = {"up": server, "down": client}
        self._ended: set[Way] = set()

    async def send(self, way: Way, data: bytes) -> None:
        if way not in self._ended:
            self._tap(way, data)
            await self._sinks[way].write(data)

    def end(self, way: Way) -> None:
        """The receiving side sees the end; what comes later is dropped."""
        if way not in self._ended:
            self._ended.add(way)
            self._sinks[way].end()

    def abort(self) -> None:
        self._ended.update(BOTH)
        for sink in self._sinks.values():
            sink.abort()
