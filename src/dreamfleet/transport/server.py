"""Servers: which methods can be called, by which roles, and how a call is answered."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar, Unpack

from dreamfleet.transport import wire
from dreamfleet.transport.arguments import Parameters
from dreamfleet.transport.codec import encode
from dreamfleet.transport.errors import (
    ArgumentError,
    Closed,
    MessageError,
    Occupied,
    SecurityError,
    TransportError,
    Unanswered,
)
from dreamfleet.transport.listening import Origin
from dreamfleet.transport.loop import Loop, Options, WorkQueue
from dreamfleet.transport.security import RUN, Keys
from dreamfleet.transport.slab import Allocate, Memory

_T = TypeVar("_T")


class BaseServer(Loop):
    """What every server has: an address, methods, a start, an end, and statistics.

    Args:
        address: Where to listen; see `dreamfleet.transport.address`.
        name: Shown in errors, logs and thread names.
        keys: The run key. Needed for any `tcp` address but loopback.
        insecure: Listen on the network without keys; any machine may connect.
        identify: What keys stand for that do not follow from the run key, such as invitations.
            Asked when one connects.
        revoked: Names that `identify` gave and that are revoked. They lose their connections
            within two seconds, and do not get others.
    """

    def __init__(
        self,
        address: str,
        name: str = "Server",
        keys: Keys | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(address, name, keys, options)
        self._methods: dict[str, Any] = {}  # by the names that clients call
        self._closing = threading.Lock()  # taken, for good, by the thread that closes the server
        self._closed = threading.Event()
        self._started = False

    def start(self, block: bool = True) -> None:
        """Begin to answer. With `block`, return when the server is closed."""
        if self._closed.is_set():
            raise Closed(f"{self.name} was closed; make a new one.")
        if not self._started:
            self._started = True
            self._start()
        if block:
            try:
                self._closed.wait()
            finally:
                self.close()

    def _start(self) -> None:
        self._start_threads(sum(queue.limit for queue in self._queues()))

    def _queues(self) -> set[WorkQueue]:
        return {method.queue for method in self._methods.values()}

    def close(self) -> None:
        """Stop answering: running methods finish, waiting calls fail with `Disconnected`."""
        self._close(self._stop)

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
        return thread in self._threads

    def stats(self) -> dict[str, float]:
        """Counts since the start, and how many requests are in flight now."""
        names = ("requests", "replies", "errors", "malformed", "undelivered", "inflight")
        stats = {name: float(self._counts[name]) for name in (*names, "bytes_in", "bytes_out")}
        return {**stats, "refused": float(self._listener.refused)}

    def __enter__(self) -> Self:
        self.start(block=False)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def connected(self, connection: bytes) -> bool:
        """Whether a `Caller.connection` is still there. For checks of calls only."""
        return self._listener.connected(connection)

    def between_calls(self, function: Callable[[], _T]) -> _T:
        """The result of a function that reads what checks keep: no call is taken meanwhile."""
        with self._lock:
            try:
                return function()
            finally:
                self._wake_reader()  # asking who is connected may have swallowed its signal

    def _repeatable(self, role: str) -> list[str]:
        return [
            name
            for name, method in self._methods.items()
            if method.repeatable and (role == RUN or role in method.roles)
        ]

    def _method(self, name: str, role: str) -> Any:
        """The method that is called, if this role may call it."""
        method = self._methods.get(name)
        # The same answer for a method that does not exist, which the role need not know.
        if role != RUN and (method is None or role not in method.roles):
            raise SecurityError(f"A key of the role {role!r} may not call {name!r:.100}.")
        if method is None:
            known = ", ".join(sorted(self._methods)) or "none"
            raise MessageError(f"{self.name} has no method {name!r:.100}; its methods are {known}.")
        return method

    def _add(self, method: str, bound: Any) -> None:
        if self._started:
            raise TransportError(f"{self.name}: bind {method!r} before the server is started.")
        if method in self._methods or not method.isidentifier():
            raise TransportError(
                f"{self.name}: {method!r} is bound already, or is not a name for a method."
            )
        self._methods[method] = bound
        self._roles.update(bound.roles)


_answered = threading.local()


def answer_memory(size: int) -> Memory | None:
    """Memory for arrays of the answer to the call that this thread runs, which are sent without a
    copy; see `shared_arrays`. None if there is none, or no call."""
    allocate: Allocate | None = getattr(_answered, "memory", None)
    return allocate(size) if allocate else None


def error_frames(number: int, error: BaseException) -> list[Any]:
    """The answer that tells a caller what its method raised."""
    text = "".join(traceback.format_exception_only(error)).strip()
    trace = "".join(traceback.format_exception(error))
    return wire.pack_error(number, error, text, trace)


@dataclass(frozen=True)
class _Method:
    function: Callable[..., Any]
    queue: WorkQueue
    repeatable: bool
    roles: frozenset[str]
    pass_caller: bool
    parameters: Parameters


class Server(BaseServer):
    """Answers calls by running the bound functions on worker threads.

    Args:
        workers: Threads shared by the methods that have none of their own. With one worker, calls
            run one after the other, in the order each client made them.
        address: See `BaseServer`, as all others.
    """

    def __init__(
        self,
        address: str,
        name: str = "Server",
        workers: int = 1,
        keys: Keys | None = None,
        **options: Unpack[Options],
    ) -> None:
        if workers < 1:
            raise TransportError(f"{name} needs at least one worker, not {workers}.")
        super().__init__(address, name, keys, **options)
        self._shared = WorkQueue(workers)

    def bind(
        self,
        method: str,
        fn: Callable[..., Any],
        workers: int = 0,
        repeatable: bool = False,
        *,
        roles: Collection[str] = (),
        pass_caller: bool = False,
    ) -> None:
        """Offer a function under a name.

        Args:
            method: The name clients call.
            fn: Gets the call's arguments, which fit its annotations; see `arguments`. Arrays among
                them are read-only. For others that it does not take it raises `ArgumentError`,
                before it touches anything.
            workers: Threads of its own, for a method that may block; 0 shares the server's.
            repeatable: It does no harm to run it twice, so a client may send a call again when the
                server came back after a crash. Other calls fail with `Disconnected` then.
            roles: Whose keys may call it in addition to the run key. Without keys every client may.
            pass_caller: Whether the function gets a `Caller` before the call's arguments.
        """
        queue = WorkQueue(workers) if workers > 0 else self._shared
        parameters = Parameters(method, fn, pass_caller)
        bound = _Method(fn, queue, repeatable, frozenset(roles), pass_caller, parameters)
        self._add(method, bound)

    def _queues(self) -> set[WorkQueue]:
        return super()._queues() | {self._shared}

    def _on_call(self, origin: Origin, header: wire.Header, frames: Sequence[Any]) -> None:
        method: _Method = self._method(header.method, origin.identity.role)
        if header.rows:
            raise MessageError(f"{header.method!r} takes single calls, not blocks of items.")
        args = wire.value_of(header, frames)
        if type(args) is not tuple:
            raise MessageError("The arguments of a call are a tuple.")
        args = method.parameters.take(args)
        if method.pass_caller:
            args = (origin.caller, *args)
        self._submit(method.queue, partial(self._work, origin.peer, header.id, method, args))

    def _work(self, peer: bytes, number: int, method: _Method, args: tuple[Any, ...]) -> None:
        failed = 0
        _answered.memory = partial(self._answer_memory, peer)
        try:
            frames = wire.pack(wire.REPLY, number, encode(method.function(*args)))
        except Unanswered:
            with self._lock:
                self._leave(peer, number if method.repeatable else 0)
            return
        except (ArgumentError, Occupied) as problem:
            with self._lock:
                self._reject(peer, number, problem)
            return
        except BaseException as error:  # whatever it is, it must not take a thread along
            failed = 1
            frames = error_frames(number, error)
        with self._lock:
            self._counts["errors"] += failed
            self._reply(peer, frames)
