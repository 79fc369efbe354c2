"""Writing metrics without making anybody wait for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dreamfleet.metrics import Output, Outputs

_MOST_WAITING = 256


class Writer:
    """An output that is written to by a thread of its own, in order.

    Encoding a film, a slow disk or a far-away service take their time; those who report metrics
    go on meanwhile, unless so much is waiting that it would fill the memory.
    """

    def __init__(self, output: Output) -> None:
        self._output = Outputs([output])  # which reports what fails, and goes on
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name="logger-writer", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._jobs.put(partial(self._output.write, step, metrics))

    def flush(self) -> None:
        self._jobs.put(self._output.flush)

    def close(self) -> None:
        """Write what is waiting, then close the output."""
        self._jobs.put(None)
        self._thread.join()
        self._output.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
