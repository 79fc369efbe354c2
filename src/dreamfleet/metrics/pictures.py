"""PNG and GIF with the standard library and numpy, so that frames can always be shown.

Both encoders favour being short and quick over small files: PNG without filters, GIF with a fixed
palette and without its dictionary compression.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Levels of red, green and blue in the GIF palette: 6 * 7 * 6 = 252 colours. The eye is keenest
# on green.
_LEVELS = (6, 7, 6)
# A decoder that is told to start over before its dictionary grows past 9 bits reads plain 9-bit
# codes, which are the palette indices themselves.
_CODES_PER_CLEAR = 250
_CLEAR, _END = 256, 257


def encode_png(image: NDArray[np.uint8]) -> bytes:
    """A uint8 image, (height, width, 1 or 3)."""
    height, width, channels = image.shape
    kind = {1: 0, 3: 2}[channels]
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # each row begins with its filter: 0
    rows[:, 1:] = image.reshape(height, width * channels)
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 6))
        + _chunk(b"IEND", b"")
    )


def encode_gif(video: NDArray[np.uint8], fps: float = 20) -> bytes:
    """A uint8 video, (time, height, width, 1 or 3), that plays for ever."""
    _, height, width, _ = video.shape
    delay = max(2, round(100 / fps))
    parts = [
        b"GIF89a" + struct.pack("<HHBBB", width, height, 0xF7, 0, 0),
        _palette().tobytes(),
        b"\x21\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00",
    ]
    for frame in video:
        parts += [
            struct.pack("<BBBBHBB", 0x21, 0xF9, 4, 0, delay, 0, 0),
            struct.pack("<BHHHHB", 0x2C, 0, 0, width, height, 0),
            b"\x08" + _blocks(_pack(_indices(frame))),
        ]
    return b"".join(parts) + b"\x3b"


def contact_sheet(
    frames: Sequence[NDArray[np.uint8]], columns: int = 0, gap: int = 2
) -> NDArray[np.uint8]:
    """Frames of one size side by side, row by row, as one RGB image."""
    columns = columns or math.ceil(math.sqrt(len(frames)))
    rows = math.ceil(len(frames) / columns)
    height, width = frames[0].shape[:2]
    sheet = np.full((rows * (height + gap) + gap, columns * (width + gap) + gap, 3), 128, np.uint8)
    for number, frame in enumerate(frames):
        row, column = divmod(number, columns)
        top, left = gap + row * (height + gap), gap + column * (width + gap)
        sheet[top : top + height, left : left + width] = frame
    return sheet


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _palette() -> NDArray[np.uint8]:
    red, green, blue = np.meshgrid(*(np.linspace(0, 255, n) for n in _LEVELS), indexing="ij")
    colors = np.zeros((256, 3), np.uint8)
    colors[: math.prod(_LEVELS)] = np.rint(np.stack([red, green, blue], -1).reshape(-1, 3))
    return colors


def _indices(frame: NDArray[np.uint8]) -> NDArray[np.int64]:
    frame = np.broadcast_to(frame, (*frame.shape[:2], 3))
    levels = np.array(_LEVELS)
    nearest = (frame.astype(np.int64) * (levels - 1) + 127) // 255
    return np.asarray((nearest[..., 0] * levels[1] + nearest[..., 1]) * levels[2] + nearest[..., 2])


def _pack(indices: NDArray[np.int64]) -> bytes:
    flat = indices.reshape(-1)
    groups = [
        piece
        for start in range(0, flat.size, _CODES_PER_CLEAR)
        for piece in ([_CLEAR], flat[start : start + _CODES_PER_CLEAR])
    ]
    codes = np.concatenate([*groups, [_END]])
    bits = (codes[:, None] >> np.arange(9)) & 1
    return np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little").tobytes()


def _blocks(data: bytes) -> bytes:
    pieces = (data[start : start + 255] for start in range(0, len(data), 255))
    return b"".join(bytes([len(piece)]) + piece for piece in pieces) + b"\x00"
