"""The order of what follows batches, where the timing of a server cannot be forced."""

import threading
from typing import Any

import pytest

from dreamfleet.transport import Timeout
from dreamfleet.transport.posting import PostQueue


class Queue:
    """A queue whose calls are kept, with the lock that a server would hold."""

    def __init__(self, **options: Any) -> None:
        self.lists: list[list[int]] = []
        self.lock = threading.Lock()
        self.room = 0
        settings = {"gather": 1000.0, "post_rows": 1000, "backlog": 2000, **options}
        self.queue = PostQueue(
            "Queue",
            self.lists.append,
            self.lock,
            on_error=None,
            on_room=self.on_room,
            **settings,
        )
        self.queue.start()

    def on_room(self) -> None:
        assert self.lock.locked()
        self.room += 1

    def reserve(self, *rows: int) -> list[int]:
        with self.lock:
            return [self.queue.reserve(count) for count in rows]

    def put(self, number: int, rows: int, info: list[int]) -> None:
        with self.lock:
            self.queue.put(number, rows, info)


def test_infos_keep_the_order_of_their_batches() -> None:
    queue = Queue()
    queue.reserve(1, 1, 1, 1)
    for number in (2, 1, 3, 0):
        queue.put(number, 1, [number])
    queue.queue.close(20)
    assert queue.lists == [[0, 1, 2, 3]]
    assert queue.queue.rows == 0


def test_a_batch_that_failed_is_left_out_and_holds_up_nobody() -> None:
    queue = Queue()
    queue.reserve(1, 5, 1)
    queue.put(2, 1, [2])
    queue.put(1, 5, [])
    queue.put(0, 1, [0])
    queue.queue.close(20)
    assert queue.lists == [[0, 2]]
    assert queue.queue.rows == 0


def test_a_batch_that_never_ends_does_not_hold_up_the_others_at_the_end() -> None:
    """The work of the first batch was never begun, because the server was closed."""
    queue = Queue()
    queue.reserve(1, 1, 1, 1)
    for number in (3, 1):
        queue.put(number, 1, [number])
    assert queue.lists == []
    queue.queue.close(20)
    assert queue.lists == [[1, 3]]


def test_what_comes_after_the_end_is_dropped() -> None:
    queue = Queue()
    queue.reserve(1, 1)
    queue.put(0, 1, [0])
    queue.queue.close(20)
    queue.put(1, 1, [1])
    assert queue.lists == [[0]]
    assert queue.queue.rows == 0


def test_room_is_told_once_when_the_backlog_is_full_no_longer() -> None:
    queue = Queue(post_rows=2, backlog=4)
    queue.reserve(2, 2, 2)
    with queue.lock:
        assert queue.queue.full
        for number in range(3):
            queue.queue.put(number, 2, [number])
    queue.queue.close(20)
    assert queue.lists == [[0], [1], [2]]
    assert queue.room == 1


def test_a_queue_that_was_never_started_closes_at_once() -> None:
    queue = PostQueue("Queue", print, threading.Lock(), 0.0, 1, 1, None, lambda: None)
    queue.close(20)


def test_closing_gives_up_only_when_a_call_makes_no_progress() -> None:
    """The first call ends, the second one does not."""
    started = threading.Semaphore(0)
    go_on = threading.Semaphore(0)
    lists: list[list[int]] = []

    def post(infos: list[int]) -> None:
        started.release()
        assert go_on.acquire(timeout=60)
        lists.append(infos)

    lock = threading.Lock()
    queue = PostQueue("Queue", post, lock, 0.0, 1, 100, None, lambda: None)
    queue.start()
    with lock:
        for number in range(3):
            queue.put(queue.reserve(1), 1, [number])
    problems: list[Timeout] = []

    def close() -> None:
        try:
            queue.close(1.0)
        except Timeout as problem:
            problems.append(problem)

    closer = threading.Thread(target=close)
    closer.start()
    go_on.release()
    assert started.acquire(timeout=20)
    assert started.acquire(timeout=20)
    closer.join(20)  # the second call does not end
    assert "passed nothing on for 1 s; 2 rows are dropped" in str(problems[0])
    go_on.release(2)
    queue.thread.join(20)
    assert lists == [[0], [1]]


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_no_time_drops_everything(seconds: float) -> None:
    queue = Queue()
    queue.reserve(1)
    queue.put(0, 1, [0])
    queue.queue.close(seconds)
    queue.queue.thread.join(20)
    assert queue.lists == []
    assert queue.queue.rows == 0
