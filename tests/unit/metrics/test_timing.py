import sys
import threading

import numpy as np
import pytest

from dreamfleet.metrics import Timer, Usage


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_sections_are_counted_and_timed() -> None:
    time = Time()
    timer = Timer(clock=time)
    for duration in (1.0, 3.0):
        with timer.section("policy"):
            time.now += duration
    time.now += 4
    assert timer.stats() == {
        "policy/count": 2,
        "policy/total": 4,
        "policy/avg": 2,
        "policy/max": 3,
        "policy/frac": 0.5,
    }
    assert timer.stats() == {}


def test_sections_nest_and_repeat_inside_themselves() -> None:
    time = Time()
    timer = Timer(clock=time)
    with timer.section("outer"):
        time.now += 1
        with timer.section("outer"), timer.section("inner"):
            time.now += 2
    stats = timer.stats()
    assert (stats["outer/count"], stats["outer/total"], stats["inner/total"]) == (2, 5, 2)


def test_a_section_that_raises_is_timed() -> None:
    timer = Timer()
    with pytest.raises(KeyError), timer.section("failing"):
        raise KeyError
    assert timer.stats()["failing/count"] == 1


def test_threads_lose_no_count() -> None:
    timer = Timer()

    def work() -> None:
        for _ in range(5000):
            with timer.section("work"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert timer.stats()["work/count"] == 20000


def test_usage_counts_memory() -> None:
    usage = Usage()
    before = usage.stats()
    block = np.ones(50_000_000, np.uint8)
    after = usage.stats()
    assert 45e6 < after["memory"] - before["memory"] < 100e6
    assert block.all()
    assert before["threads"] >= 1
    assert before["files"] >= 3
    assert before["memory"] > 1e7
