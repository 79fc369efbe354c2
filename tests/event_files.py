"""Reads TensorBoard's event files back."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any


def events(directory: Path) -> dict[str, list[tuple[int, Any]]]:
    """Read event files back: each record is length, checksum, an event and its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data = b"".join(path.read_bytes() for path in sorted(directory.glob("events*")))
    position = 0
    found: dict[str, list[tuple[int, Any]]] = {}
    while position < len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        event = Event.FromString(data[position + 12 : position + 12 + length])
        for value in event.summary.value:
            found.setdefault(value.tag.removesuffix("/text_summary"), []).append(
                (event.step, value)
            )
        position += 12 + length + 4
    return found
