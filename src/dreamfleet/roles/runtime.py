"""What a role gets from outside: its factories, and the signal to stop."""

from __future__ import annotations

import faulthandler
import inspect
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle

from dreamfleet.clock import LocalClock
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.transport import Disconnected

log = logging.getLogger(__name__)


class ActorFailed(DreamfleetError):
    """The policy failed, or what follows it; the agent process ends because of it."""


# --- factories -----------------------------------------------------------------------------------

Factory = Callable[..., Any] | bytes
"""Makes a part in the process that needs it; as a callable, or that pickled by cloudpickle."""


@dataclass(frozen=True)
class Factories:
    """What makes the parts of a run, each in the process that needs it."""

    make_agent: Factory
    """Returns the agent."""
    make_replay_train: Factory
    make_replay_eval: Factory
    """Return the buffers."""
    make_env_train: Factory
    make_env_eval: Factory
    """Called with an environment's id."""
    make_stream: Factory
    """Called with a buffer and a mode, returns an iterator of batches."""
    make_logger: Factory
    """Returns the output of metrics."""


def unpack(factory: Factory) -> Callable[..., Any]:
    """The callable. Bytes come from the parent process, never from a network."""
    if isinstance(factory, bytes):
        function: Callable[..., Any] = cloudpickle.loads(factory)
        return function
    return factory


def pickled(who: str, function: Callable[..., Any]) -> bytes:
    """A function as it is sent to another process."""
    try:
        data: bytes = cloudpickle.dumps(function)
        return data
    except Exception as error:  # whatever an object of the user's raises
        raise ConfigError(
            f"The code of {who} cannot be sent to its process ({error}): create objects that "
            "cannot be pickled in the constructor, or put the code into a module and name it, "
            "module:name."
        ) from error


def takes(function: Callable[..., Any], argument: str) -> bool:
    """Whether a function has an argument of this name."""
    with suppress(TypeError, ValueError):  # some callables have no signature
        return argument in inspect.signature(function).parameters
    return False


# --- waiting -------------------------------------------------------------------------------------

POLL_SECONDS = 0.5
"""Between two looks at what tells nothing by itself."""
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0
"""Seconds before something that has failed twice is tried again; doubled each time."""
_FIRST_TIMEOUT, _SAY_SECONDS = 3600.0, 30.0


def backoff(failures: int) -> float:
    """Seconds before something is tried again that had so many failures before this one."""
    return min(FIRST_DELAY * 2.0 ** (failures - 1), LONGEST_DELAY) if failures else 0.0


def await_server(
    connect: Callable[[float], None], what: str, over: Callable[[], bool] = lambda: False
) -> None:
    """Wait for a server that may be started later, and say now and then why it is not there.

    Args:
        connect: Of its client; waits so many seconds at most.
        what: Its name, in the log.
        over: Whether to wait no longer.

    Raises:
        Disconnected: It was not there for an hour, or is not when the wait is `over`.
    """
    deadline, should_say = time.monotonic() + _FIRST_TIMEOUT, LocalClock(_SAY_SECONDS)
    should_say()
    while True:
        try:
            return connect(POLL_SECONDS)
        except Disconnected as error:
            if over():
                raise
            if time.monotonic() >= deadline:
                more = f"It did not come in {_FIRST_TIMEOUT:g} s: start {what} first."
                raise Disconnected(f"{error} {more}") from None
            if should_say():
                log.warning("%s Still waiting for %s.", error, what)


# --- stopping ------------------------------------------------------------------------------------


class StopSignal:
    """Asks a role to stop: a thread, or a process that has got a signal."""

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


STOPPED = 143
"""Exit code of a process that stopped because it was asked to, as shells have it of SIGTERM."""

STOP_SIGNAL = signal.SIGUSR2
"""What asks a process that has a supervisor to stop."""
_OURS = (signal.SIGTERM, signal.SIGHUP, STOP_SIGNAL)
_FOLLOW_SECONDS = 10.0  # longer than an agent that is stopped waits for others
_DUMP_SECONDS = 18.0

_thread = _Thread()
_process_stopped = StopSignal()
_stop_signal = signal.SIGTERM


def end_signals() -> list[signal.Signals]:
    """The signals that end a run, or a role of it, in order. SIGHUP, of a terminal that was closed,
    stays ignored if it was: `nohup` does that."""
    hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangup else [])]


