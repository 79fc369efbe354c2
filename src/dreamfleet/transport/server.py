"""A server of methods that others call, and the threads it works with.

The threads of a server take turns at reading its socket. The one whose turn it is reads until it
has a call to run; then it lets another thread read, runs the call itself and answers itself. So
between the arrival of a call and its answer no other thread has to wake up, which on most machines
takes longer than the call. Where only one call may run at a time and calls are quick, the thread
does not even let another one read meanwhile.

Sockets of libzmq belong to no thread, but to one at a time: every touch is under the loop's lock.
Only the sleep is not: it waits for the socket's descriptor, which is not a touch.
"""

from __future__ import annotations

import inspect
import logging
import secrets
import select
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar

import zmq

from dreamfleet.transport import wire
from dreamfleet.transport.address import Address, clean_up, file_identity, parse, prepare
from dreamfleet.transport.codec import encode
from dreamfleet.transport.errors import (
    AddressError,
    ArgumentError,
    Closed,
    MessageError,
    Occupied,
    SecurityError,
    TransportError,
    Unanswered,
)
from dreamfleet.transport.guard import Guard
from dreamfleet.transport.security import (
    RUN,
    Authenticator,
    Caller,
    Identify,
    Identity,
    Keys,
    Revoked,
)
from dreamfleet.transport.shortcut import Shortcuts
from dreamfleet.transport.wire import Waker

log = logging.getLogger(__name__)

Peer = bytes
Job = Callable[[], None]
_T = TypeVar("_T")
_FOREVER = float("inf")
_LONGEST_TEXT = 100_000  # characters of an error; the last ones say most
_READER_STOPS = 5.0  # seconds, far more than it takes
_QUICK = 0.001  # seconds; a job that takes less is over before another thread is up to read
_MOST_READ = 256  # messages before those who wait for the lock have their turn
_MOST_PACKETS = 16  # before it is libzmq's turn, whoever sends
_BREATH = 0.0001  # seconds
_LOOK_SECONDS = 1.0  # between two looks at what is revoked
_MOST_REMEMBERED = 4096  # connections whose faults are counted
_PROBE = wire.pack(wire.STALE, 0, encode(None))  # which a client ignores
_TRUSTED = Identity(RUN)


class Origin:
    """Where a message came from."""

    __slots__ = ("_frame", "identity", "peer")

    def __init__(self, frame: zmq.Frame, identity: Identity) -> None:
        self.peer: Peer = frame.bytes
        self.identity = identity
        self._frame = frame

    @property
    def address(self) -> str:
        return wire.peer_address(self._frame)

    @property
    def descriptor(self) -> int:
        return wire.descriptor(self._frame)

    @property
    def caller(self) -> Caller:
        return Caller(*self.identity, self.address, self.peer)


