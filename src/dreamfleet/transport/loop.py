"""The threads of a server: who reads, who works, who answers.

The threads take turns at reading. The one whose turn it is reads until it has a call to run; then
it lets another thread read, runs the call itself and answers itself. So no other thread has to wake
up between the arrival of a call and its answer, which on most machines takes longer than the call.
Where only one call may run at a time and calls are quick, the thread does not even let another one
read meanwhile.

Listeners belong to no thread, but to one at a time: every touch is under the loop's lock. Only the
sleep is not: it waits for descriptors, which is not a touch.
"""

from __future__ import annotations

import logging
import secrets
import select
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from dreamfleet.transport import local, wire
from dreamfleet.transport.address import Address, parse
from dreamfleet.transport.codec import encode, own_frames, parse_schema
from dreamfleet.transport.errors import (
    MessageError,
    Occupied,
    SecurityError,
    TransportError,
)
from dreamfleet.transport.listening import FOREVER, Listener, Origin
from dreamfleet.transport.local import LocalListener
from dreamfleet.transport.remote import RemoteListener
from dreamfleet.transport.security import Identify, Keys, Revoked
from dreamfleet.transport.slab import Memory
from dreamfleet.transport.wire import Waker

log = logging.getLogger(__name__)

Job = Callable[[], None]
_READER_STOP_SECONDS = 5.0  # seconds, far more than it takes
_QUICK_SECONDS = 0.001  # seconds; a job that takes less is over before another thread is up to read
_MAX_READ = 256  # messages before other threads get the lock
_YIELD_SECONDS = 0.0001  # seconds
_MAX_FAULTY = 4096  # connections whose faults are counted
_Poller: Any = getattr(select, "epoll", select.poll)
_POLL_UNIT = 1.0 if hasattr(select, "epoll") else 1000.0  # of the poller's timeout, in a second


@dataclass(eq=False)
class WorkQueue:
    """Jobs of which at most `limit` run at the same time; the others wait their turn, in order."""

    limit: int
    running: int = 0
    quick: bool = False  # the last job was
    waiting: deque[Job] = field(default_factory=deque)


class Options(TypedDict, total=False):
    """What servers may be given; see `BaseServer`."""

    insecure: bool
    identify: Identify | None
    revoked: Revoked | None


