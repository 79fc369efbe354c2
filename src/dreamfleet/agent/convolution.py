"""Convolutions that halve or double an image."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dreamfleet.agent.nets import along_last, constant, init_kernel, rms_norm


class DownConv(eqx.Module):
    """Convolution, 2x2 max-pooling, norm over channels, SiLU."""

    kernel: Float[Array, "size size inputs outputs"]
    bias: Float[Array, " outputs"]
    scale: Float[Array, " outputs"]

    @classmethod
    def init(cls, rng: np.random.Generator, size: int, inputs: int, outputs: int) -> DownConv:
        kernel = init_kernel(rng, (size, size, inputs, outputs), size * size * inputs)
        return cls(kernel, constant(0.0, outputs), constant(1.0, outputs))

    def __call__(
        self, x: Float[Array, "batch height width inputs"]
    ) -> Float[Array, "batch half_height half_width outputs"]:
        x = convolve(x, self.kernel)
        batch, height, width, channels = x.shape
        x = x.reshape(batch, height // 2, 2, width // 2, 2, channels).max((2, 4))
        return jax.nn.silu(rms_norm(x + along_last(self.bias, 4), self.scale))


class UpConv(eqx.Module):
    """Every pixel repeated twice in both directions, then a convolution."""

    kernel: Float[Array, "size size inputs outputs"]
    bias: Float[Array, " outputs"]

    @classmethod
    def init(cls, rng: np.random.Generator, size: int, inputs: int, outputs: int) -> UpConv:
        kernel = init_kernel(rng, (size, size, inputs, outputs), size * size * inputs)
        return cls(kernel, constant(0.0, outputs))

    def __call__(
        self, x: Float[Array, "batch height width inputs"]
    ) -> Float[Array, "batch double_height double_width outputs"]:
        x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
        return convolve(x, self.kernel) + along_last(self.bias, 4)


def convolve(
    x: Float[Array, "batch height width inputs"],
    kernel: Float[Array, "size size inputs outputs"],
) -> Float[Array, "batch height width outputs"]:
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
