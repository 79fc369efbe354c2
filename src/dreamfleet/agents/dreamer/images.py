"""Convolutions that halve or double an image, in two forms of the same mathematics.

Accelerators run the plain convolutions. CPUs do badly at convolutions with few channels, and worse
at their gradients, so there everything is a matrix product of patches (`patches=True`):

- A convolution followed by 2x2 max-pooling works on 2x2 cells of pixels: one product gives all
  four pixels of a pooling window as four groups of channels, and pooling is their maximum.
- Nearest upsampling followed by a convolution reads each input pixel several times: summing the
  kernel entries that meet the same pixel gives a smaller convolution of the small image, again
  with four groups of channels, one for each output pixel of a cell.
- A few images at a time, so that the patches stay in the CPU's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from dreamfleet.agents.dreamer.forms import scan
from dreamfleet.agents.dreamer.layers import (
    Normed,
    add_bias,
    along_last,
    constant,
    init_kernel,
    rms_norm,
)

Model = TypeVar("Model")

# Images whose patches fit a CPU's cache together.
_ACTING_CHUNK = 8


_PLAIN: ContextVar[bool] = ContextVar("plain convolutions of one step", default=False)


@contextmanager
def plain_convolutions() -> Iterator[None]:
    """Trace policy calls for any device and any number of rows: one plain convolution a stage."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


class DownConv(Normed):
    """Convolution, 2x2 max-pooling, norm over channels, SiLU."""

    kernel: Float[Array, "size size inputs outputs"]
    bias: Float[Array, " outputs"]
    scale: Float[Array, " outputs"]

    @classmethod
    def init(cls, rng: np.random.Generator, size: int, inputs: int, outputs: int) -> DownConv:
        kernel = init_kernel(rng, (size, size, inputs, outputs), size * size * inputs)
        return cls(kernel, constant(0.0, outputs), constant(1.0, outputs))

    def __call__(
        self, x: Float[Array, "batch height width inputs"], *, patches: bool
    ) -> Float[Array, "batch half_height half_width outputs"]:
        if patches:
            cells = _convolve_patches(_to_cells(x), _cell_kernel(self.kernel))
            pooled = cells.reshape(*cells.shape[:-1], 4, -1).max(-2)
        else:
            y = _convolve(x, self.kernel)
            batch, height, width, channels = y.shape
            pooled = y.reshape(batch, height // 2, 2, width // 2, 2, channels).max((2, 4))
        return jax.nn.silu(rms_norm(add_bias(pooled, along_last(self.bias, 4)), self.scale))


class UpConv(eqx.Module):
    """Every pixel repeated twice in both directions, then a convolution."""

    kernel: Float[Array, "size size inputs outputs"]
    bias: Float[Array, " outputs"]

    @classmethod
    def init(cls, rng: np.random.Generator, size: int, inputs: int, outputs: int) -> UpConv:
        kernel = init_kernel(rng, (size, size, inputs, outputs), size * size * inputs)
        return cls(kernel, constant(0.0, outputs))

    def __call__(
        self, x: Float[Array, "batch height width inputs"], *, patches: bool
    ) -> Float[Array, "batch double_height double_width outputs"]:
        if patches:
            y = _from_cells(_convolve_patches(x, _repeated_kernel(self.kernel)))
        else:
            y = _convolve(jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), self.kernel)
        return add_bias(y, along_last(self.bias, 4))


