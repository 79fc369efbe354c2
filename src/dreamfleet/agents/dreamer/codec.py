"""Observations to tokens, and latent states back to observations."""

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
from dreamfleet.agents.dreamer.convolution import DownConv, UpConv, over_images
from dreamfleet.agents.dreamer.fit import check_image_size
from dreamfleet.agents.dreamer.keys import Key, ObsKeys
from dreamfleet.agents.dreamer.nets import MLP, BlockLinear, Dense, Linear, Norm
from dreamfleet.agents.dreamer.rssm import State
from dreamfleet.agents.errors import SpaceError


class Encoder(eqx.Module):
    """Vectors through an MLP, images through convolutions; the results side by side."""

    mlp: MLP | None
    cnn: tuple[DownConv, ...]
    keys: ObsKeys = eqx.field(static=True)

    @classmethod
    def init(cls, rng: np.random.Generator, config: ModelConfig, keys: ObsKeys) -> Encoder:
        mlp = None
        if keys.vectors:
            mlp = MLP.init(rng, keys.vector_width, config.units, config.encoder_layers)
        if not keys.images:
            return cls(mlp, (), keys)
        smallest_image(config, keys)
        widths = [keys.image_channels, *(config.depth * mult for mult in config.mults)]
        cnn = tuple(
            DownConv.init(rng, config.kernel, inputs, outputs)
            for inputs, outputs in itertools.pairwise(widths)
        )
        return cls(mlp, cnn, keys)

    def __call__(self, obs: Mapping[str, Array]) -> Float[Array, "batch time tokens"]:
        tokens = []
        if self.mlp is not None:
            dtype = self.mlp.layers[0].kernel.dtype
            tokens.append(
                self.mlp(*(_encode(key, obs[key.name], dtype) for key in self.keys.vectors))
            )
        if self.cnn:
            tokens.append(self.encode_images(obs))
        return jnp.concatenate(tokens, -1)

    def encode_images(self, obs: Mapping[str, Array]) -> Float[Array, "batch time tokens"]:
        names = sorted(key.name for key in self.keys.images)
        return over_images(self._stages, jnp.concatenate([obs[name] for name in names], -1))

    def _stages(self, images: Array, patches: bool) -> Float[Array, "images tokens"]:
        x = images.astype(self.cnn[0].kernel.dtype) / 255.0 - 0.5
        for stage in self.cnn:
            x = stage(x, patches=patches)
        return x.reshape(x.shape[0], -1)


def _encode(key: Key, value: Array, dtype: jnp.dtype) -> Float[Array, "*batch width"]:
    """One vector key as the encoder's input; absent values become zeros."""
    flags = key.is_present(value)
    if key.discrete:
        encoded = key.one_hot(value, dtype)
    else:
        encoded = dist.symlog(key.flat(value).astype(jnp.float32)).astype(dtype)
    return jnp.where(flags[..., None], encoded, jnp.zeros((), dtype))


