"""What follows batches: its order, how calls share it, and what closing passes on."""

import threading
from typing import Any

import pytest

from dreamfleet.transport import Timeout
from dreamfleet.transport.posting import PostQueue


class Queue:
    """A queue whose calls are kept, with the lock that a server would hold. As many calls end as
    are allowed to."""

    def __init__(self, allowed: int = 100, **options: Any) -> None:
        self.lists: list[list[int]] = []
        self.errors: list[BaseException] = []
        self.entered, self.allowed = threading.Semaphore(0), threading.Semaphore(allowed)
        self.lock = threading.Lock()
        self.room = 0
        settings = {"gather": 1000.0, "post_rows": 1000, **options}
        self.queue = PostQueue(
            "Queue",
            self.post,
            self.lock,
            on_error=self.errors.append,
            on_room=self.on_room,
            **settings,
        )
        self.queue.start()

    def post(self, infos: list[int]) -> None:
        self.entered.release()
        assert self.allowed.acquire(timeout=60)
        if infos == [-1]:
            raise ValueError("afterwards")
        self.lists.append(infos)

    def on_room(self) -> None:
        assert self.lock.locked()
        self.room += 1

    def reserve(self, *rows: int) -> list[int]:
        with self.lock:
            return [self.queue.reserve(count) for count in rows]

    def put(self, number: int, rows: int, info: list[int]) -> None:
        with self.lock:
            self.queue.put(number, rows, info)

    def add(self, *infos: int, rows: int = 1) -> None:
        """Batches that begin and end one after the other."""
        for info in infos:
            (number,) = self.reserve(rows)
            self.put(number, rows, [info])

    def await_call(self) -> None:
        assert self.entered.acquire(timeout=60)

    def close(self, seconds: float = 60.0) -> list[list[int]]:
        self.queue.close(seconds)
        self.allowed.release(100)
        self.queue.thread.join(60)
        assert self.queue.rows == 0
        return self.lists


def test_infos_keep_the_order_of_their_batches() -> None:
    queue = Queue()
    queue.reserve(1, 5, 1, 1)
    for number, info in ((2, [2]), (1, []), (3, [3]), (0, [0])):  # the second one has failed
        queue.put(number, 5 if number == 1 else 1, info)
    assert queue.close() == [[0, 2, 3]]


def test_a_batch_that_never_ends_does_not_hold_up_the_others_at_the_end() -> None:
    """The work of the first batch was never begun, because the server was closed."""
    queue = Queue()
    queue.reserve(1, 1, 1, 1)
    for number in (3, 1):
        queue.put(number, 1, [number])
    assert queue.lists == []
    queue.queue.close(20)
    assert queue.lists == [[1, 3]]
    queue.put(0, 1, [0])  # what comes after the end is dropped
    assert queue.lists == [[1, 3]]


def test_rows_end_the_gathering() -> None:
    """The time is not over for long."""
    queue = Queue(post_rows=3)
    queue.add(1, 2)
    assert queue.lists == []
    queue.add(3)
    queue.await_call()
    queue.add(4, 5, 6, 7)
    queue.await_call()
    assert queue.close() == [[1, 2, 3], [4, 5, 6], [7]]


def test_time_ends_the_gathering() -> None:
    queue = Queue(gather=0.01, post_rows=100)
    for info in (1, 2):
        queue.add(info)
        queue.await_call()
    assert queue.close() == [[1], [2]]


def test_what_came_while_another_call_ran_shares_the_next_one_up_to_its_rows() -> None:
    """Only a single batch may have more."""
    queue = Queue(allowed=0, gather=0.0, post_rows=5)
    queue.add(0)
    queue.await_call()
    for rows in (4, 1, 2, 7, 1):
        queue.add(rows, rows=rows)
    assert queue.lists == []
    queue.allowed.release(100)
    assert queue.close() == [[0], [4, 1], [2], [7], [1]]


def test_room_is_told_once_when_the_backlog_is_full_no_longer() -> None:
    queue = Queue(post_rows=2)
    queue.reserve(2, 2, 2)
    with queue.lock:
        assert queue.queue.full
        for number in range(3):
            queue.queue.put(number, 2, [number])
    assert queue.close() == [[0], [1], [2]]
    assert queue.room == 1


def test_a_queue_that_was_never_started_closes_at_once() -> None:
    queue = PostQueue("Queue", print, threading.Lock(), 0.0, 1, None, lambda: None)
    queue.close(20)


def test_closing_gives_up_only_when_a_call_makes_no_progress() -> None:
    """The first call ends, the second one does not."""
    queue = Queue(allowed=0, gather=0.0, post_rows=1)
    queue.add(0, 1, 2)
    problems: list[Timeout] = []

    def close() -> None:
        try:
            queue.queue.close(1.0)
        except Timeout as problem:
            problems.append(problem)

    closer = threading.Thread(target=close)
    closer.start()
    queue.allowed.release()
    queue.await_call()
    queue.await_call()
    closer.join(60)
    assert "passed nothing on for 1 s; 2 rows are dropped" in str(problems[0])
    queue.allowed.release(2)
    queue.queue.thread.join(60)
    assert queue.lists == [[0], [1]]


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_no_time_drops_what_waits_and_reports_no_error_of_what_runs(
    seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A client of the call that runs may have been closed meanwhile."""
    queue = Queue(allowed=0, gather=0.0, post_rows=1)
    queue.add(-1, 1, 2)
    queue.await_call()
    assert queue.close(seconds) == []
    assert queue.errors == []
    assert "afterwards" not in caplog.text
