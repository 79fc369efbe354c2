"""The image encoder in numpy, for acting on a CPU.

The same products of patches between 2x2 cells of pixels as in `convolution`, but with channels
first: all images of a chunk lie behind each other in one long row a channel. A shift in the image
is then an offset in the row, so that patches are copied in long runs, and pooling, normalisation
and activation run over whole rows. Margins are only kept above and to the left: what follows in
the row, the next line's or the next image's margin, is the margin on the other sides. Results at
the margins are computed along the way and never read.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.dreamer.layers import EPSILON

Floats = NDArray[np.float32]

# Fewer images than this are not worth another thread.
_CHUNK = 4
# More cores than this gain little, and environments want some too.
_MOST_THREADS = 4


class ImageStages:
    """All image keys of an observation to tokens."""

    def __init__(self, encoder: Any) -> None:
        self._names = sorted(key.name for key in encoder.features.images)
        first = encoder.features.images[0]
        size = (first.height, first.width)
        self._stages: list[_Stage] = []
        for layer in encoder.cnn:
            self._stages.append(_Stage(layer, size))
            size = (size[0] // 2, size[1] // 2)

    def __call__(self, obs: Mapping[str, NDArray[Any]]) -> Floats:
        images = [obs[name] for name in self._names]
        pixels = images[0] if len(images) == 1 else np.concatenate(images, -1)
        tokens = np.empty((len(pixels), *self._stages[-1].shape), np.float32)
        # One chunk a thread: threads that start over wait for each other's interpreter.
        size = max(_CHUNK, math.ceil(len(pixels) / _thread_count()))
        starts = range(0, len(pixels), size)
        chunks = [(pixels[i : i + size], tokens[i : i + size]) for i in starts]
        if len(chunks) == 1:
            self._encode(*chunks[0])
        else:
            # Listed, so that an error of any chunk surfaces here.
            list(_threads().map(self._encode, *zip(*chunks, strict=True)))
        return tokens.reshape(len(pixels), -1)

    def _encode(self, pixels: NDArray[np.uint8], tokens: Floats) -> None:
        x: NDArray[Any] = pixels.transpose(3, 0, 1, 2)
        for index, stage in enumerate(self._stages):
            x = stage(x, from_bytes=index == 0)
        tokens[...] = x.transpose(1, 2, 3, 0)


@functools.cache
def _thread_count() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(_MOST_THREADS, cores or 1)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Chunks run side by side: numpy lets go of the interpreter while it computes."""
    return ThreadPoolExecutor(_thread_count(), thread_name_prefix="encode-images")


class _Workspace(threading.local):
    """Arrays that a thread uses again and again, so that their memory is only claimed once."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[object, ...], Floats] = {}

    def __call__(self, use: str, *shape: int) -> Floats:
        """An array for some use; zeros when it is new, and later what that use left there."""
        found = self._arrays.get((use, shape))
        if found is None:
            found = self._arrays[use, shape] = np.zeros(shape, np.float32)
        return found


_workspace = _Workspace()


class _Stage:
    """Convolution, 2x2 max-pooling, norm over channels, SiLU."""

    def __init__(self, layer: Any, size: tuple[int, int]) -> None:
        kernel = _cell_kernel(np.asarray(layer.kernel))
        self._cells, _, self._inputs, outputs = kernel.shape
        self._outputs = outputs // 4
        self._kernel = np.ascontiguousarray(kernel.reshape(-1, outputs).T)
        self._bias = np.asarray(layer.bias)[:, None]
        self._half_scale = 0.5 * np.asarray(layer.scale)[:, None]
        self._height, self._width = size[0] // 2, size[1] // 2

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one image that comes out."""
        return self._height, self._width, self._outputs

    def __call__(self, x: NDArray[Any], *, from_bytes: bool) -> Floats:
        """(channels, images, height, width) to the same with half the size.

        The result is only good until the next call of this thread.
        """
        count, cells = x.shape[1], self._cells
        reach = cells // 2
        height, width = self._height + reach, self._width + reach
        area, margin = count * height * width, reach * (width + 1)
        # Margins are zero from the beginning and stay so: no other layout may use these rows.
        layout = f"{count} images of {height}x{width} with margins of {reach}"
        flat = _workspace(layout, self._inputs, area + margin)
        rows = flat[:, :area].reshape(self._inputs, count, height, width)
        inner = rows[:, :, reach:, reach:]
        channels = len(x)
        for corner in range(4):
            part = inner[corner * channels : (corner + 1) * channels]
            part[...] = x[:, :, corner // 2 :: 2, corner % 2 :: 2]
        if from_bytes:
            inner *= np.float32(1 / 255)
            inner -= np.float32(0.5)
        length = area - margin
        patches = _workspace("patches", cells * cells, self._inputs, length)
        for shift in range(cells * cells):
            offset = shift // cells * width + shift % cells
            patches[shift] = flat[:, offset : offset + length]
        product = _workspace("product", 4, self._outputs, length)
        out = product.reshape(-1, length)
        np.matmul(self._kernel, patches.reshape(-1, length), out=out)
        result = _workspace("result", self._outputs, area)
        self._activate(product, result[:, :length])
        grid = result.reshape(self._outputs, count, height, width)
        return grid[:, :, : self._height, : self._width]

    def _activate(self, product: Floats, out: Floats) -> None:
        np.maximum(product[0], product[1], out=out)
        np.maximum(out, product[2], out=out)
        np.maximum(out, product[3], out=out)
        out += self._bias
        square = np.square(out, out=product[0])
        inverse: Floats = np.add.reduce(square, 0)
        inverse /= np.float32(self._outputs)
        inverse += np.float32(EPSILON)
        np.sqrt(inverse, out=inverse)
        np.reciprocal(inverse, out=inverse)
        out *= inverse
        out *= self._half_scale
        # silu(2h) = h (1 + tanh(h))
        gate = np.tanh(out, out=product[0])
        gate += 1.0
        out *= gate


def _cell_kernel(kernel: Floats) -> Floats:
    """The kernel between 2x2 cells of pixels: one shifted copy for each pixel of a cell."""
    size, _, inputs, outputs = kernel.shape
    reach = (size // 2 + 1) // 2
    cells = 2 * reach + 1
    copies = np.zeros((2 * cells, 2 * cells, inputs, 4, outputs), np.float32)
    for corner in range(4):
        top, left = (2 * reach - size // 2 + offset for offset in divmod(corner, 2))
        copies[top : top + size, left : left + size, :, corner] = kernel
    shifted = copies.reshape(cells, 2, cells, 2, inputs, 4 * outputs)
    return shifted.transpose(0, 2, 1, 3, 4, 5).reshape(cells, cells, 4 * inputs, 4 * outputs)
