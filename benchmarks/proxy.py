"""A TCP proxy that does to connections what bad networks do: delay, stalls, cuts.

Clients get `Proxy.address`, and the server stays where it is. Bytes are passed on as they are, so
encrypted connections work as well.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Literal, Self, TypeVar

from dreamfleet.transport.address import parse

Way = Literal["up", "down"]
"""From the clients to the server, and from the server to the clients."""
BOTH: tuple[Way, Way] = ("up", "down")

_T = TypeVar("_T")
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
        self.delay, self._tap = delay, tap
        self._target = parse(target)
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[Any]] = set()  # of connections
        self._closing = False
        # Other selectors round waiting times up to milliseconds.
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._flow = {way: asyncio.Event() for way in BOTH}
        self.resume()
        self._server = self._call(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    # --- what the network does -------------------------------------------------------------------

    def stall(self, ways: Iterable[Way] = BOTH) -> None:
        """Keep what comes until `resume`, without telling either side."""
        self._each([self._flow[way] for way in ways], asyncio.Event.clear)

    def resume(self) -> None:
        """Pass on what was kept, and what comes."""
        self._each(self._flow.values(), asyncio.Event.set)

    def cut(self) -> None:
        """Reset all connections: both sides notice at once. New ones are accepted."""
        self._each(self._links, _Link.abort)

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
        self._closing = True  # connections that were accepted and have not begun: they end then
        for listener in self._server.sockets:  # closing them now would leave such a one open
            self._loop.remove_reader(listener.fileno())
        while asyncio.all_tasks() - {asyncio.current_task()}:
            while self._tasks:
                self._tasks.pop().cancel()
            await asyncio.sleep(0)
        self._server.close()
        await asyncio.sleep(0)  # in which sockets are closed

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # Closing cancels it, which asyncio would report as an error.
            with suppress(asyncio.CancelledError):
                await self._serve(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        try:
            if self._closing:
                raise ConnectionRefusedError
            replies, server = await asyncio.open_connection(self._target.host, self._target.port)
        except OSError:
            return
        link = _Link({"up": server, "down": client}, self._tap)
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._pass(reader, link, "up"))
                ways.create_task(self._pass(replies, link, "down"))
        except* OSError:
            pass  # one side has gone, so the other is told
        finally:
            self._links.discard(link)
            link.abort()

    async def _pass(self, source: asyncio.StreamReader, link: _Link, way: Way) -> None:
        """Pass on what comes from one side until its end, each chunk after its delay."""
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._read(source, chunks))
            while True:
                due, data = await chunks.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                await self._flow[way].wait()
                if not data:
                    break
                await link.send(way, data)
            link.end(way)

    async def _read(
        self, source: asyncio.StreamReader, chunks: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        data = b"-"
        while data:
            data = await source.read(_CHUNK)
            await chunks.put((self._loop.time() + self.delay, data))


class _Link:
    """A client's connection and the one to the server that belongs to it, by their way."""

    def __init__(
        self, sinks: dict[Way, asyncio.StreamWriter], tap: Callable[[Way, bytes], None]
    ) -> None:
        self._sinks, self._tap = sinks, tap
        self._ended: set[Way] = set()

    async def send(self, way: Way, data: bytes) -> None:
        if way not in self._ended:
            self._tap(way, data)
            self._sinks[way].write(data)
            await self._sinks[way].drain()

    def end(self, way: Way) -> None:
        """The receiver sees the end; what comes later is dropped."""
        if way not in self._ended:
            self._ended.add(way)
            if not self._sinks[way].is_closing():
                self._sinks[way].write_eof()

    def abort(self) -> None:
        self._ended.update(BOTH)
        for sink in self._sinks.values():
            sink.transport.abort()
