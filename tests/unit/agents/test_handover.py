"""The actor changes over to parameters that have arrived, and to no others."""

from dataclasses import dataclass

from dreamfleet.agents.dreamer.handover import HandOver, Snapshot


@dataclass(eq=False)
class Parameters:
    """Like an array that may still be on its way."""

    ready: bool

    def is_ready(self) -> bool:
        return self.ready


def offered(updates: int, ready: bool) -> Snapshot:
    return Snapshot(Parameters(ready), updates, 0.0)


def test_what_has_not_arrived_is_not_used() -> None:
    first, second = offered(0, ready=True), offered(1, ready=False)
    hand_over = HandOver(first, lambda nets: nets)
    hand_over.offer(second)
    assert hand_over.latest() is first.nets
    second.nets.ready = True
    assert hand_over.latest() is second.nets


def test_a_busy_learner_does_not_keep_the_actor_from_what_arrived() -> None:
    first, second = offered(0, ready=True), offered(1, ready=False)
    hand_over = HandOver(first, lambda nets: nets)
    hand_over.offer(second)
    second.nets.ready = True
    hand_over.offer(offered(2, ready=False))
    assert hand_over.latest() is second.nets


def test_older_parameters_never_come_back() -> None:
    hand_over = HandOver(offered(5, ready=True), lambda nets: nets)
    newest = hand_over.latest()
    hand_over.offer(offered(4, ready=True))
    assert hand_over.latest() is newest