def over_images(
    function: Callable[[Model, Array, bool], Float[Array, "images *out"]],
    model: Model,
    x: Shaped[Array, "batch time *shape"],
) -> Float[Array, "batch time *out"]:
    """function(model, images, patches) on a batch of sequences, in the form that suits the
    device."""
    batch, time = x.shape[:2]
    if _PLAIN.get():
        y: Array = function(model, x[:, 0], False)
        return y[:, None]

    def whole(x: Array) -> Array:
        y: Array = function(model, x.reshape(batch * time, *x.shape[2:]), False)
        return y.reshape(batch, time, *y.shape[1:])

    def by_step(x: Array) -> Array:
        if time == 1 and batch % _ACTING_CHUNK == 0:
            chunks = x.reshape(-1, _ACTING_CHUNK, *x.shape[2:])
            z: Array = jax.lax.map(lambda images: function(model, images, True), chunks)
            return z.reshape(batch, 1, *z.shape[2:])
        if time == 1:
            return function(model, x[:, 0], True)[:, None]
        # Time is the axis to split along: rows may be spread over devices.
        # Products are kept for the gradient, the larger patches are built again.
        body = jax.checkpoint(
            lambda model, images: function(model, images, True),
            policy=jax.checkpoint_policies.dots_saveable,
        )
        steps = x.swapaxes(0, 1)
        _, by_time = scan(lambda model, _, images: ((), body(model, images)), model, (), steps)
        result: Array = by_time.swapaxes(0, 1)
        return result

    result: Array = jax.lax.platform_dependent(x, cpu=by_step, default=whole)
    return result


def _convolve(
    x: Float[Array, "batch height width inputs"],
    kernel: Float[Array, "size size inputs outputs"],
) -> Float[Array, "batch height width outputs"]:
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _convolve_patches(
    x: Float[Array, "batch height width inputs"],
    kernel: Float[Array, "size size inputs outputs"],
) -> Float[Array, "batch height width outputs"]:
    """The same as a product of all patches with the kernel as a matrix."""
    _, height, width, _ = x.shape
    size = kernel.shape[0]
    margin = (size // 2, size // 2)
    padded = jnp.pad(x, ((0, 0), margin, margin, (0, 0)))
    shifts = [padded[:, i : i + height, j : j + width] for i in range(size) for j in range(size)]
    return jnp.concatenate(shifts, -1) @ kernel.reshape(-1, kernel.shape[-1])


def _to_cells(x: Float[Array, "batch height width inputs"]) -> Float[Array, "batch h w cells"]:
    """2x2 pixels as one with four groups of channels."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // 2, 2, width // 2, 2, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, height // 2, width // 2, 4 * channels)


def _from_cells(x: Float[Array, "batch h w cells"]) -> Float[Array, "batch height width outputs"]:
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height, width, 2, 2, channels // 4)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, 2 * height, 2 * width, channels // 4)


def _cell_kernel(
    kernel: Float[Array, "size size inputs outputs"],
) -> Float[Array, "cells cells four_inputs four_outputs"]:
    """The kernel between 2x2 cells of pixels: one shifted copy for each pixel of a cell."""
    size, _, inputs, outputs = kernel.shape
    reach = (size // 2 + 1) // 2
    cells = 2 * reach + 1
    copies = []
    for y in range(2):
        for x in range(2):
            low_y, low_x = 2 * reach - size // 2 + y, 2 * reach - size // 2 + x
            pads = [(low, 2 * cells - size - low) for low in (low_y, low_x)]
            copies.append(jnp.pad(kernel, (*pads, (0, 0), (0, 0))))
    shifted = jnp.stack(copies, -2).reshape(cells, 2, cells, 2, inputs, 4 * outputs)
    return shifted.transpose(0, 2, 1, 3, 4, 5).reshape(cells, cells, 4 * inputs, 4 * outputs)


def _repeated_kernel(
    kernel: Float[Array, "size size inputs outputs"],
) -> Float[Array, "cells cells inputs four_outputs"]:
    """The kernel on the image before repetition, for each of the four pixels of a cell."""
    size, _, inputs, outputs = kernel.shape
    reach = (size // 2 + 1) // 2
    cells = 2 * reach + 1
    # sums[p, c, k]: kernel entry k, for output pixel p of a cell, meets input pixel c.
    sums = np.zeros((2, cells, size), np.float32)
    for pixel in range(2):
        for entry in range(size):
            sums[pixel, (pixel + entry - size // 2) // 2 + reach, entry] = 1.0
    table = jnp.asarray(sums).astype(kernel.dtype)
    merged = jnp.einsum("pak,qbl,klio->abipqo", table, table, kernel)
    return merged.reshape(cells, cells, inputs, 4 * outputs)
