"""A process in which dreams are played, so that the server of pages neither waits nor computes.

It is started for the first dream, and ends with the last one: so all memory of the networks and
environments is given back, and an environment that crashes takes no page with it. Every session has
a thread of its own, which some renderers need.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dreamfleet.dream.dream import Dream
from dreamfleet.dream.session import Plain, Session
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.transport import Client, Server, Timeout, TransportError

log = logging.getLogger(__name__)

MOST_SESSIONS = 4
IDLE_SECONDS = 900.0
_PATIENCE = 300.0
_BUSY = float("inf")
_LOOK_SECONDS = 10.0  # between two looks for idle dreams
CLOSED = "The dream is closed, because it was idle for too long: press Start to open it again."


class _Host:
    """The sessions, in the process."""

    def __init__(self) -> None:
        self._sessions: dict[str, tuple[Session, ThreadPoolExecutor]] = {}
        # Networks are shared by the sessions that play the same checkpoint.
        self._loaded: weakref.WeakValueDictionary[str, Dream] = weakref.WeakValueDictionary()

    def open(self, name: str, path: str, trust: bool) -> Plain:
        """Load a checkpoint for a viewer; what can be chosen."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="dream")
        try:
            self._sessions[name] = pool.submit(self._load, path, trust).result(), pool
        except BaseException:
            pool.shutdown(wait=False)
            raise
        return self.call(name, "describe")

    def _load(self, path: str, trust: bool) -> Session:
        known = self._loaded.get(path)
        if known is None:
            # Pages show files of runs only, wherever somebody has made a link to.
            if any(each.is_symlink() for each in (Path(path), *list(Path(path).parents)[:2])):
                raise ConfigError("The checkpoint is a link, which is not followed.")
            known = self._loaded[path] = Dream.load(path, trust=trust)
            known.replay = tuple(each for each in known.replay if not each.is_symlink())
        return Session(known, trust=trust)

    def call(self, name: str, method: str, *args: Any) -> Plain:
        """Call a method of a session, on its thread."""
        session, pool = self._sessions.get(name, (None, None))
        if pool is None or method not in _METHODS:
            raise ConfigError(CLOSED)
        result: Plain = pool.submit(getattr(session, method), *args).result()
        return result

    def close(self, name: str) -> None:
        """End a session."""
        session, pool = self._sessions.pop(name, (None, None))
        if session is not None and pool is not None:
            pool.submit(session.close)
            pool.shutdown(wait=False)


_METHODS = ("describe", "start", "step", "go", "reset", "show")


def _answered(method: Callable[..., Any], *args: Any) -> Plain:
    """What a method returns, or what is wrong, as text for a person."""
    try:
        return {"value": method(*args)}
    except DreamfleetError as error:
        return {"error": str(error)}
    except Exception as error:  # whatever it is, the viewer is told, and the others play on
        log.exception("A dream failed.")
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Serve until the parent closes the pipe, or is gone."""
    address, workers = sys.argv[1], int(sys.argv[2])
    host = _Host()
    server = Server(address, "dreams", workers=workers)
    for name in ("open", "call", "close"):
        server.bind(name, partial(_answered, getattr(host, name)))
    with server:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()
    os._exit(0)  # whatever environments are up to


class DreamHost:
    """Starts the process when it is needed, and speaks with it; for any thread.

    Args:
        most: Dreams that are played at the same time.
        idle: Seconds without a call after which a dream is closed.
    """

    def __init__(self, most: int = MOST_SESSIONS, idle: float = IDLE_SECONDS) -> None:
        self._most, self._idle = most, idle
        self._lock = threading.Lock()
        self._used: dict[str, float] = {}  # the sessions, and since when each is idle
        self._process: subprocess.Popen[str] | None = None
        self._client: Client | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._ended = threading.Event()

    def open(self, name: str, path: Path, *, trust: bool = False) -> Plain:
        """Load a checkpoint of a run for a viewer.

        Raises:
            DreamfleetError: It cannot be loaded, or as many dreams are played as may be.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._stop()
                self._start()
            if len(self._used) >= self._most:
                raise ConfigError(
                    f"{self._most} dreams are being played, which is the most: close one of them."
                )
            self._used[name] = _BUSY
        try:
            answer: Plain = self._ask("open", name, str(path.absolute()), trust)
        except BaseException:
            self.close(name)
            raise
        if not self._rest(name):  # its page was closed meanwhile
            self._forget(name)
        return answer

    def call(self, name: str, method: str, *args: Any) -> Plain:
        """Call a method of a `Session`."""
        with self._lock:
            if name not in self._used:
                raise ConfigError(CLOSED)
            self._used[name] = _BUSY
        try:
            answer: Plain = self._ask("call", name, method, *args)
            return answer
        finally:
            self._rest(name)

    def _rest(self, name: str) -> bool:
        """A session is idle from now on; returns whether it is still open."""
        with self._lock:
            if name in self._used:
                self._used[name] = time.monotonic()
            return name in self._used

    def holds(self, name: str) -> bool:
        """Whether a session is open."""
        return name in self._used

    def close(self, name: str) -> None:
        """End a session, and the process with the last one."""
        with self._lock:
            if self._used.pop(name, None) is None:
                return
            if not self._used:
                self._stop()
                return
        self._forget(name)

    def _forget(self, name: str) -> None:
        with suppress(DreamfleetError):
            self._ask("close", name)

    def _close_idle(self, ended: threading.Event) -> None:
        """Close sessions that are not called any more, until the process has ended."""
        while not ended.wait(min(self._idle, _LOOK_SECONDS)):
            since = time.monotonic() - self._idle
            with self._lock:
                idle = [name for name, used in self._used.items() if used < since]
            for name in idle:
                self.close(name)

    def stop(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return self._process.pid if self._process else None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dreamfleet-")
        address = f"ipc://{self._folder.name}/dreams"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name, address, str(self._most + 1)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise DreamfleetError("The process for dreams did not start: look at the terminal.")
        self._client = Client(address, "dreams", patience=5.0, timeout=_PATIENCE)
        self._ended = threading.Event()
        watch = threading.Thread(
            target=self._close_idle, args=[self._ended], name="idle-dreams", daemon=True
        )
        watch.start()

    def _stop(self) -> None:
        self._ended.set()
        self._used.clear()
        if self._client is not None:
            self._client.close(flush=0)
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._folder is not None:
            self._folder.cleanup()
        self._client = self._process = self._folder = None

    def _ask(self, method: str, *args: Any) -> Any:
        client = self._client
        if client is None:
            raise DreamfleetError("The dream is closed: open it again.")
        try:
            answer = client.call(method, *args).result()
        except Timeout as error:
            raise DreamfleetError(
                f"The dream did not answer within {_PATIENCE:.0f} s: is the machine busy?"
            ) from error
        except TransportError as error:
            raise DreamfleetError(
                "The process that played the dream has ended, perhaps by a crash of the "
                f"environment: open the dream again. ({error})"
            ) from error
        if "error" in answer:
            raise DreamfleetError(answer["error"])
        return answer["value"]


if __name__ == "__main__":
    main()
