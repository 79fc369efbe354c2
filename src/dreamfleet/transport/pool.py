"""Worker threads that take jobs from a queue."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

log = logging.getLogger(__name__)

Job = Callable[[], None]


class Pool:
    """Runs jobs, in order with one worker. Jobs handle their own errors."""

    def __init__(self, name: str, workers: int) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True)
            for index in range(workers)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self, timeout: float = 5.0) -> None:
        """Finish what was put, and wait a while for jobs that run long."""
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    log.warning("%s is still busy after %.0f s; left behind.", thread.name, timeout)

    def _work(self) -> None:
        while job := self._jobs.get():
            job()
