"""Samples per insert: blocking, sentences, refusals, save and load."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dreamfleet.errors import ConfigError
from dreamfleet.replay import RateLimitedError, SamplesPerInsert


def started(ratio: float = 2.0, tolerance: float = 4.0, minsize: int = 3) -> SamplesPerInsert:
    """A limiter past its start, with nothing owed."""
    limiter = SamplesPerInsert(ratio, tolerance, minsize)
    limiter.start(minsize, 0.0)
    return limiter


def test_the_error_says_who_waits_for_how_many() -> None:
    limiter = SamplesPerInsert(0.5, 4.0, 10)
    limiter.insert(7)
    with pytest.raises(RateLimitedError) as caught:
        limiter.sample(timeout=0, who="learner 0")
    assert str(caught.value) == "learner 0 waits for the first steps: 7 of 10 were collected."

    limiter = started(ratio=0.5)
    limiter.sample(4)
    with pytest.raises(RateLimitedError) as caught:
        limiter.sample(timeout=0, who="learner")
    assert str(caught.value) == "learner is ahead of collecting and waits for 1 more step."
    limiter.insert()
    limiter.sample(timeout=0)

    limiter = started(ratio=2.0)
    limiter.insert(5)
    with pytest.raises(RateLimitedError) as caught:
        limiter.insert(timeout=0, who="actor")
    assert (
        str(caught.value)
        == "actor is ahead of training and waits until 3 more sequences are trained on."
    )
    limiter.sample(3)
    limiter.insert(timeout=0)


@pytest.mark.parametrize(
    ("ratio", "tolerance", "minsize", "words"),
    [
        (0.5, 0.0, 10, r"tolerance=0.0 with ratio=0.5 must deadlock"),
        (0.5, -3.0, 10, r"must deadlock"),
        (0.5, 4.0, 0, r"minsize=0"),
        (float("nan"), 4.0, 1, r"finite"),
        (1.0, float("inf"), 1, r"finite"),
    ],
)
def test_settings_that_cannot_work(
    ratio: float, tolerance: float, minsize: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        SamplesPerInsert(ratio, tolerance, minsize)


def test_no_limit() -> None:
    limiter = SamplesPerInsert(0, 0, 2)
    with pytest.raises(RateLimitedError):
        limiter.sample(timeout=0)
    for _ in range(100):
        limiter.insert(timeout=0)
    for _ in range(100):
        limiter.sample(100, timeout=0)


@given(
    ratio=st.floats(0.01, 20),
    tolerance=st.floats(0.01, 50),
    minsize=st.integers(1, 20),
    calls=st.lists(st.tuples(st.booleans(), st.integers(1, 8)), max_size=80),
)
def test_never_both_blocked_and_always_bounded(
    ratio: float, tolerance: float, minsize: int, calls: list[tuple[bool, int]]
) -> None:
    limiter = SamplesPerInsert(ratio, tolerance, minsize)
    for is_insert, count in calls:
        assert limiter.can_insert() or limiter.can_sample()
        try:
            (limiter.insert if is_insert else limiter.sample)(count, timeout=0)
        except RateLimitedError:
            continue
        assert limiter.avail < (tolerance + 8) * ratio or limiter.size < minsize + 8
        assert limiter.avail > -max(minsize + 1, tolerance + 8)


def test_threads_keep_the_ratio() -> None:
    """Two writers and two samplers, each blocking, none polling; all finish."""
    limiter = SamplesPerInsert(0.5, 8.0, 16)
    inserts, batch = 2000, 4

    def write() -> None:
        for _ in range(inserts):
            limiter.insert(timeout=30)

    def read() -> None:
        # 4000 inserts earn (4000 - 15) / 2 - 16 samples; give or take the tolerance, 1976 of them
        # let all threads finish.
        for _ in range(1976 // batch // 2):
            limiter.sample(batch, timeout=30)

    threads = [threading.Thread(target=target) for target in (write, write, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert limiter.size == 2 * inserts


def test_a_waiting_thread_is_woken() -> None:
    limiter = SamplesPerInsert(1.0, 4.0, 2)
    passed = threading.Event()

    def read() -> None:
        limiter.sample()
        passed.set()

    thread = threading.Thread(target=read)
    thread.start()
    limiter.insert()
    assert not passed.is_set()
    limiter.insert()
    assert passed.wait(30)
    thread.join()


def test_data_that_is_there_from_the_start_can_be_sampled_at_once() -> None:
    limiter = SamplesPerInsert(0.5, 8.0, 100)
    limiter.start(99, 0.0)
    assert not limiter.can_sample()
    limiter.start(100, 0.0)
    limiter.sample(timeout=0)
    offline = SamplesPerInsert(0, 1, 100)
    offline.start(100, 0.0)
    for _ in range(1000):
        offline.sample(timeout=0)


def test_a_limiter_that_is_finished_holds_no_inserts_back() -> None:
    limiter = SamplesPerInsert(ratio=1.0, tolerance=2.0, minsize=1, debt=0.0)
    limiter.insert(3)
    with pytest.raises(RateLimitedError):
        limiter.insert(1, timeout=0.0)
    limiter.finish(0)
    limiter.insert(5, timeout=0.0)
    assert limiter.avail == 8.0  # what is owed stays owed
    limiter.reopen()
    with pytest.raises(RateLimitedError):
        limiter.insert(1, timeout=0.0)


def test_an_end_allows_exactly_the_samples_that_are_missing() -> None:
    limiter = SamplesPerInsert(ratio=1.0, tolerance=10, minsize=1)
    limiter.insert(5)
    while limiter.can_sample():
        limiter.sample(2)
    limiter.finish(0)
    assert not limiter.can_sample(), "a run that is stopped gets no more batches"
    limiter.finish(6)
    limiter.finish(6)
    for _ in range(3):
        assert limiter.can_sample()
        limiter.sample(2)
    assert not limiter.can_sample()