class Loop(ABC):
    """What all servers are: it receives calls, runs jobs, sends answers.

    Args:
        address: Where to listen: a port or a socket file.
        name: Shown in errors, logs and thread names.
        keys: The run key.
        options: See `BaseServer`.
    """

    most_faults = 10
    """Wrong messages and calls of a connection, which is then ended."""

    def __init__(self, address: str, name: str, keys: Keys | None, options: Options) -> None:
        self.name = name
        self._roles: set[str] = set()  # that may call something
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._incarnation = secrets.randbits(62) + 1
        self._inflight: Counter[bytes] = Counter()
        self._faults: Counter[bytes] = Counter()
        self._ready: deque[tuple[WorkQueue, Job]] = deque()
        self._reading = threading.Lock()  # held by the thread that reads
        self._reader: threading.Thread | None = None  # holds the lock above
        self._single = False  # at most one job runs at a time
        self._threads: list[threading.Thread] = []
        self._asleep_until = -FOREVER  # the reader is asleep until then, unless woken
        self._stopping = self._released = False
        self._waker, self._poller = Waker(), _Poller()
        try:
            self._listener = self._listen(parse(address), keys, options)
        except BaseException:
            _release(self._waker, self._poller)
            raise
        # Also for a server that is forgotten before it is started.
        self._release = weakref.finalize(
            self, _release, self._waker, self._poller, self._listener.close
        )
        self._release.atexit = False
        self._wake_descriptor = self._waker.fileno()
        self._poller.register(self._wake_descriptor, select.POLLIN)
        self._listener.register(self._poller)

    @property
    def address(self) -> str:
        """Where clients connect."""
        return self._listener.address.text

    def _listen(self, address: Address, keys: Keys | None, options: Options) -> Listener:
        if not (address.loopback or keys or options.get("insecure")):
            raise SecurityError(
                f"{self.name} at {address.text} would be open to every machine on the network: "
                "pass keys=Keys.load(...), bind to 127.0.0.1, or pass insecure=True."
            )
        if address.kind != "tcp" and local.AVAILABLE:
            return LocalListener(address, self.name)
        return RemoteListener(
            address,
            self.name,
            keys if address.kind == "tcp" else None,
            self._roles,
            options.get("identify"),
            options.get("revoked"),
        )

    # --- what a server does with calls, under the lock -------------------------------------------

    @abstractmethod
    def _on_call(self, origin: Origin, header: wire.Header, frames: Sequence[Any]) -> None:
        """Take a call; hands what must run to `_submit`."""

    @abstractmethod
    def _repeatable(self, role: str) -> list[str]:
        """The methods that may be called twice, among those that a role may call."""

    def _deadline(self) -> float:
        """When `_on_due` wants to be called, if at all."""
        return FOREVER

    def _on_due(self) -> None:
        """Called at the deadline, and whenever a job has ended."""
        return

    # --- start and end ---------------------------------------------------------------------------

    def _start_threads(self, workers: int) -> None:
        """Start with room for so many jobs at a time, and one thread more to read."""
        self._single = workers == 1
        self._threads = [
            threading.Thread(target=self._run, name=f"{self.name}-{index}", daemon=True)
            for index in range(workers + 1)
        ]
        for thread in self._threads:
            thread.start()

    def _stop(self, timeout: float = 5.0) -> None:
        """Let running jobs end and send their answers, then give everything back."""
        with self._lock:
            self._stopping = True
            self._waker.wake()
        deadline = time.monotonic() + timeout
        self._stop_reading()  # this may be a method that closes its own server
        # A reader stops at once, but a method that a reader runs itself may take any time.
        if self._reading.acquire(timeout=max(timeout, _READER_STOP_SECONDS)):
            self._reading.release()  # from here on no thread reads
        for thread in self._threads:
            # A method may close its server before the last thread has been started.
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    log.warning("%s is still busy after %.0f s: abandoned.", thread.name, timeout)
        with self._lock:
            self._released = True
            self._release()

    # --- under the lock --------------------------------------------------------------------------

    def _submit(self, queue: WorkQueue, job: Job) -> None:
        """Have a job run as soon as its queue allows."""
        if queue.running < queue.limit:
            queue.running += 1
            self._ready.append((queue, job))
        else:
            queue.waiting.append(job)

    def _reply(self, peer: bytes, frames: list[Any]) -> None:
        """Answer a call."""
        self._forget_call(peer)
        self._counts["replies"] += 1
        self._send(peer, frames)

    def _leave(self, peer: bytes, number: int) -> None:
        """Leave a call to the server's successor; with 0, drop it."""
        self._forget_call(peer)
        if number:
            self._send(peer, wire.pack(wire.STALE, number, encode(None)))

    def _forget_call(self, peer: bytes) -> None:
        self._counts["inflight"] -= 1
        count = self._inflight[peer] - 1
        if count > 0:
            self._inflight[peer] = count
        else:
            del self._inflight[peer]

    def _wake_reader(self) -> None:
        """After a change made by a thread that does not read: wake the reader if it has to act."""
        if self._asleep_until > -FOREVER and (
            self._ready
            or self._deadline() < self._asleep_until
            or (not self._released and self._listener.readable())
        ):
            self._asleep_until = -FOREVER
            self._waker.wake()

    def _answer_memory(self, peer: bytes, size: int) -> Memory | None:
        """Memory whose content an answer to this peer does not copy, if there is some."""
        with self._lock:
            return None if self._released else self._listener.memory(peer, size)

    def _send(self, peer: bytes, frames: list[Any]) -> None:
        if self._released:
            return
        if self._listener.send(peer, frames):
            self._counts["bytes_out"] += sum(map(len, frames))
        else:
            # The client has disconnected, or does not read its answers.
            self._counts["undelivered"] += 1

    # --- taking turns at reading -----------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
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
        noticed: list[tuple[int, int]] = []
        left = _MAX_READ
        while True:
            with self._lock:
                if self._stopping:
                    return None
                try:
                    left -= self._receive(noticed, left)
                except Exception:
                    log.exception("%s: reading failed.", self.name)
                noticed = []
                if self._ready:
                    return self._ready.popleft()
                now, deadline = time.monotonic(), self._deadline()
                if deadline <= now:
                    self._on_due()
                    continue
                deadline = min(deadline, self._listener.due)
                if left > 0:
                    self._asleep_until = deadline
            if left <= 0:
                # A flood of messages that are no calls must not keep answers back.
                time.sleep(_YIELD_SECONDS)
                left = _MAX_READ
                continue
            timeout = None if deadline == FOREVER else max(0.0, deadline - now) * _POLL_UNIT
            noticed = self._poller.poll(timeout)
            self._asleep_until = -FOREVER
            if any(descriptor == self._wake_descriptor for descriptor, _ in noticed):
                self._waker.clear()

    def _perform(self, queue: WorkQueue, job: Job) -> tuple[WorkQueue, Job] | None:
        """Run a job; returns the next one, if there is one to run right away."""
        start = time.monotonic()
        try:
            job()
        except BaseException:
            log.exception("%s: a job failed to handle its own failure.", self.name)
        queue.quick = time.monotonic() - start < _QUICK_SECONDS
        with self._lock:
            if self._stopping:
                return None
            if queue.waiting:
                task: tuple[WorkQueue, Job] | None = (queue, queue.waiting.popleft())
            else:
                queue.running -= 1
                self._on_due()
                task = self._ready.popleft() if self._ready else None
            self._wake_reader()
            return task

    def _receive(self, noticed: list[tuple[int, int]], most: int) -> int:
        """Read until there is a job to run, or nothing left to read, or `most` messages were read;
        returns how many were."""
        listener, count = self._listener, 0
        for descriptor, events in noticed:
            listener.notice(descriptor, events)
        if listener.due <= time.monotonic():
            listener.on_due()
        while count < most and not self._ready and (message := listener.receive()):
            count += 1
            self._take(*message)
        return count

    def _take(self, origin: Origin, frames: list[Any]) -> None:
        """Take a message, whatever it is."""
        self._counts["bytes_in"] += sum(map(len, frames))
        if self._faults and self._faults[origin.peer] >= self.most_faults:
            self._listener.hang_up(origin)
            return
        try:
            self._handle(origin, frames)
        except TransportError as problem:
            self._refuse(origin.peer, problem)
        except Exception as problem:
            # A bug, and no reason to stop serving other clients.
            log.exception("%s: a message could not be handled.", self.name)
            self._refuse(origin.peer, problem)

    def _refuse(self, peer: bytes, problem: Exception) -> None:
        self._counts["malformed"] += 1
        self._send(peer, wire.pack_error(0, problem))
        self._blame(peer)

    def _handle(self, origin: Origin, frames: list[Any]) -> None:
        peer = origin.peer
        if not frames:
            raise MessageError("An empty message, or one of too many frames.")
        header = wire.unpack(frames[0])
        if header.kind == wire.HELLO:
            self._send(peer, wire.pack(wire.WELCOME, 0, encode(self._welcome(origin))))
            return
        if header.kind != wire.CALL or header.id <= 0 or header.rows < 0:
            raise MessageError("A server accepts greetings and calls only.")
        if header.to != self._incarnation:
            self._send(peer, wire.pack(wire.STALE, header.id, encode(None)))
            return
        self._counts["requests"] += 1
        self._counts["inflight"] += 1
        self._inflight[peer] += 1
        if self._inflight[peer] > wire.MAX_INFLIGHT:
            text = f"More than {wire.MAX_INFLIGHT} requests are in flight."
            self._reject(peer, header.id, MessageError(text), blame=False)
        elif self._counts["inflight"] > wire.MAX_HELD:
            text = f"{self.name} holds {wire.MAX_HELD} requests and takes no more."
            self._reject(peer, header.id, MessageError(text), blame=False)
        else:
            try:
                own = own_frames(parse_schema(header.schema), frames[1:])
                self._on_call(origin, header, own)
            except Exception as problem:
                if not isinstance(problem, TransportError):  # a bug of ours
                    log.exception("%s: a call could not be handled.", self.name)
                self._reject(peer, header.id, problem)

    # --- who misbehaves --------------------------------------------------------------------------

    def _reject(self, peer: bytes, number: int, problem: Exception, *, blame: bool = True) -> None:
        """Answer a call with an error, and count that it should not have been made."""
        self._counts["errors"] += 1
        self._reply(peer, wire.pack_error(number, problem))
        if blame and not isinstance(problem, Occupied):
            self._blame(peer)

    def _blame(self, peer: bytes) -> None:
        """Count a fault of a peer. Once there are too many, its next message ends the connection:
        so the error that it was just sent still arrives."""
        if len(self._faults) >= _MAX_FAULTY and peer not in self._faults:
            self._faults.clear()
        self._faults[peer] += 1

    def _welcome(self, origin: Origin) -> dict[str, Any]:
        return {
            "protocol": wire.PROTOCOL,
            "name": self.name,
            "incarnation": self._incarnation,
            "limit": wire.MAX_INFLIGHT,
            "repeatable": self._repeatable(origin.identity.role),
        }


def _release(waker: Waker, poller: Any, close_listener: Callable[[], None] = lambda: None) -> None:
    """Give back everything that a server holds."""
    close_listener()
    waker.close()
    if hasattr(poller, "close"):
        poller.close()