class Decoder(eqx.Module):
    """Every observation key predicted from the latent state."""

    mlp: MLP | None
    outputs: dict[str, Linear]
    image: ImageDecoder | None
    keys: ObsKeys = eqx.field(static=True)

    @classmethod
    def init(cls, rng: np.random.Generator, config: ModelConfig, keys: ObsKeys) -> Decoder:
        feature = config.deter + config.stoch * config.classes
        mlp, outputs = None, {}
        if keys.vectors:
            mlp = MLP.init(rng, feature, config.units, config.decoder_layers)
            outputs = {
                entry.name: Linear.init(rng, config.units, entry.width) for entry in keys.vectors
            }
        image = ImageDecoder.init(rng, config, keys) if keys.images else None
        return cls(mlp, outputs, image, keys)

    def __call__(self, state: State) -> dict[str, Float[Array, "batch time *shape"]]:
        """Symlog means of floats, logits of discrete keys, images in [0, 1]."""
        result = {}
        if self.mlp is not None:
            # The heads read [deter, stoch]; this network reads them the other way round.
            x = self.mlp(state.stoch, state.deter)
            for key in self.keys.vectors:
                y = self.outputs[key.name](x)
                shape = (*y.shape[:-1], *key.shape)
                result[key.name] = key.mask_logits(y) if key.discrete else y.reshape(shape)
        if self.image is not None:
            images = self.image(state)
            offset = 0
            for entry in self.keys.images:
                result[entry.name] = images[..., offset : offset + entry.channels]
                offset += entry.channels
        return result

    def losses(
        self, predictions: Mapping[str, Array], obs: Mapping[str, Array]
    ) -> dict[str, Float[Array, "batch time"]]:
        """Loss of each key at each step, summed over the key's dimensions."""
        result = {}
        for key in self.keys.vectors:
            target, flags = obs[key.name], key.is_present(obs[key.name])
            prediction = predictions[key.name].astype(jnp.float32)
            if key.discrete:
                index = jnp.clip(target.astype(jnp.int32) - key.low, 0, key.classes - 1)
                error = -dist.categorical_log_prob(prediction, index)
            else:
                # An absent value is -inf: replaced before the arithmetic, so that no gradient
                # is the product of zero and infinity.
                safe = jnp.where(jnp.isneginf(target), 0.0, target.astype(jnp.float32))
                error = jnp.square(prediction - dist.symlog(safe))
            result[key.name] = dist.present(flags, jnp.sum(key.flat(error), -1))
        for entry in self.keys.images:
            truth = obs[entry.name].astype(jnp.float32) / 255.0
            error = jnp.square(predictions[entry.name].astype(jnp.float32) - truth)
            result[entry.name] = jnp.sum(error, (-3, -2, -1))
        return result


class ImageDecoder(eqx.Module):
    """Latent states to images: a small image from both parts of the state, then doubled."""

    from_deter: BlockLinear
    from_stoch: Dense
    from_stoch_out: Linear
    merge: Norm
    stages: tuple[UpConv, ...]
    norms: tuple[Norm, ...]
    size: tuple[int, int] = eqx.field(static=True)

    @classmethod
    def init(cls, rng: np.random.Generator, config: ModelConfig, keys: ObsKeys) -> ImageDecoder:
        height, width = smallest_image(config, keys)
        widths = [config.depth * mult for mult in reversed(config.mults)]
        blocks = config.decoder_blocks
        if config.deter % blocks or widths[0] % blocks:
            raise SpaceError(
                f"model.decoder_blocks={blocks} must divide model.deter={config.deter} and the "
                f"{widths[0]} channels of the last image stage (model.depth times model.mults)."
            )
        start = height * width * widths[0]
        return cls(
            from_deter=BlockLinear.init(rng, config.deter, start, blocks),
            from_stoch=Dense.init(rng, config.stoch * config.classes, 2 * config.units),
            from_stoch_out=Linear.init(rng, 2 * config.units, start),
            merge=Norm.init(widths[0]),
            stages=tuple(
                UpConv.init(rng, config.kernel, inputs, outputs)
                for inputs, outputs in itertools.pairwise([*widths, keys.image_channels])
            ),
            norms=tuple(Norm.init(n) for n in widths[1:]),
            size=(height, width),
        )

    def __call__(self, state: State) -> Float[Array, "batch time height width channels"]:
        batch, time = state.deter.shape[:2]
        height, width = self.size
        blocks = self.from_deter.kernel.shape[0]
        left = self.from_deter(state.deter).reshape(batch * time, blocks, height, width, -1)
        left = jnp.moveaxis(left, 1, -2).reshape(batch * time, height, width, -1)
        right = self.from_stoch_out(self.from_stoch(state.stoch))
        x = left + right.reshape(left.shape)
        return over_images(self._grow, x.reshape(batch, time, *x.shape[1:]))

    def _grow(
        self, x: Float[Array, "images h w channels"], patches: bool
    ) -> Float[Array, "images height width outputs"]:
        x = self.merge(x)
        for stage, norm in zip(self.stages[:-1], self.norms, strict=True):
            x = norm(stage(x, patches=patches))
        return jax.nn.sigmoid(self.stages[-1](x, patches=patches))


def smallest_image(config: ModelConfig, keys: ObsKeys) -> tuple[int, int]:
    """The image's size after all stages."""
    image, factor = keys.images[0], 2 ** len(config.mults)
    check_image_size(image.name, image.height, image.width, config)
    return image.height // factor, image.width // factor
