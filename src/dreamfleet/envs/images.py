"""Resizing the images of observations, and showing several of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def resize(image: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """A uint8 image (height, width, channels), or a batch, at another (height, width).

    The filter of the bilinear interpolation widens when images shrink: small objects stay.
    """
    if image.shape[-3:-1] == size:
        return image
    if image.ndim > 3:
        return np.stack([resize(each, size) for each in image])
    from PIL import Image  # 2 MB that an environment without resizing does not need

    def resized(layer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return np.array(Image.fromarray(layer).resize(size[::-1], Image.Resampling.BILINEAR))

    if image.shape[2] == 3:
        return resized(image)
    # Pillow would take four channels for colours and transparency.
    return np.stack([resized(layer) for layer in np.moveaxis(image, 2, 0)], -1)


def to_gray(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Luma of an RGB image (ITU-R BT.601), as one channel."""
    from PIL import Image

    return np.array(Image.fromarray(image).convert("L"))[..., None]


def side_by_side(images: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Images of several keys as one, each enlarged as often as it fits into the highest; a single
    one as it is. Of other channels than grey or colour the last one is shown."""
    shown = [each if each.shape[-1] in (1, 3) else each[..., -1:] for each in images]
    if len(shown) == 1:
        return shown[0]
    height = max(len(each) for each in shown)
    channels = max(each.shape[-1] for each in shown)
    parts: list[NDArray[np.uint8]] = []
    for each in shown:
        times = height // len(each)
        large = each.repeat(times, 0).repeat(times, 1).repeat(channels // each.shape[-1], 2)
        gap = max(1, height // 32) if parts else 0
        parts.append(np.pad(large, ((0, height - len(large)), (gap, 0), (0, 0))))
    return np.concatenate(parts, 1)
