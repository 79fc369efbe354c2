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
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from dreamfleet.transport import local, wire
from dreamfleet.transport.address import Address, parse
from dreamfleet.transport.codec import encode, own_frames, parse_schema
from dreamfleet.transport.errors import (
    AddressError,
    MessageError,
    Occupied,
    SecurityError,
    TransportError,
)
from dreamfleet.transport.listening import FOREVER, Listener, Origin
from dreamfleet.transport.local import LocalListener
from dreamfleet.transport.remote import RemoteListener
from dreamfleet.transport.security import Identify, Keys, Revoked
from dreamfleet.transport.wire import Waker

log = logging.getLogger(__name__)

Job = Callable[[], None]
_READER_STOPS = 5.0  # seconds, far more than it takes
_QUICK = 0.001  # seconds; a job that takes less is over before another thread is up to read
_MOST_READ = 256  # messages before those who wait for the lock have their turn
_BREATH = 0.0001  # seconds
_MOST_REMEMBERED = 4096  # connections whose faults are counted
_Poller: Any = getattr(select, "epoll", select.poll)
_POLL_UNIT = 1.0 if hasattr(select, "epoll") else 1000.0  # of the poller's timeout, in a second


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
        addresses: Where to listen: a port, a socket file, or one of each.
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
        addresses: Sequence[str],
        name: str,
        keys: Keys | None,
        insecure: bool,
        on_call: Callable[[Origin, wire.Header, Sequence[Any]], None],
        repeatable: Callable[[str], list[str]],
        roles: Callable[[], Collection[str]],
        identify: Identify | None = None,
        revoked: Revoked | None = None,
        deadline: Callable[[], float] = lambda: FOREVER,
        on_due: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self._on_call, self._repeatable = on_call, repeatable
        self._deadline, self._on_due = deadline, on_due
        self._incarnation = secrets.randbits(62) + 1
        self._inflight: Counter[bytes] = Counter()
        self._faults: Counter[bytes] = Counter()
        self._ready: deque[tuple[WorkQueue, Job]] = deque()
        self._reading = threading.Lock()  # held by the thread that reads
        self._reader: threading.Thread | None = None  # holds the lock above
        self._single = False  # at most one job runs at a time
        self.threads: list[threading.Thread] = []
        self._asleep_until = -FOREVER  # the reader is asleep until then, unless woken
        self.stopping = self._released = False
        self._local: LocalListener | None = None
        self._remote: RemoteListener | None = None
        self._listeners: list[Listener] = []
        closers: list[Callable[[], None]] = []
        self._waker, self._poller = Waker(), _Poller()
        # Also for a server that is forgotten before it is started.
        self._release = weakref.finalize(self, _release, closers, self._waker, self._poller)
        self._release.atexit = False
        try:
            places = [parse(text) for text in addresses]
            for place in places:
                listener = self._listen(place, keys, insecure, roles, identify, revoked)
                self._listeners.append(listener)
                closers.append(listener.closer())
        except BaseException:
            self._release()
            raise
        self._poller.register(self._waker.fileno(), select.POLLIN)
        for each in self._listeners:
            each.register(self._poller)

    @property
    def addresses(self) -> list[str]:
        """Where clients connect."""
        return [listener.address.text for listener in self._listeners]

    @property
    def refused(self) -> int:
        """Connections that were refused for their key."""
        return sum(listener.refused for listener in self._listeners)

    def _listen(
        self,
        address: Address,
        keys: Keys | None,
        insecure: bool,
        roles: Callable[[], Collection[str]],
        identify: Identify | None,
        revoked: Revoked | None,
    ) -> Listener:
        if not (address.loopback or keys or insecure):
            raise SecurityError(
                f"{self.name} at {address.text} would be open to everyone on the network: pass "
                "keys=Keys.load(...), bind to 127.0.0.1, or say insecure=True if that is meant."
            )
        by_packets = address.kind != "tcp" and local.AVAILABLE
        if self._local if by_packets else self._remote:
            raise AddressError(f"{self.name} listens at one port and one socket file at most.")
        if by_packets:
            self._local = LocalListener(address, self.name)
            return self._local
        keys = keys if address.kind == "tcp" else None
        self._remote = RemoteListener(address, self.name, keys, roles, identify, revoked)
        return self._remote

    # --- start and end ---------------------------------------------------------------------------

    def start(self, workers: int) -> None:
        """Start with room for so many jobs at a time, and one thread more to read."""
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

    def reply(self, peer: bytes, frames: list[Any]) -> None:
        """Answer a call."""
        self._forget_call(peer)
        self.counts["replies"] += 1
        self._send(peer, frames)

    def leave(self, peer: bytes, number: int) -> None:
        """Leave a call to the server's successor; with 0, to nobody."""
        self._forget_call(peer)
        if number:
            self._send(peer, wire.pack(wire.STALE, number, encode(None)))

    def _forget_call(self, peer: bytes) -> None:
        self.counts["inflight"] -= 1
        count = self._inflight[peer] - 1
        if count > 0:
            self._inflight[peer] = count
        else:
            del self._inflight[peer]

    def wake_reader(self) -> None:
        """After a change made by a thread that does not read: wake the reader if it has to act."""
        if self._asleep_until > -FOREVER and (
            self._ready
            or self._deadline() < self._asleep_until
            or (self._remote and not self._released and self._remote.readable())
        ):
            self._asleep_until = -FOREVER
            self._waker.wake()

    def connected(self, peer: bytes) -> bool:
        """Whether a peer is connected."""
        listener = self._listener(peer)
        return listener is not None and listener.connected(peer)

    def _listener(self, peer: bytes) -> Listener | None:
        return self._local if peer.startswith(LocalListener.PREFIX) else self._remote

    def _send(self, peer: bytes, frames: list[Any]) -> None:
        if self._released:
            return
        listener = self._listener(peer)
        if listener is not None and listener.send(peer, frames):
            self.counts["bytes_out"] += sum(map(len, frames))
        else:
            # The client has disconnected, or does not read its answers.
            self.counts["undelivered"] += 1

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
        noticed: list[tuple[int, int]] = []
        left = _MOST_READ
        while True:
            with self.lock:
                if self.stopping:
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
                for listener in self._listeners:
                    deadline = min(deadline, listener.due)
                if left > 0:
                    self._asleep_until = deadline
            if left <= 0:
                # Nobody keeps a server from sending answers by sending it what is no call.
                time.sleep(_BREATH)
                left = _MOST_READ
                continue
            timeout = None if deadline == FOREVER else max(0.0, deadline - now) * _POLL_UNIT
            noticed = self._poller.poll(timeout)
            self._asleep_until = -FOREVER
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

    def _receive(self, noticed: list[tuple[int, int]], most: int) -> int:
        """Read until there is a job to run, or nothing left to read, or `most` messages were read;
        returns how many were."""
        for descriptor, events in noticed:
            any(listener.notice(descriptor, events) for listener in self._listeners)
        for listener in self._listeners:
            if listener.due <= time.monotonic():
                self.counts["ended"] += listener.on_due()
        count = before = 0
        while count < most:
            before = count
            for listener in self._listeners:  # in turns
                if self._ready:
                    return count
                if message := listener.receive():
                    count += 1
                    self._take(*message)
            if count == before:
                break
        return count

    def _take(self, origin: Origin, frames: list[Any]) -> None:
        """Take a message, whatever it is."""
        self.counts["bytes_in"] += sum(map(len, frames))
        if self._unwelcome(origin):
            listener = self._listener(origin.peer)
            self.counts["ended"] += listener is not None and listener.hang_up(origin)
            return
        try:
            self._handle(origin, frames)
        except TransportError as problem:
            self._refuse(origin.peer, problem)
        except Exception as problem:
            # Not meant to happen, and no reason to stop serving everyone else.
            log.exception("%s: a message could not be handled.", self.name)
            self._refuse(origin.peer, problem)

    def _refuse(self, peer: bytes, problem: Exception) -> None:
        self.counts["malformed"] += 1
        self._send(peer, wire.pack_error(0, type(problem).__name__, str(problem)))
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
                own = own_frames(parse_schema(header.schema), frames[1:])
                self._on_call(origin, header, own)
            except TransportError as problem:
                self.reject(peer, header.id, problem)

    # --- who misbehaves, and who is not welcome any more ------------------------------------------

    def reject(self, peer: bytes, number: int, problem: Exception, *, blame: bool = True) -> None:
        """Answer a call with an error, and count that it should not have been made."""
        self.counts["errors"] += 1
        self.reply(peer, wire.pack_error(number, type(problem).__name__, str(problem)))
        if blame and not isinstance(problem, Occupied):
            self._blame(peer)

    def _unwelcome(self, origin: Origin) -> bool:
        if self._faults and self._faults[origin.peer] >= self.most_faults:
            return True
        return self._remote is not None and self._remote.is_revoked(origin.identity.name)

    def _blame(self, peer: bytes) -> None:
        """Count a fault of a peer. Once there are too many, its next message ends the connection:
        so the error that it was just sent still arrives."""
        if len(self._faults) >= _MOST_REMEMBERED and peer not in self._faults:
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


def _release(closers: list[Callable[[], None]], waker: Waker, poller: Any) -> None:
    """Give back everything that a server holds."""
    for close in closers:
        close()
    waker.close()
    if hasattr(poller, "close"):
        poller.close()
