import threading

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


class Hosts:
    """A broadcast between threads: everybody gets what host 0 brought."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.value = False

    def of(self, host: int):
        def broadcast(answer: bool) -> bool:
            if host == 0:
                self.value = answer
            self.barrier.wait(10)
            value = self.value
            self.barrier.wait(10)
            return value

        return broadcast


def test_hosts_with_different_clocks_agree() -> None:
    hosts = Hosts(3)
    answers: dict[int, list[bool]] = {}

    def run(host: int) -> None:
        time = Time()
        clock = GlobalClock(10, broadcast=hosts.of(host), now=time)
        answers[host] = []
        for _ in range(40):
            answers[host].append(clock())
            time.now += 1 + host * 0.7

    threads = [threading.Thread(target=run, args=(host,)) for host in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers[0] == answers[1] == answers[2]
    assert [n for n, answer in enumerate(answers[0]) if answer] == [10, 20, 30]


@pytest.mark.parametrize("every", [0, -1])
def test_what_is_known_is_not_asked_for(every: float) -> None:
    def broadcast(answer: bool) -> bool:
        raise AssertionError("a round trip for nothing")

    assert GlobalClock(every, broadcast=broadcast)() == (every < 0)
