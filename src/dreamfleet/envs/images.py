"""Resizing images with numpy alone.

Two matrices, one for the rows and one for the columns, made once for a pair of sizes: bilinear
interpolation whose filter widens when the image shrinks, so that nothing is skipped and small
things do not flicker. This is what Pillow's BILINEAR does, without needing Pillow.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

# The weights ITU-R BT.601 gives red, green and blue.
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)


def resize(image: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """A uint8 image (height, width, channels) at another (height, width)."""
    height, width, channels = image.shape
    if (height, width) == size:
        return image
    rows, columns = _weights(height, size[0]), _weights(width, size[1])
    result = rows @ image.reshape(height, width * channels).astype(np.float32)
    result = columns @ result.reshape(size[0], width, channels)
    rounded: NDArray[np.uint8] = np.clip(np.rint(result), 0, 255).astype(np.uint8)
    return rounded


def to_gray(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Luma of an RGB image, as one channel."""
    gray: NDArray[np.uint8] = np.rint(image @ _LUMA[:, None]).astype(np.uint8)
    return gray


@functools.lru_cache(maxsize=32)
def _weights(source: int, target: int) -> NDArray[np.float32]:
    scale = source / target
    support = max(scale, 1.0)
    centers = (np.arange(target) + 0.5) * scale
    distance = np.abs(np.arange(source)[None] + 0.5 - centers[:, None]) / support
    weights = np.clip(1.0 - distance, 0.0, None)
    weights /= weights.sum(1, keepdims=True)
    return weights.astype(np.float32)
