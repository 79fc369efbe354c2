"""The worker process that computes dreams, so that the server of pages neither waits nor computes.

A server has one worker for all viewers. It starts with the first dream and exits with the last, so
that all memory is freed, and an environment that crashes takes no page with it.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from dreamfleet.dream.dream import Dream
from dreamfleet.dream.session import Plain, Session
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.transport import Client, Server, Timeout, TransportError

log = logging.getLogger(__name__)

MAX_VIEWERS = 4
IDLE_SECONDS = 900.0
CLOSED = "The dream is closed, because it was idle for too long: press Start to open it again."
_TIMEOUT_SECONDS = 300.0
_CHECK_SECONDS = 5.0
_EXIT_SECONDS = 30.0
_METHODS = ("describe", "start", "step", "predict", "go", "reset", "show")


class _Viewer:
    """A session and its thread: some renderers must be called from one thread."""

    def __init__(self, load: Callable[[], Session]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dream")
        self._calls = 0
        self._used = time.monotonic()
        self._session = self._thread.submit(load)

    def call(self, method: str, *args: Any) -> Plain:
        self._calls += 1
        try:
            session = self._session.result()
            result: Plain = self._thread.submit(getattr(session, method), *args).result()
            return result
        finally:
            self._calls -= 1
            self._used = time.monotonic()

    def is_idle(self, seconds: float) -> bool:
        return not self._calls and self._used < time.monotonic() - seconds

    def close(self) -> None:
        self._thread.submit(lambda: self._session.result().close())
        self._thread.shutdown(wait=False)


class DreamWorker:
    """The viewers' sessions, in the worker process.

    Args:
        max_viewers: Dreams at the same time.
        idle_seconds: A dream without a call for so long is closed.
    """

    def __init__(self, max_viewers: int, idle_seconds: float) -> None:
        self._max, self._idle = max_viewers, idle_seconds
        self._closed = math.inf
        self._lock = threading.Lock()
        self._viewers: dict[str, _Viewer] = {}
        # Viewers of one checkpoint share its networks.
        self._loaded: weakref.WeakValueDictionary[str, Dream] = weakref.WeakValueDictionary()

    def open(self, name: str, path: str, trust: bool) -> Plain:
        """Load a checkpoint for a viewer; returns what can be chosen."""
        with self._lock:
            if len(self._viewers.keys() - {name}) >= self._max:
                raise ConfigError(f"{self._max} dreams are open, which is the limit: close one.")
            old = self._viewers.get(name)
            viewer = self._viewers[name] = _Viewer(partial(self._load, path, trust))
        if old is not None:
            old.close()
        try:
            return viewer.call("describe")
        except BaseException:
            self.close(name)
            raise

    def _load(self, path: str, trust: bool) -> Session:
        known = self._loaded.get(path)
        if known is None:
            # Pages show files of runs only.
            if any(each.is_symlink() for each in (Path(path), *list(Path(path).parents)[:2])):
                raise ConfigError("The checkpoint is a link, and links are not followed.")
            known = self._loaded[path] = Dream.load(path, trust=trust)
            known.replay = tuple(each for each in known.replay if not each.is_symlink())
        return Session(known, trust=trust)

    def call(self, name: str, method: str, *args: Any) -> Plain:
        """Call a method of a viewer's session."""
        viewer = self._viewers.get(name)
        if viewer is None or method not in _METHODS:
            raise ConfigError(CLOSED)
        return viewer.call(method, *args)

    def close(self, name: str) -> None:
        """Close a viewer's dream."""
        with self._lock:
            viewer = self._viewers.pop(name, None)
            self._closed = time.monotonic()
        if viewer is not None:
            viewer.close()

    def free_memory(self) -> None:
        """Close idle dreams, and exit after the last one."""
        for name, viewer in list(self._viewers.items()):
            if viewer.is_idle(self._idle):
                self.close(name)
        with self._lock:
            unused = time.monotonic() - self._closed
            if not self._viewers and unused > min(self._idle, _EXIT_SECONDS):
                os._exit(0)  # not sys.exit: an environment may hang


