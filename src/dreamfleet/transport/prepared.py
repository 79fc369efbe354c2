"""Messages that are alike: what they share is worked out once.

A process that was asleep finds its caches cold, and then each function that it runs costs a
microsecond or two. An environment sends blocks of one layout again and again and gets actions of
one layout back. So all but the number and the data of such messages is prepared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.transport import wire
from dreamfleet.transport.codec import Block, Schema, parse_schema
from dreamfleet.transport.errors import MessageError

FIRST_NUMBER = 1 << 32
"""Of a client's calls: from here on each number takes as many bytes in a header."""

_ID = slice(3, 11)  # in a header: behind an array's mark, the kind, and the mark of 8 bytes


class PreparedCall:
    """The header of a call with a block, for one incarnation of a server."""

    def __init__(self, block: Block, method: str, to: int) -> None:
        self._block, self._method, self._to = block, method, to
        header = wire.pack(wire.CALL, FIRST_NUMBER, block.encoded(), to, method, block.rows)[0]
        self._begin = bytes(header[: _ID.start])
        self._middle = bytes(header[_ID.stop : len(header) - len(block.blob)])

    def is_for(self, block: Block, method: str, to: int) -> bool:
        """Whether it is the header of such a call."""
        return self._block is block and self._to == to and self._method == method

    def header(self, number: int) -> bytes:
        """The header with this number, and with what the block holds now."""
        return b"".join((self._begin, number.to_bytes(8, "big"), self._middle, self._block.blob))


@dataclass(frozen=True, slots=True)
class ReplyLayout:
    """The layout of a packet whose only frame is a reply: a dict of small arrays."""

    begin: bytes
    number: slice
    middle: bytes
    blob: slice
    size: int
    schema: Schema

    @staticmethod
    def of(packet: bytes, start: int, end: int) -> ReplyLayout | None:
        """The layout of a packet with a header at this place; None if it holds something else."""
        try:
            header = wire.unpack(packet[start:end])
            schema = parse_schema(header.schema)
        except MessageError:
            return None
        if header.kind != wire.REPLY or header.id < FIRST_NUMBER or header.plain:
            return None
        if not schema.flat or schema.bools or len(header.blob) != schema.blob_size:
            return None
        number = slice(start + _ID.start, start + _ID.stop)
        blob = slice(end - schema.blob_size, end)
        begin, middle = packet[: number.start], packet[number.stop : blob.start]
        return ReplyLayout(begin, number, middle, blob, len(packet), schema)

    def read(self, packet: bytes, number: int) -> dict[str, NDArray[Any]] | None:
        """What a packet says in reply to this call; None if it has another layout."""
        mark, blob, schema = self.number, packet[self.blob], self.schema
        if (
            len(packet) != self.size
            or packet[mark] != number.to_bytes(8, "big")
            or packet[mark.stop : self.blob.start] != self.middle
            or packet[: mark.start] != self.begin
            or int.from_bytes(blob, "little") & schema.never_set
        ):
            return None
        return {
            key: np.ndarray(leaf.shape, leaf.dtype, blob, leaf.offset) for key, leaf in schema.flat
        }
