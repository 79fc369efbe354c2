"""Words on frames, in letters of three by five pixels: enough for a label, without any font."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Five rows of three pixels, each row an octal digit: 7 is ###, 5 is #.#, 2 is .#.
_LETTERS = {
    "A": 0o25755, "B": 0o65656, "C": 0o34443, "D": 0o65556, "E": 0o74647, "F": 0o74644,
    "G": 0o34553, "H": 0o55755, "I": 0o72227, "J": 0o11152, "K": 0o55655, "L": 0o44447,
    "M": 0o57755, "N": 0o65555, "O": 0o25552, "P": 0o65644, "Q": 0o25563, "R": 0o65655,
    "S": 0o34216, "T": 0o72222, "U": 0o55557, "V": 0o55552, "W": 0o55775, "X": 0o55255,
    "Y": 0o55222, "Z": 0o71247, "0": 0o75557, "1": 0o26227, "2": 0o71747, "3": 0o71317,
    "4": 0o55711, "5": 0o74717, "6": 0o74757, "7": 0o71122, "8": 0o75757, "9": 0o75717,
    " ": 0o00000, ".": 0o00002, ",": 0o00024, ":": 0o02020, "/": 0o11244, "-": 0o00700,
    "_": 0o00007, "=": 0o07070, "+": 0o02720, "%": 0o51245, "(": 0o12221, ")": 0o42224,
}  # fmt: skip
_UNKNOWN = 0o77777
_HEIGHT, _ADVANCE, _MARGIN = 5, 4, 2


def lettering(text: str) -> NDArray[np.bool_]:
    """Where a line of text has ink, (5, 4 * characters); small letters are written as capitals."""
    codes = [_LETTERS.get(letter, _UNKNOWN) for letter in text.upper()]
    ink = np.zeros((_HEIGHT, _ADVANCE * len(codes)), bool)
    for place, code in enumerate(codes):
        for row in range(_HEIGHT):
            bits = code >> 3 * (_HEIGHT - 1 - row) & 7
            for column in range(3):
                ink[row, _ADVANCE * place + column] = bits >> (2 - column) & 1
    return ink


def width_of(text: str) -> int:
    """Pixels that a line of text takes at least, with its margins."""
    return _ADVANCE * len(text) + 2 * _MARGIN


def labelled(video: NDArray[np.uint8], text: str) -> NDArray[np.uint8]:
    """A video, (time, height, width, 1 or 3), with a line of text above it; what does not fit is
    left off. Wide frames get larger letters."""
    width = video.shape[2]
    ink = lettering(text)
    scale = max(1, min(4, (width - 2 * _MARGIN) // max(1, ink.shape[1])))
    ink = ink.repeat(scale, 0).repeat(scale, 1)[:, : max(0, width - 2 * _MARGIN)]
    strip = np.zeros((ink.shape[0] + 2 * _MARGIN, width, video.shape[3]), np.uint8)
    strip[_MARGIN:-_MARGIN, _MARGIN : _MARGIN + ink.shape[1]] = np.where(ink[..., None], 230, 0)
    strips = np.broadcast_to(strip, (len(video), *strip.shape))
    return np.concatenate([strips, video], axis=1)
