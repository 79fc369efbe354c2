import pytest

from dreamfleet.clock import GlobalClock, LocalClock


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=[LocalClock, GlobalClock])
def kind(request: pytest.FixtureRequest) -> type:
    return request.param


def test_once_every_interval(kind: type) -> None:
    time = Time()
    clock = kind(10, now=time)
    answers = []
    for _ in range(25):
        answers.append(clock())
        time.now += 1
    assert [n for n, answer in enumerate(answers) if answer] == [10, 20]


def test_the_first_call_can_be_true(kind: type) -> None:
    time = Time()
    clock = kind(10, first=True, now=time)
    assert clock()
    assert not clock()
    time.now += 10
    assert clock()


def test_zero_is_never_and_negative_is_always(kind: type) -> None:
    never, always = kind(0, first=True), kind(-1)
    assert [never() for _ in range(3)] == [False] * 3
    assert [always() for _ in range(3)] == [True] * 3


def test_a_long_pause_is_answered_once(kind: type) -> None:
    time = Time()
    clock = kind(10, now=time)
    clock()
    time.now += 1000
    assert clock()
    assert not clock()
    time.now += 9
    assert not clock()
    time.now += 1
    assert clock()
