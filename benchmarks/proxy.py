"""A TCP proxy that does to connections what bad networks do: delay, stalls, cuts.

Clients get `Proxy.address`, and the server stays where it is. Bytes are passed on as they are, so
encrypted connections work as well.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Queue
from typing import Any, Literal, Self

from dreamfleet.transport.address import parse

Way = Literal["up", "down"]
"""From the clients to the server, and from the server to the clients."""
BOTH: tuple[Way, Way] = ("up", "down")

_CHUNK = 1 << 16
_QUEUED = 256  # chunks of one connection and way that are in the proxy; then it stops reading


class Proxy:
    """Passes connections on to a server, from when it is made until it is closed.

    `delay` may be set at any time, and every method called from any thread.

    Args:
        target: The server's address, such as tcp://127.0.0.1:5551.
        delay: Seconds that bytes take, each way.
        tap: Is called with the way and the bytes before they are passed on.
    """

    def __init__(
        self,
        target: str,
        delay: float = 0.0,
        tap: Callable[[Way, bytes], None] = lambda *_: None,
    ) -> None:
        self.delay, self.tap = delay, tap
        self.flow = {way: threading.Event() for way in BOTH}
        """Cleared while bytes of that way are kept."""
        self.resume()
        self._target = parse(target)
        self._links: set[_Link] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._accepting = _thread(self._accept)

    def stall(self, ways: Iterable[Way] = BOTH) -> None:
        """Keep what comes until `resume`, without telling either side."""
        for way in ways:
            self.flow[way].clear()

    def resume(self) -> None:
        """Pass on what was kept, and what comes."""
        for flow in self.flow.values():
            flow.set()

    def cut(self) -> None:
        """End all connections: both sides notice at once. New ones are accepted."""
        for link in list(self._links):
            link.abort()

    def close(self) -> None:
        """Cut all connections and listen no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which ends `accept`
        self._accepting.join()
        self._listener.close()
        self.cut()
        self.resume()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection((self._target.host, self._target.port))
            except OSError:
                client.close()
                continue
            link = _Link(self, client, server)
            self._links.add(link)
            _thread(self._serve, link)

    def _serve(self, link: _Link) -> None:
        link.run()
        self._links.discard(link)


class _Link:
    """A client's connection, and the one to the server that belongs to it."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._sockets = client, server
        self._aborted = False
        for each in self._sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self) -> None:
        """Pass on what comes, until both sides have ended."""
        client, server = self._sockets
        with client, server:
            up = _thread(self._pass, "up", client, server)
            self._pass("down", server, client)
            up.join()

    def abort(self) -> None:
        self._aborted = True
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _pass(self, way: Way, source: socket.socket, sink: socket.socket) -> None:
        """Pass on what comes from one side until its end, each chunk after its delay."""
        chunks: Queue[tuple[float, bytes]] = Queue(_QUEUED)
        _thread(self._read, source, chunks)
        data = b"-"
        while data:
            due, data = chunks.get()
            time.sleep(max(0.0, due - time.monotonic()))
            self._proxy.flow[way].wait()
            if self._aborted:
                continue
            try:
                self._proxy.tap(way, data)
                if data:
                    sink.sendall(data)
                else:
                    sink.shutdown(socket.SHUT_WR)
            except OSError:
                self.abort()  # one side has gone, so the other is told

    def _read(self, source: socket.socket, chunks: Queue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(_CHUNK)
            except OSError:
                self.abort()
                data = b""
            chunks.put((time.monotonic() + self._proxy.delay, data))


def _thread(target: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name="proxy", daemon=True)
    thread.start()
    return thread
