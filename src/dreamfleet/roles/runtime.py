"""What a role gets from whoever runs it: its factories, the signal to stop, and how to find the
other roles of the run."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import cloudpickle

from dreamfleet.config import RunConfig
from dreamfleet.files import atomic_write
from dreamfleet.transport import Client
from dreamfleet.transport.address import AUTO, parse

# --- factories -----------------------------------------------------------------------------------

Factory = Callable[..., Any] | bytes
"""Makes a part in the process that needs it; as a callable, or that pickled by cloudpickle."""


def unpack(factory: Factory) -> Callable[..., Any]:
    """The callable. Bytes come from whoever started this process, never from a network."""
    if isinstance(factory, bytes):
        function: Callable[..., Any] = cloudpickle.loads(factory)
        return function
    return factory


# --- stopping ------------------------------------------------------------------------------------


class StopSignal:
    """Asks a role that runs as a thread to stop; a process is asked by SIGTERM."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def run(self, role: Callable[[], None]) -> None:
        """Run a role in this thread; its `stop_event` is the one of this signal."""
        _thread.signal = self
        try:
            role()
        finally:
            _thread.signal = None

    def stop(self) -> None:
        """Ask the role to stop; from any thread."""
        with self._lock:
            self.event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call this when the role is asked to stop, or now if it was."""
        with self._lock:
            if not self.event.is_set():
                self._callbacks.append(callback)
                return
        callback()


class _Thread(threading.local):
    signal: StopSignal | None = None


_thread = _Thread()
_process_stopped = threading.Event()


def process_was_asked_to_stop() -> bool:
    """Whether this process received the SIGTERM that `stop_event` handles."""
    return _process_stopped.is_set()


def stop_event(
    on_stop: Callable[[], None] | None = None, *, exit_process: bool = False
) -> threading.Event:
    """An event that is set when this role is asked to stop: its process by SIGTERM, its thread by
    its `StopSignal`. In any other thread nobody asks.

    Args:
        on_stop: Called when the event is set.
        exit_process: Leave the process at once, because it may be busy in somebody else's code. A
            thread cannot be left like that; see `close_when_stopped`.
    """
    if _thread.signal is not None:
        if on_stop:
            _thread.signal.on_stop(on_stop)
        return _thread.signal.event
    event = threading.Event()

    def stop(*_: Any) -> None:
        _process_stopped.set()
        event.set()
        if on_stop:
            on_stop()
        if exit_process:
            sys.exit(0)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)
    return event


def close_when_stopped(client: Client) -> None:
    """End a thread's wait for a reply with `Closed` when the role is asked to stop. In a process of
    its own the signal does."""
    if _thread.signal is not None:
        _thread.signal.on_stop(client.close)


# --- addresses -----------------------------------------------------------------------------------

RoleName = Literal["actor", "replay", "logger"]
SERVERS: tuple[RoleName, ...] = ("actor", "replay", "logger")
"""The roles that others connect to."""


def listen_address(args: RunConfig, role: RoleName) -> str:
    """Where a role listens; `{auto}` in it stands for a free port or file."""
    address: str = getattr(args, f"{role}_addr")
    return address


def publish_address(args: RunConfig, role: RoleName, address: str) -> None:
    """Let others find a server whose address is known once it listens.

    The socket file of a predecessor that was killed is removed.
    """
    if AUTO not in listen_address(args, role):
        return
    before = published_address(args.logdir, role)
    atomic_write(_address_file(args.logdir, role), address)
    if before != address:
        _remove_socket(before)


def find_server(args: RunConfig, role: RoleName) -> str | Callable[[], str]:
    """The address of a role, for a `Client`.

    An address that the settings leave open is looked up at every attempt to connect, because a
    role that was restarted may listen elsewhere.
    """
    address = listen_address(args, role)
    return partial(published_address, args.logdir, role) if AUTO in address else address


def published_address(logdir: Path, role: RoleName) -> str:
    """The newest published address of a role; empty if there is none."""
    try:
        return _address_file(logdir, role).read_text()
    except FileNotFoundError:
        return ""


def remove_addresses(logdir: Path) -> None:
    """Forget where the roles of a run listened, and remove the socket files of killed ones."""
    for role in SERVERS:
        _remove_socket(published_address(logdir, role))
        _address_file(logdir, role).unlink(missing_ok=True)
    with suppress(OSError):  # there is none
        (logdir / "addresses").rmdir()


def _remove_socket(address: str) -> None:
    if address and (parsed := parse(address)).kind != "tcp":
        parsed.path.unlink(missing_ok=True)
        with suppress(OSError):  # not ours alone
            parsed.path.parent.rmdir()


def _address_file(logdir: Path, role: RoleName) -> Path:
    return logdir / "addresses" / role
