"""What the runtime knows about an agent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
Mode = Literal["train", "eval", "greedy"]
"""What actions are for; all modes but the greedy one sample them."""
Flat = dict[str, NDArray[Any] | int | float | str]
Carry = Any


@runtime_checkable
class Agent(Protocol):
    """Acts, learns, reports and can be saved.

    One object serves an actor thread (`policy`) and a learner thread (everything else) at the same
    time.

    A policy carry is a dict of numpy arrays (possibly nested) whose leading axis is the
    environment, so a server that keeps many environments' carries picks and writes rows with
    `take_rows` and `put_rows`. Train and report carries stay on the training devices and are only
    ever handed back.
    """

    def init_policy(self, n: int) -> Carry:
        """The carry of n environments that have not started."""

    def init_train(self, n: int) -> Carry:
        """The carry of n training sequences."""

    def init_report(self, n: int) -> Carry:
        """The carry of n report sequences."""

    def policy(
        self, carry: Carry, obs: Mapping[str, NDArray[Any]], mode: Mode = "train"
    ) -> tuple[Carry, Arrays, Arrays]:
        """Next carry, actions, and what to store with the step."""

    def train(self, carry: Carry, batch: Mapping[str, Any]) -> tuple[Carry, Any, Any]:
        """Next carry, outs, metrics; `outs["replay"]` goes back to the replay."""

    def report(self, carry: Carry, batch: Mapping[str, Any]) -> tuple[Carry, dict[str, Any]]:
        """Next carry, metrics that may hold images and videos."""

    def stream(self, batches: Iterable[Mapping[str, NDArray[Any]]]) -> Iterator[Mapping[str, Any]]:
        """The batches, placed on the training devices ahead of their use."""

    def save(self) -> Flat:
        """A flat dict of arrays and scalars."""

    def load(self, state: Mapping[str, Any], regex: str | None = None) -> None:
        """Take over a saved state, or the entries whose names match `regex` from the start."""


def take_rows(carry: Carry, rows: NDArray[np.integer[Any]]) -> Carry:
    """The rows of a policy carry."""
    if isinstance(carry, dict):
        return {key: take_rows(value, rows) for key, value in carry.items()}
    return carry[rows]


def put_rows(carry: Carry, rows: NDArray[np.integer[Any]], values: Carry) -> None:
    """Write rows of a policy carry in place."""
    for key, value in values.items():
        if isinstance(value, dict):
            put_rows(carry[key], rows, value)
        else:
            carry[key][rows] = value
