"""What a world model has predicted of numbers, as a file."""

from __future__ import annotations

import msgspec


class Prediction(msgspec.Struct, frozen=True):
    """Truth and prediction of one stored episode."""

    step: int
    """Training steps of the checkpoint."""
    observed: int
    """Steps that the model has observed; it has predicted those that follow."""
    truth: dict[str, list[list[float]]]
    """Of each key the values of each step."""
    predicted: dict[str, list[list[float]]]
    """The same from the last observed step on."""
