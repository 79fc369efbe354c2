"""The layers everything is built from.

Compute precision is a property of the parameters: `cast` turns a float32 model into one
that computes in bfloat16, and nothing else in the code mentions it. Normalisation is in float32
always.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Model = TypeVar("Model")

EPSILON = 1e-4
# Brings the standard deviation of a normal cut off at two deviations back to one.
_TRUNCATION = 1.1368


class Shapes(np.random.Generator):
    """Random numbers where only the shapes of networks count: nothing is drawn, and inside of
    `jax.eval_shape` nothing allocated."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))


def init_kernel(
    rng: np.random.Generator, shape: tuple[int, ...], fan_in: int, scale: float = 1.0
) -> Float[Array, "..."]:
    """Truncated normal whose standard deviation is scale / sqrt(fan_in)."""
    if isinstance(rng, Shapes):
        return jnp.zeros(shape)
    # Drawn by numpy: a random JAX call for each of a hundred shapes would compile for a minute.
    draw = rng.standard_normal(shape, np.float32)
    while np.any(outside := np.abs(draw) > 2.0):
        draw[outside] = rng.standard_normal(int(outside.sum()), np.float32)
    return jnp.asarray(draw * np.float32(_TRUNCATION * scale / math.sqrt(fan_in)))


def constant(value: float, width: int) -> Float[Array, " width"]:
    """A vector with one value everywhere."""
    return jnp.asarray(np.full(width, value, np.float32))


class Normed(eqx.Module):
    """A layer with an RMS norm: its field `scale` stays in float32."""


def cast(model: Model, dtype: jnp.dtype) -> Model:
    """The model computing in another precision; the scales of its norms keep theirs."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, Normed):
            return value.astype(dtype)
        layer: Any = value
        narrow = jax.tree.map(lambda x: x.astype(dtype), layer)
        return eqx.tree_at(lambda layer: layer.scale, narrow, layer.scale)

    result: Model = jax.tree.map(leaf, model, is_leaf=lambda x: isinstance(x, Normed))
    return result


def along_last(vector: Float[Array, " width"], rank: int) -> Float[Array, "..."]:
    """The vector as the last of `rank` axes, for arithmetic without implicit broadcasting."""
    return vector.reshape((1,) * (rank - 1) + vector.shape)


def add_bias(x: Float[Array, "..."], bias: Float[Array, "..."]) -> Float[Array, "..."]:
    """x + bias, for a bias whose axes have the size of those of x, or one; its gradient is a sum
    over what it was added to, and is taken in float32."""
    return x + jnp.broadcast_to(bias.astype(jnp.float32), x.shape).astype(x.dtype)


def rms_norm(
    x: Float[Array, "... width"], scale: Float[Array, " width"]
) -> Float[Array, "... width"]:
    """The root mean square norm over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + EPSILON)
    return (wide * (inverse * along_last(scale, x.ndim))).astype(x.dtype)


class Norm(Normed):
    """RMS norm over the last axis, then SiLU."""

    scale: Float[Array, " width"]

    @classmethod
    def init(cls, width: int) -> Norm:
        return cls(constant(1.0, width))

    def __call__(self, x: Float[Array, "... width"]) -> Float[Array, "... width"]:
        return jax.nn.silu(rms_norm(x, self.scale))


class Linear(eqx.Module):
    """y = xW + b."""

    kernel: Float[Array, "inputs outputs"]
    bias: Float[Array, " outputs"]

    @classmethod
    def init(
        cls, rng: np.random.Generator, inputs: int, outputs: int, scale: float = 1.0
    ) -> Linear:
        return cls(init_kernel(rng, (inputs, outputs), inputs, scale), constant(0.0, outputs))

    def __call__(self, *parts: Float[Array, "..."]) -> Float[Array, "... outputs"]:
        """Maps the concatenation of the parts, without ever building it."""
        y = matmul_parts(parts, self.kernel)
        return add_bias(y, along_last(self.bias, y.ndim))


class Dense(Normed):
    """Linear, RMS norm, SiLU."""

    kernel: Float[Array, "inputs outputs"]
    bias: Float[Array, " outputs"]
    scale: Float[Array, " outputs"]

    @classmethod
    def init(cls, rng: np.random.Generator, inputs: int, outputs: int) -> Dense:
        kernel = init_kernel(rng, (inputs, outputs), inputs)
        return cls(kernel, constant(0.0, outputs), constant(1.0, outputs))

    def __call__(self, *parts: Float[Array, "..."]) -> Float[Array, "... outputs"]:
        return self.activate(matmul_parts(parts, self.kernel))

    def activate(self, product: Float[Array, "... outputs"]) -> Float[Array, "... outputs"]:
        """What follows the matrix product, for callers that work the product out themselves."""
        biased = add_bias(product, along_last(self.bias, product.ndim))
        return jax.nn.silu(rms_norm(biased, self.scale))


class BlockLinear(eqx.Module):
    """A linear layer whose matrix is block diagonal.

    The kernel's standard deviation follows the full input width, as in the paper, although each
    output only sees the inputs of its own block.
    """

    kernel: Float[Array, "blocks inputs outputs"]
    bias: Float[Array, " width"]

    @classmethod
    def init(cls, rng: np.random.Generator, inputs: int, outputs: int, blocks: int) -> BlockLinear:
        shape = (blocks, inputs // blocks, outputs // blocks)
        return cls(init_kernel(rng, shape, inputs), constant(0.0, outputs))

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        blocks, inputs, outputs = self.kernel.shape
        y = jnp.einsum("...gi,gio->...go", x.reshape(*x.shape[:-1], blocks, inputs), self.kernel)
        y = y.reshape(*x.shape[:-1], blocks * outputs)
        return add_bias(y, along_last(self.bias, y.ndim))


class MLP(eqx.Module):
    """A few dense layers."""

    layers: tuple[Dense, ...]

    @classmethod
    def init(cls, rng: np.random.Generator, inputs: int, units: int, layers: int) -> MLP:
        widths = [inputs] + [units] * layers
        return cls(tuple(Dense.init(rng, width, units) for width in widths[:-1]))

    def __call__(self, *parts: Float[Array, "..."]) -> Float[Array, "... units"]:
        return self.after_first(matmul_parts(parts, self.layers[0].kernel))

    def after_first(self, product: Float[Array, "... units"]) -> Float[Array, "... units"]:
        """What follows the first layer's matrix product."""
        x = self.layers[0].activate(product)
        for layer in self.layers[1:]:
            x = layer(x)
        return x


def matmul_parts(
    parts: Sequence[Float[Array, "..."]], kernel: Float[Array, "inputs outputs"]
) -> Float[Array, "... outputs"]:
    """concatenate(parts, -1) @ kernel as a sum of products with slices of the kernel."""
    offset, total = 0, None
    for part in parts:
        product = part @ kernel[offset : offset + part.shape[-1]]
        total = product if total is None else total + product
        offset += part.shape[-1]
    assert total is not None
    assert offset == kernel.shape[0], (offset, kernel.shape)
    return total
