"""Transitions are gathered for a moment and sent in order."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from dreamfleet.roles.camera import Camera
from dreamfleet.roles.outbox import Outbox, Transitions


class Answer:
    def __init__(self, value: Any) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        return self._value


class Box:
    """An outbox whose replay can be held up, and what came out of it."""

    def __init__(self, rows: int = 8, film: float = 0.0) -> None:
        self.go = threading.Event()
        self.go.set()
        self.reached = threading.Event()
        self.stored: list[tuple[list[int], list[int], bool, int]] = []
        self.logged: list[tuple[list[int], list[float], list[int]]] = []
        self.heard: list[Any] = []
        self.errors: list[Exception] = []
        self.outbox = Outbox(
            self.client(self.store),
            self.client(self.log),
            Camera(film),
            rows=rows,
            step=lambda: 7,
            heard=self.heard.append,
            failed=self.errors.append,
        )

    def client(self, function: Any) -> Any:
        class Client:
            def call(self, method: str, *args: Any) -> Answer:
                return Answer(function(method, *args))

        return Client()

    def store(
        self, method: str, steps: Any, envids: Any, is_eval: bool, source: str, seq: int
    ) -> int:
        assert method == "add_batch"
        self.reached.set()
        assert self.go.wait(60)
        if steps["value"][0] == "bad":
            raise OSError("the replay has gone")
        self.stored.append((envids.tolist(), steps["value"].tolist(), is_eval, seq))
        return len(envids)

    def log(self, method: str, step: int, envids: Any, is_eval: Any, logs: Any, frames: Any) -> str:
        assert (method, step) == ("tran", 7)
        shown = frames["image"][:, 0, 0, 0].tolist() if frames else []
        self.logged.append((envids.tolist(), logs["reward"].tolist(), shown))
        return f"answer {len(self.logged)}"

    def put(
        self, ids: list[int], values: list[Any], is_eval: Any = False, first: bool = False
    ) -> bool:
        size = len(ids)
        steps = {
            "value": np.array(values),
            "is_first": np.full(size, first),
            "image": np.zeros((size, 2, 2, 3), np.uint8) + np.uint8(len(self.logged)),
        }
        flags = np.broadcast_to(np.asarray(is_eval), size).copy()
        return self.outbox.put(Transitions(np.array(ids), flags, steps, {"reward": np.zeros(size)}))

    def hold_up(self) -> None:
        """Let the first batch be on its way, and stay there."""
        self.go.clear()
        self.put([9], [0])
        assert self.reached.wait(60)


def test_what_comes_together_meanwhile_shares_a_message_in_order() -> None:
    box = Box()
    box.hold_up()
    box.put([0, 1], [10, 20])
    box.put([1], [21])
    box.put([0, 1], [11, 22])
    box.go.set()
    box.outbox.hand_over(60.0)
    assert box.stored == [([9], [0], False, 1), ([0, 1, 1, 0, 1], [10, 20, 21, 11, 22], False, 2)]
    assert [ids for ids, _, _ in box.logged] == [[9], [0, 1, 1, 0, 1]]
    assert box.heard == ["answer 1", "answer 2"]


def test_a_message_and_what_waits_are_bounded() -> None:
    box = Box(rows=4)
    box.hold_up()
    for number in range(4):
        assert box.put([0], [number])
    more = threading.Thread(target=lambda: [box.put([0, 1], [n, n]) for n in range(4, 8)])
    more.start()
    more.join(0.2)
    assert more.is_alive()  # there is no room for more
    box.go.set()
    more.join(60)
    assert not more.is_alive()
    box.outbox.hand_over(60.0)
    firsts = [
        v for ids, values, _, _ in box.stored for n, v in zip(ids, values, strict=True) if not n
    ]
    assert firsts == list(range(8))
    assert max(len(ids) for ids, _, _, _ in box.stored) <= 4 + 1


def test_training_and_evaluation_go_to_their_own_buffers() -> None:
    box = Box()
    box.hold_up()
    box.put([0, 7], [2, 3], is_eval=[False, True])
    box.put([7], [4], is_eval=True)
    box.go.set()
    box.outbox.hand_over(60.0)
    assert box.stored[1:] == [([0], [2], False, 2), ([7, 7], [3, 4], True, 3)]


def test_a_filmed_batch_goes_alone() -> None:
    box = Box(rows=32, film=3600.0)
    box.hold_up()
    box.put([1, 2], [0, 0])
    box.put([0, 1], [1, 1], first=True)
    box.put([0, 2], [2, 2])
    box.put([3, 1], [3, 3])
    box.put([0, 1], [4, 4], first=True)  # the next film is due in an hour
    box.go.set()
    box.outbox.hand_over(60.0)
    shown = [(ids, len(frames)) for ids, _, frames in box.logged]
    assert shown == [([9], 0), ([1, 2], 0), ([0, 1], 1), ([0, 2], 1), ([3, 1, 0, 1], 0)]


def test_a_failure_is_told_and_nobody_waits_for_ever() -> None:
    box = Box(rows=1)
    assert box.put([0], ["bad"])
    box.outbox.hand_over(60.0)
    assert [str(error) for error in box.errors] == ["the replay has gone"]
    assert not box.put([0], ["good"])
    assert box.stored == []


@pytest.mark.parametrize("dropped", [True, False])
def test_what_comes_too_late_is_refused(dropped: bool) -> None:
    box = Box()
    box.put([0], [1])
    if dropped:
        box.outbox.drop()
    else:
        box.outbox.hand_over(60.0)
    assert not box.put([0], [2])
    assert [values for _, values, _, _ in box.stored] in ([[1]], [])
