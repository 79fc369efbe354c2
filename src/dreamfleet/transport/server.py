"""Servers of methods that others call: what can be called, by whom, and how a call is answered."""

from __future__ import annotations

import inspect
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

from dreamfleet.transport import wire
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
from dreamfleet.transport.listening import Origin as Origin
from dreamfleet.transport.loop import Loop, WorkQueue
from dreamfleet.transport.security import RUN, Identify, Keys, Revoked

_T = TypeVar("_T")
_FOREVER = float("inf")
_LONGEST_TEXT = 100_000  # characters of an error; the last ones say most


class BaseServer(ABC):
    """What every server has: an address, methods, a start, an end, and statistics.

    Args:
        local: A socket file at which the server listens as well.
        hooks: `identify`, `revoked`, `deadline` and `on_due` of the `Loop`.
    """

    _methods: Mapping[str, Any]  # by the names that clients call

    def __init__(
        self,
        address: str,
        name: str,
        keys: Keys | None,
        insecure: bool,
        local: str = "",
        **hooks: Any,
    ) -> None:
        self.name = name
        self._loop = Loop(
            [address, local] if local else [address],
            name,
            keys,
            insecure,
            self._on_call,
            self._repeatable,
            self._roles,
            **hooks,
        )
        self._closing = threading.Lock()  # taken by whoever closes the server, for good
        self._closed = threading.Event()
        self._started = False

    @property
    def address(self) -> str:
        """Where clients connect, with `{auto}` replaced."""
        return self._loop.addresses[0]

    @property
    def local_address(self) -> str:
        """Where clients of the same machine connect, if that is another address; else the same."""
        return self._loop.addresses[-1]

    def start(self, block: bool = True) -> None:
        """Begin to answer. With `block`, return when the server is closed."""
        if self._closed.is_set():
            raise Closed(f"{self.name} was closed; make a new one.")
        if not self._started:
            self._started = True
            self._start_threads()
        if block:
            try:
                self._closed.wait()
            finally:
                self.close()

    def _start_threads(self) -> None:
        self._loop.start(sum(queue.limit for queue in self._queues()))

    def _queues(self) -> set[WorkQueue]:
        return {method.queue for method in self._methods.values()}

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
        names = ("requests", "replies", "errors", "malformed", "undelivered", "inflight")
        counts = self._loop.counts
        stats = {name: float(counts[name]) for name in (*names, "bytes_in", "bytes_out")}
        return {**stats, "refused": float(self._loop.refused)}

    def __enter__(self) -> Self:
        self.start(block=False)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def connected(self, connection: bytes) -> bool:
        """Whether a `Caller.connection` is still there. For checks of calls only."""
        return self._loop.connected(connection)

    def between_calls(self, function: Callable[[], _T]) -> _T:
        """The result of a function that reads what checks keep: no call is taken meanwhile."""
        with self._loop.lock:
            try:
                return function()
            finally:
                self._loop.wake_reader()  # asking who is connected may have swallowed its signal

    def _repeatable(self, role: str) -> list[str]:
        """The methods that may be called twice, among those that a role may call."""
        return [
            name
            for name, method in self._methods.items()
            if method.repeatable and (role == RUN or role in method.roles)
        ]

    def _roles(self) -> set[str]:
        """The roles that may call something."""
        return {role for method in self._methods.values() for role in method.roles}

    @abstractmethod
    def _on_call(self, origin: Origin, header: wire.Header, frames: Sequence[Any]) -> None:
        """Take a call, under the loop's lock."""

    def _method(self, name: str, role: str) -> Any:
        """The method that is called, if this role may call it."""
        method = self._methods.get(name)
        # The same answer for a method that does not exist, because it is none of the role's.
        if role != RUN and (method is None or role not in method.roles):
            raise SecurityError(f"A key of the role {role!r} may not call {name!r:.100}.")
        if method is None:
            known = ", ".join(sorted(self._methods)) or "none"
            raise MessageError(f"{self.name} has no method {name!r:.100}; its methods are {known}.")
        return method

    def _check_bind(self, method: str) -> None:
        if self._started:
            raise TransportError(f"{self.name}: bind {method!r} before the server is started.")
        if method in self._methods or not method.isidentifier():
            raise TransportError(
                f"{self.name}: {method!r} is bound already, or is not a name for a method."
            )


