"""A client of a server's methods, and the answers to its calls."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from dreamfleet.transport import wire
from dreamfleet.transport.codec import Block, Buffer, Encoded, encode, parse_schema
from dreamfleet.transport.connection import Connection, Event, Lost, Message, Welcome
from dreamfleet.transport.errors import (
    Closed,
    Disconnected,
    MessageError,
    RemoteError,
    Timeout,
    TransportError,
)
from dreamfleet.transport.listening import FOREVER
from dreamfleet.transport.security import Keys, RoleKey
from dreamfleet.transport.slab import Memory
from dreamfleet.transport.wire import Waker

log = logging.getLogger(__name__)

_MAX_DEATHS, _DEATH_SECONDS = 5, 2.0
FLUSH_SECONDS = 1.0
"""How long a client that is closed tries to deliver its calls."""


class Future:
    """The answer to one call.

    The thread that waits for it reads the socket, so no other thread is woken. The call is sent
    whether or not a thread waits.
    """

    __slots__ = ("_client", "_done", "_error", "_seen", "_value", "method", "request")

    def __init__(self, client: Client, method: str, request: Any = None) -> None:
        self.method = method
        self.request = request  # what the client keeps until the answer is here
        self._client = client
        self._done = False
        self._seen = False
        self._value: Any = None
        self._error: TransportError | None = None

    def done(self) -> bool:
        """Whether the answer is here. Does not wait."""
        if not self._done:
            self._client._progress(lambda: self._done, time.monotonic())
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the answer; False if it did not come within `timeout` seconds."""
        if not self._done:
            self._client._progress(lambda: self._done, self._client._deadline(timeout))
        return self._done

    def result(self, timeout: float | None = None) -> Any:
        """The answer.

        Args:
            timeout: Seconds to wait; None takes the client's timeout.

        Raises:
            RemoteError: The method failed on the server.
            Disconnected: The server was lost, and the call could not be repeated.
            Timeout: The answer did not come in time. It may be asked for again.
        """
        if not self.wait(timeout):
            raise Timeout(self._client._why_waiting(self.method))
        self._seen = True
        if self._error is not None:
            raise self._error
        return self._value

    def _resolve(self, value: Any) -> None:
        self._value, self._done, self.request = value, True, None

    def _fail(self, error: TransportError) -> None:
        self._error, self._done, self.request = error, True, None

    def __del__(self) -> None:
        # No caller can look at this answer any more. If it is an error, the client logs it.
        if self._error is not None and not self._seen:
            self._client._on_unseen_error(self.method, self._error)


@dataclass(slots=True)
class _Request:
    """A call that has no answer yet. Its value is a block or a copy: it may have to be sent again
    when the caller has long reused its arrays."""

    value: Encoded | Block
    rows: int
    created: float
    sent_to: int = 0  # the server's incarnation; 0: not sent
    sent_at: float = 0.0
    lost_from: int = 0  # the incarnation that was lost while it had the call
    deaths: int = 0  # of servers in a row, right after they were sent the call

    def pack(self, number: int, to: int, method: str) -> list[Buffer]:
        """The message of the call."""
        return wire.pack(wire.CALL, number, self.value.encoded(), to, method, self.rows)


