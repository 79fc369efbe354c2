"""How often a process may fail."""

import pytest

from dreamfleet.fleet import FleetError
from dreamfleet.fleet.restarts import Restarts

DAY = 86_400.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_wait_doubles_up_to_half_a_minute() -> None:
    restarts = Restarts(10, 3600.0, Clock())
    waits = [restarts.after("env-0", "") for _ in range(9)]
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert restarts.after("env-1", "") == 0.5, "each process has its own count"


def test_a_crash_a_day_never_ends_a_run_and_is_always_mended_at_once() -> None:
    clock = Clock()
    restarts = Restarts(2, 3600.0, clock)
    for day in range(31):
        clock.now = day * DAY
        assert restarts.after("agent", "out of luck") == 0.5


def test_too_many_in_a_while_end_the_run_with_the_first_error_of_that_while() -> None:
    clock = Clock()
    restarts = Restarts(2, 3600.0, clock)
    restarts.after("env-0", "long ago and forgotten")
    clock.now = DAY
    restarts.after("replay", "the disk is broken")
    restarts.after("agent", "the replay is gone")
    restarts.after("agent", "the replay is gone again")
    with pytest.raises(FleetError, match="agent failed again after 2 restarts") as error:
        restarts.after("agent", "and again")
    assert "The first error was: the disk is broken" in str(error.value)
