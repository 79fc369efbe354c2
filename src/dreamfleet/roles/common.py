"""What several roles share."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle

from dreamfleet.transport import Client

Factory = Callable[..., Any] | bytes
"""Makes a part in the process that needs it; as a callable, or that pickled by cloudpickle."""


def unpack(factory: Factory) -> Callable[..., Any]:
    """The callable. Bytes come from whoever started this process, never from a network."""
    if isinstance(factory, bytes):
        function: Callable[..., Any] = cloudpickle.loads(factory)
        return function
    return factory


class Stopper:
    """How a role that runs in a thread of somebody else's process is asked to end."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def run(self, role: Callable[[], None]) -> None:
        """Run a role in this thread; its `stop_event` is the one of this stopper."""
        _here.stopper = self
        try:
            role()
        finally:
            _here.stopper = None

    def stop(self) -> None:
        """Ask it to end; from any thread."""
        with self._lock:
            self.event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def when_stopped(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self.event.is_set():
                self._callbacks.append(callback)
                return
        callback()


class _Here(threading.local):
    stopper: Stopper | None = None


_here = _Here()


def stop_event(
    on_stop: Callable[[], None] | None = None, *, exit_process: bool = False
) -> threading.Event:
    """An event that is set when this role is asked to end: its process by SIGTERM, its thread by
    its `Stopper`. In another thread nobody asks, and whoever runs a role there ends it in its own
    way.

    Args:
        on_stop: Called when the event is set.
        exit_process: Leave at once, for a process that may be busy in somebody else's code. A
            thread cannot be left like that; see `hang_up_when_stopped`.
    """
    if _here.stopper is not None:
        if on_stop:
            _here.stopper.when_stopped(on_stop)
        return _here.stopper.event
    event = threading.Event()

    def stop(*_: Any) -> None:
        event.set()
        if on_stop:
            on_stop()
        if exit_process:
            sys.exit(0)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)
    return event


def hang_up_when_stopped(client: Client) -> None:
    """Let a thread that waits for an answer learn that it is asked to end: the wait fails with
    `Closed`. In a process of its own a signal does."""
    if _here.stopper is not None:
        _here.stopper.when_stopped(client.close)