class _Signals:
    """Calls a function when this process gets a signal for the first time, on a thread of its own.

    Python runs handlers on the main thread, once that is awake. But a signal that comes while the
    process is stopped, or right after another one, may be taken by any thread, which wakes no
    other: the main thread may sleep on for ever. So the interpreter writes every signal to a pipe,
    on whichever thread takes it. A process that is forked from this one is no part of this.
    """

    def __init__(self) -> None:
        self._functions: dict[int, Callable[[], None]] = {}
        self._to_exit: set[int] = set()
        self._reader, self._writer = -1, -1
        self.leaving = False
        """Whether a signal has come that leaves `user_code`."""
        self.in_user_code = False

    def on(self, number: int, function: Callable[[], None], *, exit_process: bool = False) -> None:
        """Call a function at this signal.

        Args:
            number: The signal.
            function: Called once.
            exit_process: Raise SystemExit in the main thread, too, in `user_code`. Elsewhere it
                might hold a lock, which would never be released.
        """
        self._functions[number] = function
        if exit_process:
            self._to_exit.add(number)
        if self._writer < 0:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            threading.Thread(target=self._run, name="signals", daemon=True).start()
            # What comes in between would be written to the pipe by the new process.
            block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, _OURS)
            let_in = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, _OURS)
            os.register_at_fork(before=block, after_in_parent=let_in, after_in_child=self._forget)
        signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: Any) -> None:
        with suppress(OSError):  # also if other code took the place of the pipe
            os.write(self._writer, bytes([number]))
        if number in self._to_exit:
            self._to_exit.discard(number)  # what it ends must not be ended a second time
            self.leaving = True
            if self.in_user_code:
                sys.exit(0)

    def _run(self) -> None:
        while True:
            [number] = os.read(self._reader, 1)
            if function := self._functions.pop(number, None):
                function()
                if number in self._to_exit:  # in case the main thread has slept through it
                    signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _forget(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in _OURS:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)


_signals = _Signals()


class _UserCode:
    """A block that calls the user's code, which may take any time: a process that is asked to
    stop leaves it at once, if its `stop_event` says so."""

    def __enter__(self) -> None:
        _signals.in_user_code = True
        if _signals.leaving:
            sys.exit(0)

    def __exit__(self, *error: object) -> None:
        _signals.in_user_code = False


user_code = _UserCode()


def obey_supervisor() -> None:
    """Let this process be stopped by `STOP_SIGNAL` from now on.

    Slurm and systemd send SIGTERM to all processes of a job at once, and SIGHUP when its session
    ends. The supervisor has it too and stops them in the right order; a replay that followed it
    would be gone when the agent saves. So these signals are followed after a while.
    """
    global _stop_signal
    _stop_signal = STOP_SIGNAL

    def follow() -> None:
        timer = threading.Timer(_FOLLOW_SECONDS, os.kill, (os.getpid(), STOP_SIGNAL))
        timer.daemon = True
        timer.start()

    for each in end_signals():
        if each != signal.SIGINT:
            _signals.on(each, follow)


def process_was_asked_to_stop() -> bool:
    """Whether this process received the signal that `stop_event` handles."""
    return _process_stopped.event.is_set()


def stop_event(
    on_stop: Callable[[], None] | None = None, *, exit_process: bool = False
) -> threading.Event:
    """An event that is set when this role is asked to stop: its process by SIGTERM, or by
    `STOP_SIGNAL` if it has a supervisor, its thread by its `StopSignal`. In any other thread it is
    never set.

    Args:
        on_stop: Called when the event is set.
        exit_process: Leave `user_code` at once, by SystemExit. A thread cannot be left like that.
    """
    asked = _thread.signal
    if asked is None:
        if threading.current_thread() is not threading.main_thread():
            return threading.Event()
        asked = _process_stopped
        _signals.on(_stop_signal, _stop_process, exit_process=exit_process)
    if on_stop:
        asked.on_stop(on_stop)
    return asked.event


def _stop_process() -> None:
    _process_stopped.stop()
    if _stop_signal == STOP_SIGNAL:
        with suppress(RuntimeError):  # no memory for another thread
            _say_where()


_timer = threading.Lock()  # of faulthandler, which has one
_says_where = False


def _say_where() -> None:
    """Have the log tell where this process is, if it does not end in time: it is about to be killed
    then. The timer is for nothing else from here on."""
    global _says_where
    with _timer:
        _says_where = True
        faulthandler.dump_traceback_later(_DUMP_SECONDS)


def end_process_after(seconds: float) -> None:
    """End this process after so many seconds, with its tracebacks in the log; 0 for never. Called
    again, it counts from there."""
    with _timer:
        if _says_where:
            return
        if seconds:
            faulthandler.dump_traceback_later(seconds, exit=True)
        else:
            faulthandler.cancel_dump_traceback_later()


@contextmanager
def on_end_signal(handle: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle the signals that end a run, while the block runs in the main thread."""
    main = threading.current_thread() is threading.main_thread()
    old = {each: signal.signal(each, handle) for each in end_signals()} if main else {}
    try:
        yield
    finally:
        for each, handler in old.items():
            signal.signal(each, handler)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does. Ctrl-C and SIGTERM do although others
    ignored them before."""

    def interrupt(number: int, frame: Any) -> None:
        if number == signal.SIGHUP:  # the shell sends one too
            signal.signal(number, signal.SIG_IGN)
        signal.default_int_handler(number, frame)

    with on_end_signal(interrupt):
        yield


def when_stopped(callback: Callable[[], None]) -> None:
    """Call this, too, when the role is asked to stop, or now if it was."""
    (_thread.signal or _process_stopped).on_stop(callback)
