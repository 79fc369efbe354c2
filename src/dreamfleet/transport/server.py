"""A server of methods that others call."""

from __future__ import annotations

import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from dreamfleet.transport import wire
from dreamfleet.transport.codec import encode
from dreamfleet.transport.errors import Closed, MessageError, TransportError
from dreamfleet.transport.loop import Lane, Loop, Peer
from dreamfleet.transport.security import Keys

_LONGEST_TEXT = 100_000  # characters of an error; the last ones say most


class BaseServer(ABC):
    """What every server has: an address, a life, and statistics."""

    def __init__(
        self, address: str, name: str, keys: Keys | None, insecure: bool, **hooks: Any
    ) -> None:
        self.name = name
        self._loop = Loop(address, name, keys, insecure, self._on_call, self._repeatable, **hooks)
        self._closing = threading.Lock()  # taken by whoever closes the server, for good
        self._closed = threading.Event()
        self._started = False

    @property
    def address(self) -> str:
        """Where clients connect, with `{auto}` replaced."""
        return self._loop.address

    def start(self, block: bool = True) -> None:
        """Begin to answer. With `block`, return when the server is closed."""
        if self._closed.is_set():
            raise Closed(f"{self.name} was closed; make a new one.")
        if not self._started:
            self._started = True
            self._loop.start(sum(lane.limit for lane in self._lanes()))
        if block:
            try:
                self._closed.wait()
            finally:
                self.close()

    def close(self) -> None:
        """Stop answering: running methods finish, waiting calls fail with `Disconnected`."""
        self._close(self._loop.close)

    def _close(self, shut_down: Callable[[], None]) -> None:
        """Have the first caller shut the server down, and the others wait for it."""
        if self._closing.acquire(blocking=False):
            try:
                shut_down()
            finally:
                self._closed.set()
        elif not self._is_own(threading.current_thread()):
            self._closed.wait()

    def _is_own(self, thread: threading.Thread) -> bool:
        """Whether this is one of the server's own threads, which cannot wait for its end."""
        return thread in self._loop.threads

    def stats(self) -> dict[str, float]:
        """Counts since the start, and how many requests are in flight now."""
        names = ("requests", "replies", "errors", "malformed", "undelivered", "refused", "inflight")
        counts = self._loop.counts
        return {name: float(counts[name]) for name in (*names, "bytes_in", "bytes_out")}

    def __enter__(self) -> Self:
        self.start(block=False)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def _lanes(self) -> list[Lane]:
        """What runs beside what."""

    def _repeatable(self) -> list[str]:
        return []

    @abstractmethod
    def _on_call(self, peer: Peer, header: wire.Header, frames: list[Any]) -> None:
        """Take a call, under the loop's lock."""

    def _check_bind(self, method: str, methods: dict[str, Any]) -> None:
        if self._started:
            raise TransportError(f"{self.name}: bind {method!r} before the server is started.")
        if method in methods or not method.isidentifier():
            raise TransportError(
                f"{self.name}: {method!r} is bound already, or is not a name for a method."
            )


def error_frames(number: int, error: BaseException) -> list[Any]:
    """The answer that tells a caller what its method raised."""
    text = "".join(traceback.format_exception_only(error)).strip()
    trace = "".join(traceback.format_exception(error))
    return wire.pack_error(number, type(error).__name__, _sendable(text), _sendable(trace))


def _sendable(text: str) -> str:
    """Text as UTF-8 can carry it: file names may hold bytes that are none."""
    return text[-_LONGEST_TEXT:].encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class _Method:
    function: Callable[..., Any]
    lane: Lane
    repeatable: bool


class Server(BaseServer):
    """Answers calls by running the bound functions on worker threads.

    Args:
        address: Where to listen; see `dreamfleet.transport.address`.
        name: Shown in errors, logs and thread names.
        workers: Threads shared by the methods that have none of their own. With one worker, calls
            run one after the other, in the order each client made them.
        keys: The run key. Needed for any `tcp` address but loopback.
        insecure: Listen on the network without keys, for everyone.
    """

    def __init__(
        self,
        address: str,
        name: str = "Server",
        workers: int = 1,
        keys: Keys | None = None,
        *,
        insecure: bool = False,
    ) -> None:
        if workers < 1:
            raise TransportError(f"{name} needs at least one worker, not {workers}.")
        super().__init__(address, name, keys, insecure)
        self._shared = Lane(workers)
        self._methods: dict[str, _Method] = {}

    def bind(
        self,
        method: str,
        fn: Callable[..., Any],
        workers: int = 0,
        repeatable: bool = False,
    ) -> None:
        """Offer a function under a name.

        Args:
            method: The name clients call.
            fn: Gets the call's arguments; arrays among them are read-only.
            workers: Threads of its own, for a method that may block; 0 shares the server's.
            repeatable: It does no harm to run it twice, so a client may send a call again when the
                server came back after a crash. Other calls fail with `Disconnected` then.
        """
        self._check_bind(method, self._methods)
        lane = Lane(workers) if workers > 0 else self._shared
        self._methods[method] = _Method(fn, lane, repeatable)

    def _lanes(self) -> list[Lane]:
        return list({m.lane for m in self._methods.values()} | {self._shared})

    def _repeatable(self) -> list[str]:
        return [name for name, method in self._methods.items() if method.repeatable]

    def _on_call(self, peer: Peer, header: wire.Header, frames: list[Any]) -> None:
        method = self._methods.get(header.method)
        if method is None:
            known = ", ".join(sorted(self._methods)) or "none"
            raise MessageError(
                f"{self.name} has no method {header.method!r}; its methods are {known}."
            )
        if header.rows:
            raise MessageError(f"{header.method!r} takes single calls, not blocks of items.")
        args = wire.value_of(header, frames)
        if type(args) is not tuple:
            raise MessageError("The arguments of a call are a tuple.")
        self._loop.offer(method.lane, partial(self._work, peer, header.id, method.function, args))

    def _work(
        self, peer: Peer, number: int, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        failed = 0
        try:
            frames = wire.pack(wire.REPLY, number, encode(function(*args)))
        except BaseException as error:  # whatever it is, it must not take a thread along
            failed = 1
            frames = error_frames(number, error)
        with self._loop.lock:
            self._loop.counts["errors"] += failed
            self._loop.reply(peer, frames)
