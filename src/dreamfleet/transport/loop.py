"""The threads of a server, which take turns at its socket.

There is one baton. The thread that holds it reads the socket; when it has read something to run,
it passes the baton on and runs it itself, then answers itself. So between the arrival of a call
and its answer no other thread has to wake up, which on most machines takes longer than the call.
Where only one job may run at a time and jobs are quick, the baton is not even passed on.

Sockets of libzmq belong to no thread, but to one at a time: every touch is under `lock`. Only the
sleep is not: it waits for the socket's descriptor, which is not a touch.
"""

from __future__ import annotations

import logging
import secrets
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from dreamfleet.transport import wire
from dreamfleet.transport.address import Address, clean_up, file_identity, parse, prepare
from dreamfleet.transport.codec import encode
from dreamfleet.transport.errors import AddressError, MessageError, SecurityError, TransportError
from dreamfleet.transport.security import Doorkeeper, Keys
from dreamfleet.transport.waker import Waker

log = logging.getLogger(__name__)

Peer = bytes
Job = Callable[[], None]
_FOREVER = float("inf")
_READER_STOPS = 5.0  # seconds, far more than it takes
_QUICK = 0.001  # seconds; a job that takes less is over before another thread is up to read


@dataclass(eq=False)
class Lane:
    """Jobs of which at most `limit` run at the same time; the others wait their turn, in order."""

    limit: int
    running: int = 0
    quick: bool = False  # the last job was
    queue: deque[Job] = field(default_factory=deque)


