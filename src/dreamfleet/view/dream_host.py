"""The worker process that computes dreams, so that the server of pages neither waits nor computes.

A server has one worker for all viewers. It starts with the first dream and ends with the last, so
that all memory is freed, and an environment that crashes takes no page with it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from dreamfleet.dream.dream import Dream
from dreamfleet.dream.session import Plain, Session
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.files import temporary_folder
from dreamfleet.fleet.tied import tied
from dreamfleet.transport import Client, Server, Timeout, TransportError

log = logging.getLogger(__name__)

MAX_VIEWERS = 4
IDLE_SECONDS = 900.0
_TIMEOUT_SECONDS = 300.0
_METHODS = ("describe", "start", "step", "predict", "go", "show")


class DreamClosedError(DreamfleetError):
    """The dream no longer exists, and can be opened again."""


class DreamWorker:
    """The viewers' sessions, in the worker process. Each has a thread of its own: some renderers
    must be called from one thread."""

    def __init__(self) -> None:
        self._viewers: dict[str, tuple[ThreadPoolExecutor, Future[Session]]] = {}
        # Viewers of one checkpoint share its networks.
        self._loaded: weakref.WeakValueDictionary[str, Dream] = weakref.WeakValueDictionary()

    def open(self, name: str, path: str, trust: bool) -> Plain:
        """Load a checkpoint for a viewer; returns what can be chosen."""
        self.close(name)
        thread = ThreadPoolExecutor(1, thread_name_prefix="dream")
        self._viewers[name] = thread, thread.submit(self._load, path, trust)
        return self.call(name, "describe")

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
        """The result of a method of a viewer's session, or its error as text."""
        thread, session = self._viewers[name]
        try:
            if method not in _METHODS:
                raise ConfigError(f"A session has no method {method!r}.")
            return {"value": thread.submit(getattr(session.result(), method), *args).result()}
        except DreamfleetError as error:
            return {"error": str(error)}
        except Exception as error:  # one viewer's error must not end the others' dreams
            log.exception("A dream failed.")
            return {"error": f"{type(error).__name__}: {error}"}

    def close(self, name: str) -> None:
        """Close a viewer's dream, after what it computes."""
        if name in self._viewers:
            thread, session = self._viewers.pop(name)
            thread.submit(lambda: session.result().close())
            thread.shutdown(wait=False)


def main() -> None:
    """What the worker process does, until its parent kills it or ends."""
    worker = DreamWorker()
    server = Server(sys.argv[1], "dreams", workers=MAX_VIEWERS + 1)
    for name in ("open", "call", "close"):
        server.bind(name, getattr(worker, name))
    # Not sys.exit: an environment may hang.
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    with server:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        os.dup2(2, 1)  # what an environment prints must not fill the pipe
        threading.Event().wait()


class DreamHost:
    """Starts the worker when it is needed, and calls it; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._called: dict[str, float] = {}  # when each viewer's dream was last called
        self._resources = ExitStack()
        self._client: Client | None = None
        self.process: subprocess.Popen[str] | None = None

    def open(self, name: str, path: Path, *, trust: bool = False) -> Plain:
        """Load a checkpoint of a run for a viewer.

        Raises:
            DreamfleetError: It cannot be loaded, or too many dreams are open.
        """
        with self._lock:
            self.close_idle()
            if len(self._called.keys() - {name}) >= MAX_VIEWERS:
                raise ConfigError(f"{MAX_VIEWERS} dreams are open, which is the limit: close one.")
            if self.process is None or self.process.poll() is not None:
                self.stop()
                self._start()
            self._called[name] = time.monotonic()
        try:
            return self._ask("open", name, str(path.absolute()), trust)
        except DreamfleetError:
            self.close(name)
            raise

    def call(self, name: str, method: str, *args: Any) -> Plain:
        """Call a method of a viewer's `Session`.

        Raises:
            DreamClosedError: The dream must be opened again.
            DreamfleetError: The method failed.
        """
        return self._ask("call", name, method, *args)

    def close(self, name: str) -> None:
        """Close a viewer's dream; after the last one the worker ends."""
        with self._lock:
            if self._called.pop(name, None) is None:
                return
            if not self._called:
                self.stop()
            elif self._client is not None:
                self._client.call("close", name)

    def close_idle(self) -> None:
        """Close dreams that were not called for long."""
        with self._lock:
            oldest = time.monotonic() - IDLE_SECONDS
            for name in [name for name, at in self._called.items() if at < oldest]:
                self.close(name)

    def stop(self) -> None:
        """End the worker, and what its environments have started."""
        with self._lock:
            self._resources.close()
            self._called.clear()
            self._client = self.process = None

    def _start(self) -> None:
        address = f"ipc://{self._resources.enter_context(temporary_folder())}/dreams"
        words, pipe = tied([__spec__.name, address]), subprocess.PIPE
        process = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )
        self.process = self._resources.enter_context(process)
        self._resources.callback(_kill, process.pid)
        assert process.stdout is not None
        if not process.stdout.readline():
            raise DreamfleetError("The worker for dreams did not start: see the terminal.")
        self._client = Client(address, "dreams", patience=5.0, timeout=_TIMEOUT_SECONDS)
        self._resources.callback(self._client.close, flush=0)

    def _ask(self, method: str, name: str, *args: Any) -> Plain:
        with self._lock:
            client = self._client
            if client is None or name not in self._called:
                raise DreamClosedError("The dream was idle for too long: Start opens it again.")
            self._called[name] = time.monotonic()
        try:
            answer: Plain = client.call(method, name, *args).result()
        except Timeout as error:
            raise DreamfleetError(
                f"The dream did not answer within {_TIMEOUT_SECONDS:.0f} s: try again when the "
                "machine is less busy."
            ) from error
        except TransportError as error:
            raise DreamClosedError(
                "The worker for dreams has ended, perhaps because the environment crashed: Start "
                f"opens the dream again. ({error})"
            ) from error
        if "error" in answer:
            raise DreamfleetError(answer["error"])
        found: Plain = answer["value"]
        return found


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