class BaseServer(ABC):
    """What every server has: an address, methods, a start, an end, and statistics.

    Args:
        hooks: `identify`, `revoked`, `deadline` and `on_due` of the `Loop`.
    """

    _methods: Mapping[str, Any]  # by the names that clients call

    def __init__(
        self, address: str, name: str, keys: Keys | None, insecure: bool, **hooks: Any
    ) -> None:
        self.name = name
        self._loop = Loop(
            address,
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
        return self._loop.address

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
        names = ("requests", "replies", "errors", "malformed", "undelivered", "refused", "inflight")
        counts = self._loop.counts
        return {name: float(counts[name]) for name in (*names, "bytes_in", "bytes_out")}

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
    def _on_call(self, origin: Origin, header: wire.Header, frames: list[Any]) -> None:
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
    """

    def __init__(
        self,
        address: str,
        name: str = "Server",
        workers: int = 1,
        keys: Keys | None = None,
        *,
        insecure: bool = False,
        identify: Identify | None = None,
        revoked: Revoked | None = None,
    ) -> None:
        if workers < 1:
            raise TransportError(f"{name} needs at least one worker, not {workers}.")
        super().__init__(address, name, keys, insecure, identify=identify, revoked=revoked)
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

    def _on_call(self, origin: Origin, header: wire.Header, frames: list[Any]) -> None:
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

    def _work(self, peer: Peer, number: int, method: _Method, args: tuple[Any, ...]) -> None:
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


# --- the threads ---------------------------------------------------------------------------------


@dataclass(eq=False)
class WorkQueue:
    """Jobs of which at most `limit` run at the same time; the others wait their turn, in order."""

    limit: int
    running: int = 0
    quick: bool = False  # the last job was
    waiting: deque[Job] = field(default_factory=deque)


class Loop:
    """Receives calls, runs jobs, sends answers.

    Args:
        on_call: Takes a call, under the lock; hands what must run to `submit`.
        repeatable: Names the methods that may be called twice, of those that a role may call.
        roles: The roles that may call some method.
        identify: What keys stand for that do not follow from the run key.
        revoked: Names that lose their connections.
        deadline: When `on_due` wants to be called, if at all. Under the lock.
        on_due: Called under the lock at the deadline, and whenever a job has ended.
    """

    most_faults = 10
    """Wrong messages and calls of a connection, which is then ended."""

    def __init__(
        self,
        address: str,
        name: str,
        keys: Keys | None,
        insecure: bool,
        on_call: Callable[[Origin, wire.Header, list[Any]], None],
        repeatable: Callable[[str], list[str]],
        roles: Callable[[], Collection[str]],
        identify: Identify | None = None,
        revoked: Revoked | None = None,
        deadline: Callable[[], float] = lambda: _FOREVER,
        on_due: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self._on_call, self._repeatable = on_call, repeatable
        self._deadline, self._on_due = deadline, on_due
        self._incarnation = secrets.randbits(62) + 1
        self._inflight: Counter[Peer] = Counter()
        self._faults: Counter[Peer] = Counter()
        self._ended: dict[Peer, int] = {}  # descriptors of peers that were hung up on
        self._revoked = revoked
        self._look_at = -_FOREVER if revoked else _FOREVER
        self._guard: Guard | None = None
        self._guard_at = _FOREVER
        self._read_by: dict[int, int] = {}  # bytes of messages since the guard looked
        self._invited: dict[Peer, tuple[str, int, str]] = {}  # name, descriptor, address
        self._ready: deque[tuple[WorkQueue, Job]] = deque()
        self._reading = threading.Lock()  # held by the thread that reads
        self._reader: threading.Thread | None = None  # holds the lock above
        self._single = False  # at most one job runs at a time
        self.threads: list[threading.Thread] = []
        self._asleep_until = -_FOREVER  # the reader is asleep until then, unless woken
        self.stopping = self._released = False
        self._waker = Waker()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            place = parse(address)
            protect = keys if place.kind == "tcp" else None
            self._authenticator = (
                Authenticator(self._context, protect, roles, identify) if protect else None
            )
            self._socket, self._address = self._bind(place, protect, insecure)
        except BaseException:
            self._waker.close()
            self._context.destroy(linger=0)
            raise
        self.address = self._address.text
        if self._address.kind == "tcp" and Guard.works():
            self._guard, self._guard_at = Guard(self._address.port), -_FOREVER
            self._part_cost = wire.CURVE_PART_COST if self._authenticator else wire.PART_COST
        self._file = file_identity(self._address)
        self._shortcuts: Shortcuts[Origin] | None = None
        self._packets = 0  # read in a row, at most
        if self._address.kind != "tcp":
            with suppress(OSError, AttributeError):  # where there are no such sockets
                self._shortcuts = Shortcuts(self._address.path)
        sockets = [self._socket]
        if self._authenticator:
            sockets.append(self._authenticator.socket)
        self._poller = select.poll()
        self._poller.register(self._waker.fileno(), select.POLLIN)
        for socket in sockets:
            self._poller.register(socket.fileno(), select.POLLIN)
        if self._shortcuts:
            self._poller.register(self._shortcuts.fileno(), select.POLLIN)
        # Also for a server that is forgotten before it is started: its context waits for ever for
        # sockets that nobody closes.
        self._release = weakref.finalize(
            self,
            _release,
            self._address,
            self._file,
            sockets,
            self._waker,
            self._context,
            self._shortcuts,
        )
        self._release.atexit = False

    def _bind(
        self, address: Address, keys: Keys | None, insecure: bool
    ) -> tuple[zmq.Socket[bytes], Address]:
        if not (address.loopback or keys or insecure):
            raise SecurityError(
                f"{self.name} at {address.text} would be open to everyone on the network: pass "
                "keys=Keys.load(...), bind to 127.0.0.1, or say insecure=True if that is meant."
            )
        socket = self._context.socket(zmq.ROUTER)
        wire.set_limits(socket)
        socket.backlog = wire.BACKLOG
        socket.router_mandatory = True  # an answer that cannot be delivered is counted, not lost
        socket.linger = 1000
        socket.ipv6 = ":" in address.host
        if keys:
            keys.protect_server(socket)
        prepare(address)
        try:
            if address.kind == "tcp" and address.port == 0:
                socket.bind(address.endpoint.replace("{auto}", "*"))
                endpoint = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0")
                address = Address("tcp", address.host, int(endpoint.rpartition(b":")[2]))
            else:
                socket.bind(address.endpoint)
        except zmq.ZMQError as problem:
            raise AddressError(f"{self.name} cannot bind {address.text}: {problem}.") from None
        return socket, address

    # --- start and end ---------------------------------------------------------------------------

    def start(self, workers: int) -> None:
        """Start with room for so many jobs at a time, and one thread more to read the socket."""
        self._single = workers == 1
        self.threads = [
            threading.Thread(target=self._run, name=f"{self.name}-{index}", daemon=True)
            for index in range(workers + 1)
        ]
        for thread in self.threads:
            thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Let running jobs end and send their answers, then give everything back."""
        with self.lock:
            self.stopping = True
        self._waker.wake()
        deadline = time.monotonic() + timeout
        self._stop_reading()  # this may be a method that closes its own server
        # A reader stops at once, but a method that a reader runs itself may take any time.
        if self._reading.acquire(timeout=max(timeout, _READER_STOPS)):
            self._reading.release()  # from here on nobody reads
        for thread in self.threads:
            # A method may close its server before the last thread has been started.
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    log.warning("%s is still busy after %.0f s; left behind.", thread.name, timeout)
        with self.lock:
            self._released = True
            self._release()

    # --- under the lock --------------------------------------------------------------------------

    def submit(self, queue: WorkQueue, job: Job) -> None:
        """Have a job run as soon as its queue allows."""
        if queue.running < queue.limit:
            queue.running += 1
            self._ready.append((queue, job))
        else:
            queue.waiting.append(job)

    def reply(self, peer: Peer, frames: list[Any]) -> None:
        """Answer a call."""
        self.forget_call(peer)
        self.counts["replies"] += 1
        self._send(peer, frames)

    def forget_call(self, peer: Peer) -> None:
        """A call is in flight no longer."""
        self.counts["inflight"] -= 1
        count = self._inflight[peer] - 1
        if count > 0:
            self._inflight[peer] = count
        else:
            del self._inflight[peer]

    def leave(self, peer: Peer, number: int) -> None:
        """Leave a call to the server's successor; with 0, to nobody."""
        self.forget_call(peer)
        if number:
            self._send(peer, wire.pack(wire.STALE, number, encode(None)))

    def wake_reader(self) -> None:
        """After a change made by a thread that does not read: wake the reader if it has to act."""
        if self._asleep_until > -_FOREVER and (
            self._ready
            or self._deadline() < self._asleep_until
            # A send may swallow the descriptor's signal of a message that came meanwhile.
            or (not self._released and wire.readable(self._socket))
        ):
            self._asleep_until = -_FOREVER
            self._waker.wake()

    def _send(self, peer: Peer, frames: list[Any]) -> None:
        if self._released:
            return
        if not (self._shortcuts and self._shortcuts.send(peer, frames)):
            try:
                wire.send(self._socket, [peer, *frames])
            except zmq.ZMQError:
                # The client has disconnected, or does not read its answers. Nobody else is
                # affected.
                self.counts["undelivered"] += 1
                return
        self.counts["bytes_out"] += sum(map(len, frames))

    # --- taking turns at reading -----------------------------------------------------------------

    def _run(self) -> None:
        while not self.stopping:
            self._reading.acquire()
            self._reader = threading.current_thread()
            task = self._read()
            # While the only job that may run is running, only greetings could be read.
            while task and self._single and task[0].quick:
                task = self._perform(*task) or self._read()
            self._stop_reading()
            while task:
                task = self._perform(*task)

    def _stop_reading(self) -> None:
        """Let another thread read, if this one does."""
        if self._reader is threading.current_thread():
            self._reader = None
            self._reading.release()

    def _read(self) -> tuple[WorkQueue, Job] | None:
        """Read until there is a job to run, or the server stops."""
        while True:
            with self.lock:
                if self.stopping:
                    return None
                more = False
                try:
                    more = self._receive()
                except Exception:
                    log.exception("%s: reading failed.", self.name)
                if self._ready:
                    return self._ready.popleft()
                now, deadline = time.monotonic(), self._deadline()
                if deadline <= now:
                    self._on_due()
                    continue
                deadline = min(deadline, self._look_at, self._guard_at)
                if not more:
                    self._asleep_until = deadline
            if more:
                time.sleep(_BREATH)  # let those who wait for the lock have it
                continue
            self._poller.poll(None if deadline == _FOREVER else max(0, 1000 * (deadline - now)))
            self._asleep_until = -_FOREVER
            self._waker.clear()

    def _perform(self, queue: WorkQueue, job: Job) -> tuple[WorkQueue, Job] | None:
        """Run a job; returns the next one, if there is one to run right away."""
        start = time.monotonic()
        try:
            job()
        except BaseException:
            log.exception("%s: a job failed to handle its own failure.", self.name)
        queue.quick = time.monotonic() - start < _QUICK
        with self.lock:
            if self.stopping:
                return None
            if queue.waiting:
                task: tuple[WorkQueue, Job] | None = (queue, queue.waiting.popleft())
            else:
                queue.running -= 1
                self._on_due()
                task = self._ready.popleft() if self._ready else None
            self.wake_reader()
            return task

    def _receive(self) -> bool:
        """Read until there is a job to run, or nothing left to read; True if it stopped before,
        because nobody may keep a server from sending answers by sending it what is no call."""
        now = time.monotonic()
        if self._look_at <= now:
            self._look_for_revoked()
        if self._guard_at <= now:
            self._look_at_connections()
        while self._authenticator and wire.readable(self._authenticator.socket):
            self.counts["refused"] += not self._authenticator.answer()
        for _ in range(_MOST_READ):
            if self._ready:
                return False
            self._packets = (self._packets + 1) % _MOST_PACKETS
            if self._packets and self._shortcuts and (packet := self._shortcuts.receive()):
                self._take(*packet)
                continue
            frame, frames = wire.receive_from(self._socket)
            if frame is None:
                if self._shortcuts and not self._packets:
                    continue
                return False
            if self._guard:
                descriptor = wire.descriptor(frame)
                size = sum(map(len, frames)) + self._part_cost * len(frames)
                self._read_by[descriptor] = self._read_by.get(descriptor, 0) + size
            origin = self._origin(frame)
            if self._shortcuts:
                for earlier in self._shortcuts.receive_from(origin.peer):
                    self._take(origin, earlier)
            self._take(origin, frames)
        return True

    def _take(self, origin: Origin, frames: list[Any]) -> None:
        """Take a message, whatever it is."""
        self.counts["bytes_in"] += sum(map(len, frames))
        if self._unwelcome(origin):
            # What it had sent until then still comes.
            if self._ended.get(origin.peer) != (descriptor := origin.descriptor):
                self._hang_up(origin.peer, descriptor, origin.address)
            return
        try:
            self._handle(origin, frames)
        except TransportError as problem:
            self._refuse(origin.peer, problem)
        except Exception as problem:
            # Not meant to happen, and no reason to stop serving everyone else.
            log.exception("%s: a message could not be handled.", self.name)
            self._refuse(origin.peer, problem)

    def _origin(self, frame: zmq.Frame) -> Origin:
        """Who a message is from. What its key stands for was found out when it connected."""
        if self._authenticator is None:
            return Origin(frame, _TRUSTED)
        identity = self._authenticator.identities[str(frame.get("User-Id"))]
        origin = Origin(frame, identity)
        if identity.name and origin.peer not in self._invited:
            self._remember(origin)
        return origin

    def _refuse(self, peer: Peer, problem: Exception) -> None:
        self.counts["malformed"] += 1
        self._send(peer, wire.pack_error(0, type(problem).__name__, str(problem)))
        self.blame(peer)

    def _handle(self, origin: Origin, frames: list[Any]) -> None:
        peer = origin.peer
        if not frames:
            raise MessageError("An empty message, or one of too many frames.")
        header = wire.unpack(frames[0])
        if header.kind == wire.HELLO:
            welcome = encode(self._welcome(origin))
            self._send(peer, wire.pack(wire.WELCOME, 0, welcome))
            return
        if header.kind != wire.CALL or header.id <= 0 or header.rows < 0:
            raise MessageError("A server takes greetings and calls, nothing else.")
        if header.to != self._incarnation:
            self._send(peer, wire.pack(wire.STALE, header.id, encode(None)))
            return
        self.counts["requests"] += 1
        self.counts["inflight"] += 1
        self._inflight[peer] += 1
        if self._inflight[peer] > wire.MAX_INFLIGHT:
            text = f"More than {wire.MAX_INFLIGHT} requests are in flight."
            self.reject(peer, header.id, MessageError(text), blame=False)
        elif self.counts["inflight"] > wire.MAX_HELD:
            text = f"{self.name} holds {wire.MAX_HELD} requests and takes no more."
            self.reject(peer, header.id, MessageError(text), blame=False)
        else:
            try:
                self._on_call(origin, header, frames[1:])
            except TransportError as problem:
                self.reject(peer, header.id, problem)

    # --- who misbehaves, and who is not welcome any more ------------------------------------------

    def reject(self, peer: Peer, number: int, problem: Exception, *, blame: bool = True) -> None:
        """Answer a call with an error, and count that it should not have been made."""
        self.counts["errors"] += 1
        self.reply(peer, wire.pack_error(number, type(problem).__name__, str(problem)))
        if blame and not isinstance(problem, Occupied):
            self.blame(peer)

    def _unwelcome(self, origin: Origin) -> bool:
        if self._faults and self._faults[origin.peer] >= self.most_faults:
            return True
        name = origin.identity.name
        return bool(name and self._authenticator and name in self._authenticator.revoked)

    def blame(self, peer: Peer) -> None:
        """Count a fault of a peer. Once there are too many, its next message ends the connection:
        so the error that it was just sent still arrives."""
        if len(self._faults) >= _MOST_REMEMBERED and peer not in self._faults:
            self._faults.clear()
        self._faults[peer] += 1

    def connected(self, peer: Peer) -> bool:
        """Whether a peer is connected: libzmq refuses a message to one that is not."""
        try:
            wire.send(self._socket, [peer, *_PROBE])
        except zmq.ZMQError as problem:
            return problem.errno == zmq.EAGAIN  # it is, but it does not read
        return True

    def _hang_up(self, peer: Peer, descriptor: int, address: str) -> None:
        if self._shortcuts:
            self._shortcuts.drop(peer)
        if self.connected(peer):
            self.counts["ended"] += 1
            wire.hang_up(descriptor, address)
            if len(self._ended) >= _MOST_REMEMBERED:
                self._ended.clear()
            self._ended[peer] = descriptor

    def _remember(self, origin: Origin) -> None:
        """Keep what it takes to end the connection of somebody who can be revoked."""
        if len(self._invited) >= _MOST_REMEMBERED:
            self._invited = {p: kept for p, kept in self._invited.items() if self.connected(p)}
        self._invited[origin.peer] = (origin.identity.name, origin.descriptor, origin.address)

    def _look_at_connections(self) -> None:
        """End the connections that hold more of unfinished messages than they may."""
        if self._guard:
            self.counts["ended"] += self._guard.look(self._read_by)
            self._guard_at = time.monotonic() + self._guard.pause
            self._read_by.clear()

    def _look_for_revoked(self) -> None:
        """End the connections of those who were revoked."""
        self._look_at = time.monotonic() + _LOOK_SECONDS
        if self._revoked is None or self._authenticator is None:
            self._look_at = _FOREVER
            return
        try:
            self._authenticator.revoked = frozenset(self._revoked())
        except Exception:
            log.exception("%s: whether somebody is revoked is not known.", self.name)
        for peer, (name, descriptor, address) in list(self._invited.items()):
            if name in self._authenticator.revoked:
                self._hang_up(peer, descriptor, address)
                del self._invited[peer]

    def _welcome(self, origin: Origin) -> dict[str, Any]:
        return {
            "protocol": wire.PROTOCOL,
            "name": self.name,
            "incarnation": self._incarnation,
            "limit": wire.MAX_INFLIGHT,
            "repeatable": self._repeatable(origin.identity.role),
            "shortcut": self._shortcuts.offer(origin.peer, origin) if self._shortcuts else "",
        }


def _release(
    address: Address,
    file: tuple[int, int] | None,
    sockets: list[zmq.Socket[bytes]],
    waker: Waker,
    context: zmq.Context[zmq.Socket[bytes]],
    shortcuts: Shortcuts[Origin] | None,
) -> None:
    """Give back everything that a server holds."""
    if shortcuts:
        shortcuts.close()
    clean_up(address, file)  # while the address is still ours
    for socket in sockets:
        socket.close()
    waker.close()
    context.term()
