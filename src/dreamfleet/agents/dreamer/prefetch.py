"""Batches prepared by a thread while the previous one is in use."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class _Failure:
    error: BaseException


_END = object()


def prefetch(items: Iterable[Any], prepare: Callable[[Any], Item], depth: int) -> Iterator[Item]:
    """prepare(item) for every item, up to `depth` ahead; errors surface where they would have.

    Closing the iterator (or dropping it) ends the thread.
    """
    ready: queue.Queue[Any] = queue.Queue()
    room = threading.Semaphore(depth)
    closed = threading.Event()

    def work() -> None:
        try:
            iterator = iter(items)
            while True:
                room.acquire()
                if closed.is_set():
                    return
                ready.put(prepare(next(iterator)))
        except StopIteration:
            ready.put(_END)
        except BaseException as error:
            ready.put(_Failure(error))

    threading.Thread(target=work, name="prefetch", daemon=True).start()
    try:
        while (item := ready.get()) is not _END:
            if isinstance(item, _Failure):
                raise item.error
            room.release()
            yield item
    finally:
        closed.set()
        room.release()