def error_frames(number: int, error: BaseException) -> list[Any]:
    """The answer that tells a caller what its method raised."""
    text = "".join(traceback.format_exception_only(error)).strip()
    trace = "".join(traceback.format_exception(error))
    return wire.pack_error(number, type(error).__name__, _sendable(text), _sendable(trace))


def _sendable(text: str) -> str:
    """Text as UTF-8 can carry it: file names may hold bytes that are not UTF-8."""
    return text[-_LONGEST_TEXT:].encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class _Method:
    function: Callable[..., Any]
    queue: WorkQueue
    repeatable: bool
    roles: frozenset[str]
    pass_caller: bool
    takes: tuple[int, float]
    """How many arguments, at least and at most."""

    def check_count(self, name: str, count: int) -> None:
        least, most = self.takes
        if not least <= count + self.pass_caller <= most:
            raise ArgumentError(f"{name!r} does not take {count} arguments.")


def _takes(function: Callable[..., Any]) -> tuple[int, float]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables have no signature
        return 0, _FOREVER
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    most = any(p.kind == p.VAR_POSITIONAL for p in parameters)
    least = sum(p.default is p.empty for p in positional)
    return least, _FOREVER if most else len(positional)


class Server(BaseServer):
    """Answers calls by running the bound functions on worker threads.

    Args:
        address: Where to listen; see `dreamfleet.transport.address`.
        name: Shown in errors, logs and thread names.
        workers: Threads shared by the methods that have none of their own. With one worker, calls
            run one after the other, in the order each client made them.
        keys: The run key. Needed for any `tcp` address but loopback.
        insecure: Listen on the network without keys, for everyone.
        identify: What keys stand for that do not follow from the run key, such as invitations.
            Asked when one connects.
        revoked: Names that `identify` gave and that are revoked. They lose their connections
            within two seconds, and do not get others.
        local: For a server at a port, a socket file where processes of the same machine connect.
            They need no key, as at every socket file.
    """

    def __init__(
        self,
        address: str,
        name: str = "Server",
        workers: int = 1,
        keys: Keys | None = None,
        *,
        insecure: bool = False,
        local: str = "",
        identify: Identify | None = None,
        revoked: Revoked | None = None,
    ) -> None:
        if workers < 1:
            raise TransportError(f"{name} needs at least one worker, not {workers}.")
        super().__init__(address, name, keys, insecure, local, identify=identify, revoked=revoked)
        self._shared = WorkQueue(workers)
        self._methods: dict[str, _Method] = {}

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
            fn: Gets the call's arguments; arrays among them are read-only. For arguments that it
                does not take it raises `ArgumentError`, before it touches anything.
            workers: Threads of its own, for a method that may block; 0 shares the server's.
            repeatable: It does no harm to run it twice, so a client may send a call again when the
                server came back after a crash. Other calls fail with `Disconnected` then.
            roles: Whose keys may call it in addition to the run key. Without keys everybody may.
            pass_caller: Whether the function gets a `Caller` before the call's arguments.
        """
        self._check_bind(method)
        queue = WorkQueue(workers) if workers > 0 else self._shared
        self._methods[method] = _Method(
            fn, queue, repeatable, frozenset(roles), pass_caller, _takes(fn)
        )

    def _queues(self) -> set[WorkQueue]:
        return super()._queues() | {self._shared}

    def _on_call(self, origin: Origin, header: wire.Header, frames: Sequence[Any]) -> None:
        method: _Method = self._method(header.method, origin.identity.role)
        if header.rows:
            raise MessageError(f"{header.method!r} takes single calls, not blocks of items.")
        args = wire.value_of(header, frames)
        if type(args) is not tuple:
            raise MessageError("The arguments of a call are a tuple.")
        method.check_count(header.method, len(args))
        if method.pass_caller:
            args = (origin.caller, *args)
        job = partial(self._work, origin.peer, header.id, method, args)
        self._loop.submit(method.queue, job)

    def _work(self, peer: bytes, number: int, method: _Method, args: tuple[Any, ...]) -> None:
        failed = 0
        try:
            frames = wire.pack(wire.REPLY, number, encode(method.function(*args)))
        except Unanswered:
            with self._loop.lock:
                self._loop.leave(peer, number if method.repeatable else 0)
            return
        except (ArgumentError, Occupied) as problem:
            with self._loop.lock:
                self._loop.reject(peer, number, problem)
            return
        except BaseException as error:  # whatever it is, it must not take a thread along
            failed = 1
            frames = error_frames(number, error)
        with self._loop.lock:
            self._loop.counts["errors"] += failed
            self._loop.reply(peer, frames)
