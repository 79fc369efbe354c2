"""What counts as growth."""

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from benchmarks.soak import KINDS, Series, Soak, usage

FLAT = {"memory": 200.0, "files": 20, "sockets": 10, "threads": 5}


def seen(**changes: Callable[[float], float]) -> Soak:
    """An hour in which some things changed: functions of the part that has passed."""
    series = Series()
    for minute in range(60):
        part = minute / 60
        more = {kind: change(part) for kind, change in changes.items()}
        noise = {"memory": float(minute % 3)}
        series.add(
            60.0 * minute,
            {kind: FLAT[kind] + noise.get(kind, 0) + more.get(kind, 0) for kind in KINDS},
        )
    return Soak(3600.0, processes={"agent": series})


def test_what_only_varies_is_flat() -> None:
    assert list(seen().grown()) == []


def test_what_grows_at_first_is_flat() -> None:
    assert list(seen(memory=lambda part: min(1000, 8000 * part)).grown()) == []


@pytest.mark.parametrize(
    ("kind", "in_the_hour"), [("memory", 20.0), ("files", 4), ("sockets", 4), ("threads", 2)]
)
def test_what_grows_all_the_time_is_told(kind: str, in_the_hour: float) -> None:
    (told,) = seen(**{kind: lambda part: in_the_hour * part}).grown()
    assert told.startswith(f"{kind} of agent: +")


def test_a_process_that_was_restarted_is_told() -> None:
    found = seen()
    found.restarts = 1
    (told,) = found.grown()
    assert "restarted" in told


def test_a_process_with_few_samples_is_told() -> None:
    found = seen()
    found.processes["env-0"] = Series([0.0], [1.0], [1], [1], [1])
    (told,) = found.grown()
    assert "env-0 has 1 samples" in told


def test_usage_is_that_of_the_process() -> None:
    with ExitStack() as stack:
        before = usage(os.getpid())
        for _ in range(5):
            stack.enter_context(socket.socket())
        assert usage(os.getpid())["sockets"] == before["sockets"] + 5
        assert before["memory"] > 10
    assert usage(2**22 + 1) == {}
