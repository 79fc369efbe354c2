"""The row every benchmark reports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One measurement, with that of a peer where there is one.

    `ratio` is ours to the peer's and above 1 is better, also where smaller values are better
    (then it is the peer's value divided by ours).
    """

    name: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    note: str = ""


def compare(
    name: str,
    value: float,
    unit: str,
    peer: str,
    peer_value: float,
    *,
    smaller_is_better: bool = False,
    note: str = "",
) -> Row:
    """A row with the ratio worked out."""
    ratio = peer_value / value if smaller_is_better else value / peer_value
    return Row(name, value, unit, peer, peer_value, ratio, note)


def rows_to_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows as what JSON can hold."""
    return [asdict(row) for row in rows]
