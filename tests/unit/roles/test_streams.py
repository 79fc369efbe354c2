"""Batches are asked for ahead of their use."""

from __future__ import annotations

from typing import Any

from dreamfleet.roles.streams import LOOK_AHEAD, RemoteStream


class Source:
    """Stands for a client: answers come from a list of batches, looked up when they are read."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.batches: list[dict[str, Any]] = []

    def call(self, method: str) -> Any:
        self.asked.append(method)
        number = len(self.asked) - 1
        source = self

        class Answer:
            def result(self) -> dict[str, Any]:
                return source.batches[number] if number < len(source.batches) else {}

        return Answer()


def test_batches_come_in_order_and_two_are_under_way() -> None:
    source = Source()
    source.batches = [{"number": n} for n in range(10)]
    stream = RemoteStream(source, "report")  # type: ignore[arg-type]
    assert source.asked == []
    for number in range(4):
        assert stream.take() == {"number": number}
        assert len(source.asked) == number + 1 + LOOK_AHEAD
    assert set(source.asked) == {"sample_batch_report"}


def test_without_data_there_is_no_batch_and_the_next_one_is_asked_anew() -> None:
    source = Source()
    stream = RemoteStream(source, "eval")  # type: ignore[arg-type]
    assert stream.take() is None
    asked = len(source.asked)
    source.batches = [{}] * asked + [{"fresh": 1}, {"fresh": 2}]
    assert stream.take() == {"fresh": 1}
    assert stream.take() == {"fresh": 2}
