from collections.abc import Mapping, Sequence
from typing import Any

from dreamfleet.clock import GlobalClock, LocalClock


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_once_every_interval() -> None:
    time = Time()
    clock = LocalClock(10, now=time)
    answers = []
    for _ in range(25):
        answers.append(clock())
        time.now += 1
    assert [n for n, answer in enumerate(answers) if answer] == [10, 20]


def test_the_first_intervals_can_be_short() -> None:
    time = Time()
    clock = LocalClock(900, early=60, now=time)
    answers = []
    for _ in range(3000):
        answers.append(clock())
        time.now += 1
    assert [n for n, answer in enumerate(answers) if answer] == [60, 180, 420, 900, 1800, 2700]
    assert [LocalClock(0, early=60)() for _ in range(3)] == [False] * 3, "never is never"
    clock = LocalClock(10, early=60, now=time)
    clock()
    time.now += 10
    assert clock()


def test_the_first_call_can_be_true() -> None:
    time = Time()
    clock = LocalClock(10, first=True, now=time)
    assert clock()
    assert not clock()
    time.now += 10
    assert clock()


def test_zero_is_never_and_negative_is_always() -> None:
    never, always = LocalClock(0, first=True), LocalClock(-1)
    assert [never() for _ in range(3)] == [False] * 3
    assert [always() for _ in range(3)] == [True] * 3


def test_a_long_pause_is_answered_once() -> None:
    time = Time()
    clock = LocalClock(10, now=time)
    clock()
    time.now += 1000
    assert clock()
    assert not clock()
    time.now += 9
    assert not clock()
    time.now += 1
    assert clock()


def test_host_0_decides_whether_an_interval_has_passed() -> None:
    """All hosts do the same at the same step, whatever their clocks say."""
    times = [Time(), Time()]
    said: list[Mapping[str, Any]] = []

    def gather(mine: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        said.append(mine)
        return said

    first, second = (GlobalClock({"log": 10.0, "save": 30.0}, gather, time) for time in times)
    answers = []
    for _ in range(35):
        said.clear()
        first(steps=2, ready=True, stop=False)
        agreed = second(steps=3, ready=False, stop=True)
        answers.append((agreed.due("log"), agreed.due("save")))
        times[0].now += 1
        times[1].now += 7
    assert [n for n, (log, _) in enumerate(answers) if log] == [10, 20, 30]
    assert [n for n, (_, save) in enumerate(answers) if save] == [30]
    assert (agreed.total("steps"), agreed.all("ready"), agreed.any("stop")) == (5, False, True)


def test_one_host_decides_alone_and_may_save_before_it_is_time() -> None:
    clock = GlobalClock({"save": 30.0})
    assert not clock(save=False).due("save")
    assert clock(save=True).due("save")
    assert clock(ready=True).all("ready")
