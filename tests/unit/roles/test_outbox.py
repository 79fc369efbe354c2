"""Transitions are gathered for a moment and sent in order."""

from __future__ import annotations

from typing import Any

import numpy as np

from dreamfleet.roles.outbox import Outbox, Transitions


class Answer:
    def __init__(self, value: Any) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        return self._value


class Box:
    """An outbox with a clock of its own, and what came out of it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.step = 0
        self.stored: list[tuple[list[int], list[int], bool, int]] = []
        self.logged: list[tuple[int, list[int], list[float], list[int]]] = []
        self.heard: list[Any] = []
        self.outbox = Outbox(
            self.client(self.store),
            self.client(self.log),
            lambda: self.step,
            self.heard.append,
            lambda: self.now,
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
        self.stored.append((envids.tolist(), steps["value"].tolist(), is_eval, seq))
        return len(envids)

    def log(self, method: str, step: int, envids: Any, is_eval: Any, logs: Any, frames: Any) -> str:
        assert method == "tran"
        shown = frames["image"].tolist() if frames else []
        self.logged.append((step, envids.tolist(), logs["reward"].tolist(), shown))
        return f"answer {len(self.logged)}"

    def put(
        self, ids: list[int], values: list[int], is_eval: Any = False, frame: int | None = None
    ) -> None:
        flags = np.broadcast_to(np.asarray(is_eval), len(ids)).copy()
        steps, logs = {"value": np.array(values)}, {"reward": np.array(values, float)}
        self.step += len(ids)
        self.outbox.put(
            Transitions(np.array(ids), flags, steps, logs),
            {} if frame is None else {"image": np.array([frame])},
        )


def test_batches_in_quick_succession_share_a_message_in_order() -> None:
    box = Box()
    box.put([0, 1], [10, 20])
    assert len(box.stored) == len(box.logged) == 1  # nothing to wait for
    box.put([1], [21])
    box.put([0, 1], [11, 22])
    assert len(box.stored) == 1
    box.now = 1.0
    box.put([0], [12])
    assert box.stored[1:] == [([1, 0, 1, 0], [21, 11, 22, 12], False, 2)]
    assert box.logged[1:] == [(6, [1, 0, 1, 0], [21.0, 11.0, 22.0, 12.0], [])]


def test_what_is_gathered_is_bounded() -> None:
    box = Box()
    for number in range(40):
        box.put([0], [number])
    box.outbox.flush()
    assert [value for _, values, _, _ in box.stored for value in values] == list(range(40))
    assert max(len(ids) for ids, _, _, _ in box.stored) == 16


def test_training_and_evaluation_go_to_their_own_buffers() -> None:
    box = Box()
    box.put([0], [1])
    box.put([0, 7], [2, 3], is_eval=[False, True])
    box.put([7], [4], is_eval=True)
    box.outbox.hand_over()
    assert box.stored == [
        ([0], [1], False, 1),
        ([0], [2], False, 2),
        ([7, 7], [3, 4], True, 3),
    ]


def test_a_filmed_batch_goes_alone() -> None:
    box = Box()
    box.put([0], [1])
    box.put([0, 1], [2, 3])
    box.put([0, 1], [4, 5], frame=9)
    box.put([0, 1], [6, 7], frame=8)
    assert [(ids, frames) for _, ids, _, frames in box.logged] == [
        ([0], []),
        ([0, 1], []),
        ([0, 1], [9]),
        ([0, 1], [8]),
    ]


def test_every_answer_of_the_logger_is_heard() -> None:
    box = Box()
    for number in range(5):
        box.now = float(number)
        box.put([0], [number])
    box.outbox.hand_over()
    assert box.heard == [f"answer {number}" for number in range(1, 6)]
