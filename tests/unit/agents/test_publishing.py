"""The actor uses published parameters that have arrived, and no others."""

import threading
from typing import Any

import pytest

from dreamfleet.agents.dreamer.runtime.publishing import Publisher, Snapshot


class Road:
    """Parameters come this way, as soon as they may."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.travelled: list[tuple[Any, str]] = []

    def bring(self, nets: Any) -> Any:
        assert self.open.wait(120)
        self.travelled.append((nets, threading.current_thread().name))
        return nets


def publisher_on(road: Road) -> Publisher:
    return Publisher(Snapshot("first", 0, 0.0), road.bring)


def test_the_learner_does_not_wait_and_the_actor_keeps_what_it_has() -> None:
    road = Road()
    publisher = publisher_on(road)
    road.open.clear()
    publisher.publish(Snapshot("second", 1, 0.0))
    publisher.count(3)
    assert publisher.busy
    assert publisher.newest() == "first"
    assert publisher.age()[0] == 3
    road.open.set()
    publisher.wait()
    assert not publisher.busy
    assert publisher.newest() == "second"
    assert publisher.age()[0] == 2
    (_, mine), (_, others) = road.travelled
    assert mine == threading.current_thread().name != others


def test_the_same_parameters_are_brought_once_and_older_ones_never() -> None:
    road = Road()
    publisher = Publisher(Snapshot("first", 5, 0.0), road.bring)
    for updates in (5, 4):
        publisher.publish(Snapshot("again", updates, 0.0))
        publisher.wait()
    assert publisher.newest() == "first"
    assert publisher.published == 5
    assert [nets for nets, _ in road.travelled] == ["first"]


def test_what_went_wrong_on_the_way_is_told_to_the_learner() -> None:
    def bring(nets: str) -> str:
        if nets == "second":
            raise OSError("the device is gone")
        return nets

    publisher = Publisher(Snapshot("first", 0, 0.0), bring)
    publisher.publish(Snapshot("second", 1, 0.0))
    with pytest.raises(OSError, match="the device is gone"):
        publisher.wait()
    assert publisher.newest() == "first"
