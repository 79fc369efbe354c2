"""From the features of a state back to observations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.config import ModelConfig
from dreamfleet.agents.dreamer.dynamics import Parts
from dreamfleet.agents.dreamer.features import Features, Spaces, check_decodable
from dreamfleet.agents.dreamer.images import UpConv, over_images
from dreamfleet.agents.dreamer.layers import MLP, BlockLinear, Dense, Linear, Norm


class DefaultDecoder(eqx.Module):
    """Every observation key, predicted from the features of a state."""

    mlp: MLP | None
    outputs: dict[str, Linear]
    image: ImageDecoder | None
    features: Features = eqx.field(static=True)

    @classmethod
    def check(cls, spaces: Spaces, model: ModelConfig) -> None:
        check_decodable(spaces, model)

    @classmethod
    def init(
        cls,
        rng: np.random.Generator,
        model: ModelConfig,
        spaces: Spaces,
        widths: tuple[int, ...],
    ) -> DefaultDecoder:
        features, mlp, outputs = Features.of(spaces), None, {}
        if features.vectors:
            mlp = MLP.init(rng, sum(widths), model.units, model.decoder_layers)
            outputs = {
                each.name: Linear.init(rng, model.units, each.width) for each in features.vectors
            }
        image = ImageDecoder.init(rng, model, features, widths) if features.images else None
        return cls(mlp, outputs, image, features)

    def __call__(self, features: Parts) -> dict[str, Float[Array, "batch time *shape"]]:
        """Symlog means of floats, logits of discrete keys, images in [0, 1]."""
        result = {}
        if self.mlp is not None:
            # The heads read [deter, stoch]; this network reads them the other way round.
            x = self.mlp(*reversed(features))
            for feature in self.features.vectors:
                y = self.outputs[feature.name](x)
                shape = (*y.shape[:-1], *feature.shape)
                result[feature.name] = (
                    feature.mask_logits(y) if feature.discrete else y.reshape(shape)
                )
        if self.image is not None:
            images = self.image(features)
            offset = 0
            for image in self.features.images:
                result[image.name] = images[..., offset : offset + image.channels]
                offset += image.channels
        return result

    def losses(
        self, predictions: Mapping[str, Array], obs: Mapping[str, Array]
    ) -> dict[str, Float[Array, "batch time"]]:
        """Loss of each key at each step, summed over the key's dimensions."""
        result = {}
        for feature in self.features.vectors:
            target, prediction = obs[feature.name], predictions[feature.name].astype(jnp.float32)
            if feature.discrete:
                index = target.astype(jnp.int32) - feature.low
                index = jnp.clip(index, 0, feature.classes - 1)
                error = -dist.categorical_log_prob(prediction, index)
            else:
                # An absent value is -inf: replaced before the arithmetic, so that no gradient
                # is the product of zero and infinity.
                safe = jnp.where(jnp.isneginf(target), 0.0, target.astype(jnp.float32))
                error = jnp.square(prediction - dist.symlog(safe))
            total = jnp.sum(feature.flat(error), -1)
            result[feature.name] = jnp.where(feature.is_present(target), total, 0.0)
        for name, prediction in self.images(predictions).items():
            error = jnp.square(
                prediction.astype(jnp.float32) - obs[name].astype(jnp.float32) / 255.0
            )
            result[name] = jnp.sum(error, (-3, -2, -1))
        return result

    def values(self, predictions: Mapping[str, Array]) -> dict[str, Array]:
        """Predicted numbers as the environment has them: means of floats, the likeliest choice of
        discrete keys."""
        result: dict[str, Array] = {}
        for feature in self.features.vectors:
            prediction = predictions[feature.name].astype(jnp.float32)
            if feature.discrete:
                index = jnp.argmax(prediction, -1).astype(jnp.int32)
                result[feature.name] = index + np.int32(feature.low)
            else:
                result[feature.name] = dist.symexp(prediction)
        return result

    def images(self, predictions: Mapping[str, Array]) -> dict[str, Array]:
        return {image.name: predictions[image.name] for image in self.features.images}


class ImageDecoder(eqx.Module):
    """A small image from each part of the features; their sum, doubled again and again.

    The first part goes through a block-diagonal layer, the second, if there is one, through an MLP.
    """

    from_deter: BlockLinear
    from_stoch: Dense | None
    from_stoch_out: Linear | None
    merge: Norm
    stages: tuple[UpConv, ...]
    norms: tuple[Norm, ...]
    size: tuple[int, int] = eqx.field(static=True)

    @classmethod
    def init(
        cls,
        rng: np.random.Generator,
        model: ModelConfig,
        features: Features,
        parts: tuple[int, ...],
    ) -> ImageDecoder:
        height, width = features.smallest_image(model)
        widths = [model.depth * mult for mult in reversed(features.mults(model))]
        start = height * width * widths[0]
        first, rest = parts[0], sum(parts[1:])
        return cls(
            from_deter=BlockLinear.init(rng, first, start, model.decoder_blocks),
            from_stoch=Dense.init(rng, rest, 2 * model.units) if rest else None,
            from_stoch_out=Linear.init(rng, 2 * model.units, start) if rest else None,
            merge=Norm.init(widths[0]),
            stages=tuple(
                UpConv.init(rng, model.kernel, inputs, outputs)
                for inputs, outputs in itertools.pairwise([*widths, features.image_channels])
            ),
            norms=tuple(Norm.init(n) for n in widths[1:]),
            size=(height, width),
        )

    def __call__(self, features: Parts) -> Float[Array, "batch time height width channels"]:
        deter, *rest = features
        batch, time = deter.shape[:2]
        height, width = self.size
        blocks = self.from_deter.kernel.shape[0]
        x = self.from_deter(deter).reshape(batch * time, blocks, height, width, -1)
        x = jnp.moveaxis(x, 1, -2).reshape(batch * time, height, width, -1)
        if self.from_stoch is not None and self.from_stoch_out is not None:
            x = x + self.from_stoch_out(self.from_stoch(*rest)).reshape(x.shape)
        return over_images(ImageDecoder._grow, self, x.reshape(batch, time, *x.shape[1:]))

    def _grow(
        self, x: Float[Array, "images h w channels"], patches: bool
    ) -> Float[Array, "images height width outputs"]:
        x = self.merge(x)
        for stage, norm in zip(self.stages[:-1], self.norms, strict=True):
            x = norm(stage(x, patches=patches))
        return jax.nn.sigmoid(self.stages[-1](x, patches=patches))
