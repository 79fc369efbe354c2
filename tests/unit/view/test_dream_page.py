"""What a dream starts from, and which keys play it."""

from __future__ import annotations

import pytest

pytest.importorskip("nicegui")

from dreamfleet.view.dream_page import keys_of


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["left", "stay", "right"], "left right - stay"),
        (["noop", "move_left", "move_right", "move_up", "move_down", "do"], "1 2 3 4"),
        (["noop", "fire", "up", "right", "left", "down", "upleft"], "left right up down"),
        (["turn left", "left", "forward"], "left - forward -"),
        (["a", "b"], "- - - -"),
    ],
)
def test_arrows_stand_for_what_they_point_to(names: list[str], expected: str) -> None:
    keys = keys_of(names, len(names))
    arrows = [keys.get(f"Arrow{each}") for each in ("Left", "Right", "Up", "Down")]
    found = ["-" if n is None else str(n) if names[n] not in expected else names[n] for n in arrows]
    assert " ".join(found) == expected
    assert [keys[str(n + 1)] for n in range(len(names))] == list(range(len(names)))


def test_without_names_the_first_and_the_last_choice_are_left_and_right() -> None:
    assert keys_of([], 2) == {"1": 0, "2": 1, "ArrowLeft": 0, "ArrowRight": 1}
    assert keys_of([], 3)["ArrowDown"] == 1
    assert "ArrowLeft" not in keys_of([], 18)
    assert max(keys_of([], 1000).values()) == 34  # as many as there are keys