def _answer(method: Callable[..., Any], *args: Any) -> Plain:
    """The result of a method, or its error as text."""
    try:
        return {"value": method(*args)}
    except DreamfleetError as error:
        return {"error": str(error)}
    except Exception as error:  # one viewer's error must not end the others' dreams
        log.exception("A dream failed.")
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Serve until all dreams are closed, or the parent closes the pipe or dies."""
    address, viewers, idle = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    worker = DreamWorker(viewers, idle)
    server = Server(address, "dreams", workers=viewers + 1)
    for name in ("open", "call", "close"):
        server.bind(name, partial(_answer, getattr(worker, name)))

    def free_memory() -> None:
        while True:
            time.sleep(min(idle, _CHECK_SECONDS))
            worker.free_memory()

    threading.Thread(target=free_memory, name="idle-dreams", daemon=True).start()
    with server:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()
    os._exit(0)


class DreamHost:
    """Starts the worker when it is needed, and calls it; from any thread.

    Args:
        max_viewers: Dreams at the same time.
        idle_seconds: A dream without a call for so long is closed.
    """

    def __init__(self, max_viewers: int = MAX_VIEWERS, idle_seconds: float = IDLE_SECONDS) -> None:
        self._arguments = (str(max_viewers), str(idle_seconds))
        self._lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None
        self._client: Client | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def open(self, name: str, path: Path, *, trust: bool = False) -> Plain:
        """Load a checkpoint of a run for a viewer.

        Raises:
            DreamfleetError: It cannot be loaded, or too many dreams are open.
        """
        self._ensure_started()
        try:
            return self._ask("open", name, str(path.absolute()), trust)
        except DreamfleetError:
            if self.process is None or self.process.poll() != 0:
                raise
        self._ensure_started()  # it was exiting
        return self._ask("open", name, str(path.absolute()), trust)

    def _ensure_started(self) -> None:
        with self._lock:
            if self.process is None or self.process.poll() is not None:
                self._stop()
                self._start()

    def call(self, name: str, method: str, *args: Any) -> Plain:
        """Call a method of a viewer's `Session`."""
        return self._ask("call", name, method, *args)

    def close(self, name: str) -> None:
        """Close a viewer's dream, without waiting."""
        client = self._client
        if client is not None and self.process is not None and self.process.poll() is None:
            client.call("close", name)

    def stop(self) -> None:
        """End the worker."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dreamfleet-")
        address = f"ipc://{self._folder.name}/dreams"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name, address, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise DreamfleetError("The worker for dreams did not start: see the terminal.")
        self._client = Client(address, "dreams", patience=5.0, timeout=_TIMEOUT_SECONDS)

    def _stop(self) -> None:
        if self._client is not None:
            self._client.close(flush=0)
        if self.process is not None:
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self._folder is not None:
            self._folder.cleanup()
        self._client = self.process = self._folder = None

    def _ask(self, method: str, *args: Any) -> Plain:
        client, process = self._client, self.process
        if client is None or process is None:
            raise DreamfleetError(CLOSED)
        try:
            answer = client.call(method, *args).result()
        except Timeout as error:
            raise DreamfleetError(
                f"The dream did not answer within {_TIMEOUT_SECONDS:.0f} s: is the machine busy?"
            ) from error
        except TransportError as error:
            if process.poll() == 0:  # it was idle
                raise DreamfleetError(CLOSED) from error
            raise DreamfleetError(
                "The worker for dreams has died, perhaps because the environment crashed: open "
                f"the dream again. ({error})"
            ) from error
        if "error" in answer:
            raise DreamfleetError(answer["error"])
        found: Plain = answer["value"]
        return found


if __name__ == "__main__":
    main()
