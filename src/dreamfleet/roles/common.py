"""What several roles share."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle

Factory = Callable[..., Any] | bytes
"""Makes a part in the process that needs it; as a callable, or that pickled by cloudpickle."""


def unpack(factory: Factory) -> Callable[..., Any]:
    """The callable. Bytes come from whoever started this process, never from a network."""
    if isinstance(factory, bytes):
        function: Callable[..., Any] = cloudpickle.loads(factory)
        return function
    return factory


def stop_event(on_stop: Callable[[], None] | None = None) -> threading.Event:
    """An event that is set when this process is asked to end (SIGTERM).

    In a thread other than the main one signals cannot be caught; whoever runs a role there ends
    it in its own way.
    """
    event = threading.Event()

    def stop(*_: Any) -> None:
        event.set()
        if on_stop:
            on_stop()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)
    return event
