"""The actor uses published parameters that have arrived, and no others."""

from dataclasses import dataclass

from dreamfleet.agents.dreamer.acting import Publisher, Snapshot


@dataclass(eq=False)
class Parameters:
    """Like an array that may still be on its way."""

    ready: bool

    def is_ready(self) -> bool:
        return self.ready

    def block_until_ready(self) -> None:
        self.ready = True


def snapshot(updates: int, ready: bool) -> Snapshot:
    return Snapshot(Parameters(ready), updates, 0.0)


def test_what_has_not_arrived_is_not_used() -> None:
    first, second = snapshot(0, ready=True), snapshot(1, ready=False)
    publisher = Publisher(first, lambda nets: nets)
    publisher.publish(second)
    assert publisher.latest() is first.nets
    second.nets.ready = True
    assert publisher.latest() is second.nets


def test_a_busy_learner_does_not_keep_the_actor_from_what_arrived() -> None:
    first, second = snapshot(0, ready=True), snapshot(1, ready=False)
    publisher = Publisher(first, lambda nets: nets)
    publisher.publish(second)
    second.nets.ready = True
    publisher.publish(snapshot(2, ready=False))
    assert publisher.latest() is second.nets


def test_older_parameters_never_come_back() -> None:
    publisher = Publisher(snapshot(5, ready=True), lambda nets: nets)
    newest = publisher.latest()
    publisher.publish(snapshot(4, ready=True))
    assert publisher.latest() is newest


def test_who_waits_has_the_newest() -> None:
    first, second = snapshot(0, ready=True), snapshot(1, ready=False)
    publisher = Publisher(first, lambda nets: nets)
    publisher.publish(second)
    publisher.wait()
    assert publisher.latest() is second.nets
