"""The step counter, and how a run ends."""

import threading
from pathlib import Path
from typing import Any

import pytest
from fleet_parts import fixed_address, small_run

from dreamfleet.roles.logger_client import LoggerClient
from dreamfleet.roles.progress import Progress, hang_up_in_time
from dreamfleet.transport import Closed, Server


def test_enough_steps_finish_the_run() -> None:
    progress = Progress(10)
    assert progress.advance(9) == 9
    assert not progress.finished.is_set()
    assert progress.advance(3) == 12
    assert progress.finished.is_set()
    assert progress.error is None


def test_a_run_that_has_had_enough_finishes_when_it_is_restored() -> None:
    progress = Progress(10)
    progress.restore(10)
    assert progress.finished.is_set()
    endless = Progress(0)
    endless.restore(10**9)
    assert not endless.finished.is_set()


class AfterAnother:
    """A lock that another thread had first, which has counted steps."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress, self._steps = progress, steps

    def __enter__(self) -> None:
        self._progress._step, self._steps = self._progress._step + self._steps, 0

    def __exit__(self, *_: object) -> None: ...


def test_steps_that_are_counted_meanwhile_are_not_counted_twice() -> None:
    progress = Progress(20)
    progress.advance(3)
    progress._lock = AfterAnother(progress, 5)  # type: ignore[assignment]
    progress.raise_to(10)
    assert progress.step == 10
    progress.raise_to(9)
    assert progress.step == 10
    progress.raise_to(20)
    assert progress.finished.is_set()


def test_the_first_error_counts() -> None:
    progress = Progress()
    first = ValueError()
    progress.fail(first)
    progress.fail(KeyError())
    assert progress.error is first
    assert progress.finished.is_set()


class Hung:
    """A client whose server does not answer."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self, flush: float = 1.0) -> None:
        self.closed.set()

    def give_up_if_silent(self, seconds: float) -> None: ...


@pytest.mark.parametrize("how", ["stop", "fail", "wait_no_longer"])
def test_an_end_that_may_not_wait_any_longer_hangs_up(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dreamfleet.roles.progress._END_SECONDS", 0.01)
    progress, client = Progress(10), Hung()
    progress.senders.append(lambda: True)
    logger: Any = Hung()
    with hang_up_in_time(progress, logger, client):
        progress.advance(10)
        assert progress.seconds_left() == float("inf"), "a complete run waits"
        assert not progress.sent
        assert not client.closed.is_set()
        getattr(progress, how)(*[ValueError()] if how == "fail" else [])
        assert client.closed.wait(60)
        assert logger.closed.wait(60)
    assert progress.sent, "unconfirmed steps are dropped"


def test_a_complete_run_does_not_wait_for_a_logger_that_answers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dreamfleet.roles.progress._END_SECONDS", 0.05)
    monkeypatch.setattr("dreamfleet.roles.progress.POLL_SECONDS", 0.01)
    thawed, progress, replay = threading.Event(), Progress(10), Hung()
    args = small_run(tmp_path, logger_addr=fixed_address())
    server = Server(args.logger_addr, "logger")
    server.bind("add", lambda *_: thawed.wait(60))
    with server, LoggerClient(args, "learner", 2) as logger:
        with hang_up_in_time(progress, logger, replay):
            waiting = [logger.add(0, {}), logger.add(1, {})]
            progress.advance(10)
            later = logger.add(2, {})  # waits for a place
            for future in (*waiting, later, logger.add(3, {})):
                with pytest.raises(Closed):
                    future.result(60)
            assert not replay.closed.is_set(), "it waits for its replay"
        thawed.set()


def test_a_client_that_asks_nothing_of_its_answers_is_not_behind_for_good(tmp_path: Path) -> None:
    """As the supervisor's, which tells the logger of machines."""
    args = small_run(tmp_path, logger_addr=fixed_address())
    thawed = threading.Event()
    server = Server(args.logger_addr, "logger")
    server.bind("add", lambda *_: thawed.wait(60))
    with server, LoggerClient(args, "nodes", 2) as logger, LoggerClient(args, "other") as other:
        logger.add(0, {})
        assert not logger.behind
        logger.add(1, {})
        assert logger.behind
        thawed.set()
        other.add(2, {}).result(60)  # the server answers in order
        assert not logger.behind


def test_steps_are_sent_when_every_actor_has_ended() -> None:
    progress, busy = Progress(), {"own", "other"}
    progress.senders += [lambda: "own" in busy, lambda: "other" in busy]
    for name in ("own", "other"):
        assert not progress.sent
        busy.remove(name)
    assert progress.sent
