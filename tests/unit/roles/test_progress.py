"""The step counter, and how a run ends."""

from dreamfleet.roles.progress import Progress


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


def test_callbacks_run_once_on_learning_over_or_at_once_if_it_is() -> None:
    progress, called = Progress(), []
    progress.on_learning_over(lambda: called.append(1))
    assert called == []
    progress.end_learning()
    progress.end_learning()
    assert called == [1]
    progress.on_learning_over(lambda: called.append(2))
    assert called == [1, 2]