class Loop:
    """Receives calls, runs jobs, sends answers.

    Args:
        on_call: Takes a call, under the lock; hands what must run to `offer`.
        repeatable: Names the methods that may be called twice.
        deadline: When `on_due` wants to be called, if at all. Under the lock.
        on_due: Called under the lock at the deadline, and whenever a job has ended.
    """

    def __init__(
        self,
        address: str,
        name: str,
        keys: Keys | None,
        insecure: bool,
        on_call: Callable[[Peer, wire.Header, list[Any]], None],
        repeatable: Callable[[], list[str]],
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
        self._ready: deque[tuple[Lane, Job]] = deque()
        self._baton = threading.Lock()
        self._holder: threading.Thread | None = None  # of the baton
        self._single = False  # at most one job runs at a time
        self.threads: list[threading.Thread] = []
        self._asleep_until = -_FOREVER  # the reader is asleep until then, unless woken
        self.stopping = self._released = False
        self._waker = Waker()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._doorkeeper: Doorkeeper | None = None
        try:
            self._socket, self._address = self._bind(parse(address), keys, insecure)
        except BaseException:
            self._waker.close()
            self._context.destroy(linger=0)
            raise
        self.address = self._address.text
        self._file = file_identity(self._address)
        self._bell = select.poll()
        self._bell.register(self._waker.fileno(), select.POLLIN)
        for socket in (self._socket, *self._doorkeeper_sockets()):
            self._bell.register(socket.fileno(), select.POLLIN)

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
        socket.router_mandatory = True  # an answer that cannot be delivered is counted, not lost
        socket.linger = 1000
        socket.ipv6 = ":" in address.host
        if keys and address.kind == "tcp":
            self._doorkeeper = Doorkeeper(self._context, keys)
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

    # --- life ------------------------------------------------------------------------------------

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
        self._pass_baton()  # this may be a method that closes its own server
        # A reader stops at once; a method that holds the baton may take any time.
        if self._baton.acquire(timeout=max(timeout, _READER_STOPS)):
            self._baton.release()  # from here on nobody reads
        for thread in self.threads:
            # A method may close its server before the last thread has been started.
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    log.warning("%s is still busy after %.0f s; left behind.", thread.name, timeout)
        with self.lock:
            self._release()

    def _release(self) -> None:
        if self._released:
            return
        self._released = True
        clean_up(self._address, self._file)  # while the address is still ours
        self._socket.close()
        for socket in self._doorkeeper_sockets():
            socket.close()
        self._waker.close()
        self._context.term()

    # --- under the lock --------------------------------------------------------------------------

    def offer(self, lane: Lane, job: Job) -> None:
        """Have a job run as soon as its lane allows."""
        if lane.running < lane.limit:
            lane.running += 1
            self._ready.append((lane, job))
        else:
            lane.queue.append(job)

    def reply(self, peer: Peer, frames: list[Any]) -> None:
        """Answer a call."""
        self.counts["inflight"] -= 1
        count = self._inflight[peer] - 1
        if count > 0:
            self._inflight[peer] = count
        else:
            del self._inflight[peer]
        self.counts["replies"] += 1
        self._send(peer, frames)

    def nudge(self) -> None:
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
        try:
            wire.send(self._socket, [peer, *frames])
        except zmq.ZMQError:
            # The client has gone, or does not read its answers: its loss, nobody else's.
            self.counts["undelivered"] += 1
            return
        self.counts["bytes_out"] += sum(map(len, frames))

    # --- taking turns ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self.stopping:
            self._baton.acquire()
            self._holder = threading.current_thread()
            task = self._read()
            # While the only job that may run does, there is nothing to read for but greetings.
            while task and self._single and task[0].quick:
                task = self._perform(*task) or self._read()
            self._pass_baton()
            while task:
                task = self._perform(*task)

    def _pass_baton(self) -> None:
        """Let another thread read, if this one does."""
        if self._holder is threading.current_thread():
            self._holder = None
            self._baton.release()

    def _read(self) -> tuple[Lane, Job] | None:
        """Read until there is a job to run, or the server stops."""
        while True:
            with self.lock:
                if self.stopping:
                    return None
                try:
                    self._receive()
                except Exception:
                    log.exception("%s: reading failed.", self.name)
                if self._ready:
                    return self._ready.popleft()
                now, deadline = time.monotonic(), self._deadline()
                if deadline <= now:
                    self._on_due()
                    continue
                self._asleep_until = deadline
            self._bell.poll(None if deadline == _FOREVER else 1000 * (deadline - now))
            self._asleep_until = -_FOREVER
            self._waker.clear()

    def _perform(self, lane: Lane, job: Job) -> tuple[Lane, Job] | None:
        """Run a job; returns the next one, if there is one to run right away."""
        start = time.monotonic()
        try:
            job()
        except BaseException:
            log.exception("%s: a job failed to handle its own failure.", self.name)
        lane.quick = time.monotonic() - start < _QUICK
        with self.lock:
            if self.stopping:
                return None
            if lane.queue:
                task: tuple[Lane, Job] | None = (lane, lane.queue.popleft())
            else:
                lane.running -= 1
                self._on_due()
                task = self._ready.popleft() if self._ready else None
            self.nudge()
            return task

    def _receive(self) -> None:
        while self._doorkeeper and wire.readable(self._doorkeeper.socket):
            self.counts["refused"] += not self._doorkeeper.answer()
        while not self._ready and (message := wire.receive(self._socket)):
            peer, frames = message[0], message[1:]
            try:
                self._handle(peer, frames)
            except TransportError as problem:
                self._refuse(peer, problem)
            except Exception as problem:
                # Not meant to happen, and no reason to stop serving everyone else.
                log.exception("%s: a message could not be handled.", self.name)
                self._refuse(peer, problem)

    def _refuse(self, peer: Peer, problem: Exception) -> None:
        self.counts["malformed"] += 1
        self._send(peer, wire.pack_error(0, type(problem).__name__, str(problem)))

    def _handle(self, peer: Peer, frames: list[Any]) -> None:
        if not frames:
            raise MessageError("An empty message, or one of too many frames.")
        header = wire.unpack(frames[0])
        self.counts["bytes_in"] += sum(map(len, frames))
        if header.kind == wire.HELLO:
            self._send(peer, wire.pack(wire.WELCOME, 0, encode(self._welcome())))
            return
        if header.kind != wire.CALL or header.id <= 0 or header.rows < 0:
            raise MessageError("A server takes greetings and calls, nothing else.")
        if header.to != self._incarnation:
            self._send(peer, wire.pack(wire.STALE, header.id, encode(None)))
            return
        self.counts["requests"] += 1
        self.counts["inflight"] += 1
        self._inflight[peer] += 1
        try:
            if self._inflight[peer] > wire.MAX_INFLIGHT:
                raise MessageError(f"More than {wire.MAX_INFLIGHT} requests are in flight.")
            if self.counts["inflight"] > wire.MAX_HELD:
                raise MessageError(f"{self.name} holds {wire.MAX_HELD} requests and takes no more.")
            self._on_call(peer, header, frames[1:])
        except TransportError as problem:
            self.counts["errors"] += 1
            self.reply(peer, wire.pack_error(header.id, type(problem).__name__, str(problem)))

    def _welcome(self) -> dict[str, Any]:
        return {
            "protocol": wire.PROTOCOL,
            "name": self.name,
            "incarnation": self._incarnation,
            "limit": wire.MAX_INFLIGHT,
            "repeatable": self._repeatable(),
        }

    def _doorkeeper_sockets(self) -> list[zmq.Socket[bytes]]:
        return [self._doorkeeper.socket] if self._doorkeeper else []
