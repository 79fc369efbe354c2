"""The serial launcher: every role is a thread of this process, for a debugger.

The same roles under the same supervisor, so a breakpoint anywhere is met, and Ctrl-C, resuming
and the end of a run are as with processes. Python runs one thread at a time: it is slow.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dreamfleet.config import RunConfig
from dreamfleet.fleet.process import Process
from dreamfleet.roles.common import Stopper

log = logging.getLogger(__name__)
_FILE = "serial.log"
_ABANDONED = -9


class RoleThread(Process):
    """A role as a thread, behind the interface the supervisor knows.

    A thread cannot be killed: one that does not end when it is asked to is left behind, and ends
    with the process.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[], Any],
        logs: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        # Not that of a process, which would pack the function: here anything may be run. Nor is
        # the environment changed, which all threads share.
        del environment
        self.name = name
        self.log_file = logs / _FILE
        self.error: BaseException | None = None
        self._function = function
        self._stopper = Stopper()
        self._ended = threading.Event()
        self._code = 0

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    @property
    def pid(self) -> int | None:
        return os.getpid()

    def start(self) -> None:
        self.error, self._stopper, self._ended = None, Stopper(), threading.Event()
        life = (self._stopper, self._ended)
        threading.Thread(target=self._live, args=life, name=self.name, daemon=True).start()

    def _live(self, stopper: Stopper, ended: threading.Event) -> None:
        code = 0
        try:
            stopper.run(self._function)
        except BaseException as error:
            log.exception("%s failed", self.name)
            code = 1
            if not ended.is_set():
                self.error = error
        if not ended.is_set():
            self._code = code
            ended.set()

    def wait(self, timeout: float | None = None) -> int | None:
        return self._code if self._ended.wait(timeout) else None

    def terminate(self) -> None:
        if self.alive:
            self._stopper.stop()

    def kill(self) -> None:
        if self.alive:
            self._code = _ABANDONED
            self._ended.set()

    def last_words(self) -> str:
        """Its traceback, if it raised."""
        if self.error is None:
            return ""
        return "".join(traceback.format_exception(self.error)).rstrip()


@contextmanager
def serial_log(args: RunConfig) -> Iterator[None]:
    """What roles log goes to a file, as it does with processes, if they share this process."""
    if args.launcher != "serial":
        yield
        return
    path = args.logdir / "logs" / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(threadName)s %(name)s: %(message)s")
    )
    root = logging.getLogger("dreamfleet")
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()
