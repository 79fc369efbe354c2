"""Observations to tokens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.config import ModelConfig
from dreamfleet.agents.dreamer.features import Feature, Features, Spaces, check_encodable
from dreamfleet.agents.dreamer.images import DownConv, over_images
from dreamfleet.agents.dreamer.layers import MLP


class DefaultEncoder(eqx.Module):
    """Vectors through an MLP, images through convolutions; the results side by side."""

    mlp: MLP | None
    cnn: tuple[DownConv, ...]
    features: Features = eqx.field(static=True)
    width: int = eqx.field(static=True)

    @classmethod
    def check(cls, spaces: Spaces, model: ModelConfig) -> None:
        check_encodable(spaces, model)

    @classmethod
    def init(cls, rng: np.random.Generator, model: ModelConfig, spaces: Spaces) -> DefaultEncoder:
        features, mlp, width = Features.of(spaces), None, 0
        cnn: tuple[DownConv, ...] = ()
        if features.vectors:
            mlp = MLP.init(rng, features.vector_width, model.units, model.encoder_layers)
            width += model.units
        if features.images:
            mults = features.mults(model)
            widths = [features.image_channels, *(model.depth * mult for mult in mults)]
            cnn = tuple(
                DownConv.init(rng, model.kernel, inputs, outputs)
                for inputs, outputs in itertools.pairwise(widths)
            )
            rows, columns = features.smallest_image(model)
            width += rows * columns * widths[-1]
        return cls(mlp, cnn, features, width)

    def __call__(self, obs: Mapping[str, Array]) -> Float[Array, "batch time tokens"]:
        tokens = []
        if self.mlp is not None:
            dtype = self.mlp.layers[0].kernel.dtype
            inputs = [encode(each, obs[each.name], dtype) for each in self.features.vectors]
            tokens.append(self.mlp(*inputs))
        if self.cnn:
            names = sorted(image.name for image in self.features.images)
            images = jnp.concatenate([obs[name] for name in names], -1)
            tokens.append(over_images(DefaultEncoder._stages, self, images))
        return jnp.concatenate(tokens, -1)

    def _stages(self, images: Array, patches: bool) -> Float[Array, "images tokens"]:
        x = images.astype(self.cnn[0].kernel.dtype) / 255.0 - 0.5
        for stage in self.cnn:
            x = stage(x, patches=patches)
        return x.reshape(x.shape[0], -1)


def encode(feature: Feature, value: Array, dtype: jnp.dtype) -> Float[Array, "*batch width"]:
    """One vector key as a network's input; absent values become zeros."""
    if feature.discrete:
        encoded = feature.one_hot(value, dtype)
    else:
        encoded = dist.symlog(feature.flat(value).astype(jnp.float32)).astype(dtype)
    present = feature.is_present(value)
    return jnp.where(present[..., None], encoded, jnp.zeros((), dtype))