class Client:
    """Calls methods of a server, any number of threads at once.

    `client.method(*args)` and `client.call('method', *args)` send a call and return a `Future`;
    the second form also reaches methods that are named like one of the client's own.
    What is sent is copied before the call returns, so buffers may be reused at once; received
    arrays are read-only.

    A thread that waits for an answer reads the socket itself, and gives other threads' answers to
    them. While there is no connection, a thread in the background connects and then sends the calls
    that were made meanwhile; it ends when they are sent. If no thread waits, the loss of a
    connection is noticed by the next call.

    Args:
        address: Where the server listens; see `dreamfleet.transport.address`. Or a function that
            says where: it is asked at every attempt to connect, because a server may come back
            elsewhere. While it is unknown, it returns "", and is asked
            again after a pause of at most half a second. It must be quick, and not use this client;
            any thread may ask it.
        name: Shown in errors and logs.
        maxinflight: Calls without an answer; one more makes the caller wait.
        timeout: Seconds any wait may take, unless the wait says otherwise; None waits as long as
            the server is alive.
        keys: The run key, or the key of a role, for `tcp` servers that have one.
        patience: Seconds without a connection, or without an address, after which waiting calls
            fail.
    """

    def __init__(
        self,
        address: str | Callable[[], str],
        name: str = "Client",
        maxinflight: int = 16,
        timeout: float | None = None,
        keys: Keys | RoleKey | None = None,
        *,
        patience: float = 60.0,
    ) -> None:
        if not 1 <= maxinflight <= wire.MAX_INFLIGHT:
            raise TransportError(
                f"{name}: maxinflight is from 1 to {wire.MAX_INFLIGHT}, not {maxinflight}."
            )
        self.name = name
        self._maxinflight, self._timeout, self._patience = maxinflight, timeout, patience
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._receiving = False  # a thread waits at the socket, outside of the lock
        self._sending = False  # the background thread looks after calls that were not sent
        self._sender: threading.Thread | None = None
        self._confirmed = False  # the server has answered the greeting of `_flush`
        self._waiters = 0  # other threads, which wait for that one
        self._closed = False
        self._pending: dict[int, Future] = {}
        self._unseen: deque[str] = deque()  # errors of calls whose answers no caller looked at
        self._number = 0
        self._welcome: Welcome | None = None
        self._counts: Counter[str] = Counter()
        self._waker = Waker()
        try:
            self._connection = Connection(address, keys, self._waker)
        except BaseException:
            self._waker.close()
            raise
        self._down_since = time.monotonic()

    @property
    def address(self) -> str:
        """Where the server listens; empty while that is unknown."""
        return self._connection.address

    # --- what callers use ------------------------------------------------------------------------

    def call(self, method: str, /, *args: Any) -> Future:
        """Send a call.

        Raises:
            CodecError: An argument cannot be sent.
            Timeout: `maxinflight` calls are unanswered, and none was answered in time.
        """
        return self._send_call(method, 0, encode(args))

    def call_block(self, method: str, /, *args: Any) -> Future:
        """Send one call that holds a block of items for a `BatchServer`: every leaf is an array
        with the same leading axis k, and so is every leaf of the answer. The only argument may be a
        `Block`, which takes less time."""
        if len(args) == 1 and type(args[0]) is Block:
            return self._send_call(method, args[0].rows, args[0])
        value = encode(args)
        leaves = parse_schema(value.schema).leaves
        rows = leaves[0].shape[0] if leaves and leaves[0].shape else 0
        if not rows:
            raise TransportError(
                f"{method!r}: a block needs arrays that share a leading axis of at least 1."
            )
        return self._send_call(method, rows, value)

    def memory(self, size: int) -> Memory | None:
        """Memory for arrays of a call, which are sent without a copy; see `shared_arrays`. None if
        there is none: the server is on another machine, or the first calls have yet to be made."""
        with self._lock:
            return self._connection.memory(size)

    def __getattr__(self, method: str) -> Callable[..., Future]:
        if method.startswith("_"):
            raise AttributeError(f"A client has no {method!r}.")
        return partial(self.call, method)

    def connect(self, timeout: float | None = None) -> None:
        """Wait until the server answers.

        Raises:
            Disconnected: It did not within `timeout` seconds; the message says why, if known.
        """
        limit = self._patience if timeout is None else timeout
        if not self._progress(lambda: self._welcome is not None, time.monotonic() + limit):
            raise Disconnected(self._no_server(limit))

    def wait_any(self, futures: Collection[Future], timeout: float | None = None) -> bool:
        """Wait for the first answer to any of these calls of this client; False if none came within
        `timeout` seconds."""
        if len(futures) == 1:
            return next(iter(futures)).wait(timeout)
        return self._progress(
            lambda: any(future._done for future in futures), self._deadline(timeout)
        )

    def stats(self) -> dict[str, float]:
        """Counts since the start, and how many calls are in flight now."""
        names = ("requests", "replies", "errors", "resent", "connects", "bytes_out")
        return {
            **{name: float(self._counts[name]) for name in names},
            "bytes_in": float(self._connection.bytes_in),
            "inflight": float(len(self._pending)),
            "connected": float(self._welcome is not None),
        }

    def close(self, flush: float = FLUSH_SECONDS) -> None:
        """Hang up. Calls without an answer fail with `Closed`, but the server gets them.

        Args:
            flush: Seconds to wait until the server has read every call. A warning says which ones
                were not sent by then. With 0, what was not sent is dropped.
        """
        try:
            if flush > 0:
                with suppress(Closed):
                    self._flush(time.monotonic() + flush)
        finally:
            self._close(warn=flush > 0)

    def _close(self, warn: bool) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            dropped = Counter(future.method for future in self._unsent())
            problem = self._connection.problem
            self._fail_all(  # at once: who asks for an answer from here on is not told to wait
                Closed, f"{self.name} was closed before {self.address or 'a server'} answered."
            )
            self._waker.wake()
            self._waiters += 1
            while self._receiving:
                self._changed.wait()
            self._connection.close()
            self._waker.close()
            self._changed.notify_all()
        if self._sender:
            self._sender.join()
        if dropped and warn:
            calls = ", ".join(f"{count} of {method!r}" for method, count in dropped.items())
            log.warning(
                "%s was closed, and calls were never sent (%s): %s.", self.name, problem, calls
            )
        self._log_unseen()

    def _flush(self, deadline: float) -> None:
        """Wait until the server has read every call: it answers a greeting in its turn."""
        self._progress(lambda: not self._unsent(), deadline)
        with self._lock:
            if not (self._welcome and self._pending):
                return
            self._confirmed = False
            self._connection.greet()
            self._waker.wake()  # a send may swallow the signal of a message that came meanwhile
        self._progress(lambda: self._confirmed or not self._pending, deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(FLUSH_SECONDS if kind is None else 0.0)  # an error does not wait

    # --- sending ---------------------------------------------------------------------------------

    def _send_call(self, method: str, rows: int, value: Encoded | Block) -> Future:
        if self._unseen:
            self._log_unseen()
        deadline = None
        while True:
            with self._lock:
                if self._closed:
                    raise Closed(f"{self.name} is closed.")
                if len(self._pending) < self._maxinflight:
                    return self._enqueue(method, _Request(value, rows, time.monotonic()))
            # Too large a value does not wait.
            wire.pack(wire.CALL, 0, value.encoded(), 0, method, rows)
            deadline = deadline or self._deadline(None)
            if not self._progress(lambda: len(self._pending) < self._maxinflight, deadline):
                raise Timeout(
                    f"{len(self._pending)} calls of {self.name} are unanswered by {self._server}, "
                    f"so {method!r} was not sent."
                )

    def _enqueue(self, method: str, request: _Request) -> Future:
        if type(request.value) is Encoded:
            request.value = self._connection.keep(request.value)
        number, to = self._number + 1, self._welcome.incarnation if self._welcome else 0
        frames = request.pack(number, to, method)  # raises if it is too large
        self._number = number
        future = self._pending[number] = Future(self, method, request)
        self._counts["requests"] += 1
        if to:
            self._send_frames(request, frames, to)
        else:
            self._send_later()
        return future

    def _unsent(self) -> list[Future]:
        return [future for future in self._pending.values() if not future.request.sent_to]

    def _send_later(self) -> None:
        """Have calls sent when there is a connection, whether or not a thread waits for them."""
        if self._receiving:
            self._waker.wake()  # the sleeper has one more call whose patience may end
        if not self._sending:
            self._sending = True
            self._sender = threading.Thread(
                target=self._send_unsent, name=f"{self.name}-sends", daemon=True
            )
            self._sender.start()

    def _send_unsent(self) -> None:
        def done() -> bool:
            # Under the lock: a call that is made after this starts another thread.
            self._sending = bool(self._unsent()) or self._connection.waiting
            return not self._sending

        try:
            with suppress(Closed):
                self._progress(done, FOREVER)
        finally:
            with self._lock:
                if self._sender is threading.current_thread():
                    self._sending = False

    def _send(self, number: int, future: Future, welcome: Welcome) -> None:
        request: _Request = future.request
        to = welcome.incarnation
        self._send_frames(request, request.pack(number, to, future.method), to)

    def _send_frames(self, request: _Request, frames: list[Any], to: int) -> None:
        if not self._connection.send(frames):
            self._send_later()  # to the server's successor
            return
        request.sent_to, request.sent_at = to, time.monotonic()
        self._counts["bytes_out"] += sum(map(len, frames))
        if self._connection.waiting:
            self._send_later()
        elif self._receiving and self._connection.readable:
            # A send may swallow the signal of a message that came meanwhile.
            self._waker.wake()

    # --- receiving -------------------------------------------------------------------------------

    def _progress(self, done: Callable[[], bool], deadline: float) -> bool:
        """Move the connection along until `done` or the deadline; returns whether it is done.

        Any thread may call it. One of them at a time waits at the socket; the others sleep until
        it has read something for them, or leaves its place to them.
        """
        with self._lock:
            last_look = False
            while not done():
                if self._closed:
                    raise Closed(f"{self.name} is closed.")
                if not self._receiving:
                    if event := self._connection.next():
                        self._handle(event)
                        self._notify_waiters()
                        continue
                    if not self._welcome and self._expire():
                        continue
                if last_look:
                    return done()
                remaining = deadline - time.monotonic()
                last_look = remaining <= 0
                if not self._receiving:
                    self._sleep(max(0.0, remaining))
                elif remaining > 0:
                    self._waiters += 1
                    self._changed.wait(None if remaining == FOREVER else remaining)
                    self._waiters -= 1
            return True

    def _sleep(self, timeout: float) -> None:
        if not self._welcome:
            timeout = min(timeout, self._next_expiry())
        self._receiving = True
        self._lock.release()
        try:
            self._connection.sleep(timeout)
        finally:
            self._lock.acquire()
            self._receiving = False
            self._notify_waiters()

    def _notify_waiters(self) -> None:
        if self._waiters:
            self._changed.notify_all()

    def _handle(self, event: Event) -> None:
        if isinstance(event, Message):
            self._on_answer(event)
        elif isinstance(event, Welcome):
            self._on_welcome(event)
        elif isinstance(event, Lost):
            self._on_lost(event.address)
        else:
            self._connection.problem = str(event)
            self._fail_all(MessageError, str(event))

    def _on_answer(self, message: Message) -> None:
        """Give an answer to the call it belongs to."""
        header = message.header
        try:
            if header.kind == wire.STALE:
                self._on_stale(header.id)
            elif header.kind == wire.REPLY:
                value = wire.value_of(header, message.frames)
                if future := self._pending.pop(header.id, None):
                    self._counts["replies"] += 1
                    future._resolve(value)
            elif header.kind == wire.ERROR:
                kind, text, trace = wire.value_of(header, message.frames)
                self._counts["errors"] += 1
                error = RemoteError(f"{self._server}: {text}", kind, trace)
                if future := self._pending.pop(header.id, None):
                    future._fail(error)
                else:  # the server could not even read which call it was
                    self._unseen.append(str(error))
        except (TransportError, ValueError, TypeError) as problem:
            self._fail_all(
                MessageError, f"{self._server} sent an answer that is not valid: {problem}"
            )

    def _on_stale(self, number: int) -> None:
        """The successor of the server that a call was made for has refused it, or the server has
        left it to its successor, to which it may be sent once that has greeted."""
        future = self._pending.get(number)
        if future is None:
            return
        request: _Request = future.request
        if self._welcome and self._welcome.incarnation != request.sent_to:
            self._send(number, future, self._welcome)
        else:
            request.sent_to = request.deaths = 0
            self._send_later()

    def _on_welcome(self, welcome: Welcome) -> None:
        if self._welcome:
            if self._welcome.incarnation == welcome.incarnation:
                self._confirmed = True
                return
            self._on_lost(self.address)
        self._welcome = welcome
        self._maxinflight = min(self._maxinflight, welcome.limit)
        self._counts["connects"] += 1
        for number, future in list(self._pending.items()):
            request: _Request = future.request
            if request.sent_to:
                continue
            if request.lost_from == welcome.incarnation:
                request.deaths = 0  # the connection was lost, and not the server
            if request.deaths < _MAX_DEATHS:
                self._send(number, future, welcome)
            else:
                self._pending.pop(number)._fail(
                    Disconnected(
                        f"{welcome.name} at {self.address} died {request.deaths} times right after "
                        f"it received this call of {future.method!r}; it is not sent again."
                    )
                )

    def _on_lost(self, address: str) -> None:
        if self._welcome is None:
            return
        repeatable = self._welcome.repeatable
        lost = (
            f"{self._welcome.name} at {address} was lost before it answered; the call may have "
            "been executed."
        )
        self._welcome = None
        self._down_since = time.monotonic()
        for number, future in list(self._pending.items()):
            request: _Request = future.request
            if request.sent_to and future.method in repeatable:
                quickly = time.monotonic() - request.sent_at < _DEATH_SECONDS
                request.deaths = request.deaths + 1 if quickly else 0
                request.lost_from, request.sent_to = request.sent_to, 0
                self._counts["resent"] += 1
            elif request.sent_to:
                self._pending.pop(number)._fail(Disconnected(lost))
        if self._pending:
            self._send_later()

    def _next_expiry(self) -> float:
        """Seconds until a call has waited too long, while there is no connection."""
        if not self._pending:
            return FOREVER
        oldest: float = next(iter(self._pending.values())).request.created
        return max(0.0, max(oldest, self._down_since) + self._patience - time.monotonic())

    def _expire(self) -> bool:
        """Give up calls that have waited too long for a connection; whether there were any."""
        expired = False
        while self._next_expiry() == 0.0:
            number = next(iter(self._pending))
            self._pending.pop(number)._fail(Disconnected(self._no_server(self._patience)))
            expired = True
        return expired

    def _fail_all(self, kind: type[TransportError], text: str) -> None:
        while self._pending:
            self._pending.pop(next(iter(self._pending)))._fail(kind(text))

    # --- texts and times -------------------------------------------------------------------------

    def _deadline(self, timeout: float | None) -> float:
        limit = self._timeout if timeout is None else timeout
        return FOREVER if limit is None else time.monotonic() + limit

    def _on_unseen_error(self, method: str, error: TransportError) -> None:
        """An error that no caller can see any more. Called by the garbage collector, anywhere, so
        it is logged later."""
        if not isinstance(error, Closed):
            self._unseen.append(f"{method!r} failed: {error}")

    def _log_unseen(self) -> None:
        with suppress(IndexError):  # another thread may log them, too
            while True:
                log.warning("%s: %s", self.name, self._unseen.popleft())

    @property
    def _server(self) -> str:
        welcome = self._welcome
        return f"{welcome.name if welcome else 'The server'}{self._at}"

    @property
    def _at(self) -> str:
        return f" at {self.address}" if self.address else ""

    def _no_server(self, seconds: float) -> str:
        return (
            f"{self.name} found no server{self._at} for {seconds:g} s ({self._connection.problem})."
        )

    def _why_waiting(self, method: str) -> str:
        state = "connected" if self._welcome else f"not connected: {self._connection.problem}"
        return (
            f"{self._server} did not answer {method!r} of {self.name} in time "
            f"({state}; {len(self._pending)} calls in flight)."
        )
