"""What the networks make of each key of an observation and of an action.

Keys with up to two dimensions are vectors (floats through symlog, discrete ones as one-hots), keys
with three are uint8 images. Reward and episode flags are never encoded or decoded. Discrete
elements with different numbers of choices share one table as wide as the widest; the surplus
choices have probability zero.

Without JAX, so that spaces can be checked before a run starts. Methods take arrays of numpy and of
JAX alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dreamfleet.agents.dreamer.config import ModelConfig
from dreamfleet.masks import ACTION_MASK, ActionMask
from dreamfleet.spaces import FLAGS, Space, SpaceError, without_logs, without_reset

Spaces = Mapping[str, Space]

IMPOSSIBLE = -1e9
"""The logit of what cannot be chosen: its probability is zero, its log-probability finite."""
_MOST_CHOICES = 4096


@dataclass(frozen=True)
class Feature:
    """One key of an observation or action, reduced to what the networks need."""

    name: str
    shape: tuple[int, ...]
    choices: tuple[int, ...] = ()
    """Choices of each element of a discrete key; empty for a continuous one."""
    low: int = 0
    """The discrete key's smallest value."""
    may_miss: bool = True
    """Whether -1 marks a discrete key as absent."""

    @classmethod
    def of(cls, name: str, space: Space) -> Feature:
        if not space.discrete:
            return cls(name, space.shape)
        choices = tuple(int(n) for n in np.ravel(space.classes))
        low = int(space.low.flat[0])
        return cls(name, space.shape, choices, low, space.dtype.kind == "i" and low >= 0)

    # Worked out once: they are asked for several times in a policy call of a quarter millisecond.

    @cached_property
    def discrete(self) -> bool:
        return bool(self.choices)

    @cached_property
    def classes(self) -> int:
        return max(self.choices)

    @cached_property
    def elements(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def width(self) -> int:
        """Numbers this key takes in a network's input or output."""
        return self.elements * (self.classes if self.discrete else 1)

    def mask_logits(self, logits: Any) -> Any:
        """Logits shaped (*batch, *shape, classes), with choices that do not exist ruled out."""
        logits = logits.reshape(*logits.shape[:-1], *self.shape, self.classes)
        if min(self.choices) == self.classes:
            return logits
        table = np.arange(self.classes) < np.reshape(self.choices, (*self.shape, 1))
        floor = np.asarray(IMPOSSIBLE, logits.dtype)
        arrays = logits.__array_namespace__()
        return arrays.where(arrays.broadcast_to(table, logits.shape), logits, floor)

    def one_hot(self, value: Any, dtype: Any) -> Any:
        """One-hot of a discrete value, flattened over the key's shape; out of range is zero."""
        index = value.astype(np.int32) - np.int32(self.low)
        classes = np.arange(self.classes, dtype=np.int32).reshape(*[1] * index.ndim, -1)
        batch = value.shape[: value.ndim - len(self.shape)]
        return (index[..., None] == classes).astype(dtype).reshape(*batch, self.width)

    def flat(self, value: Any) -> Any:
        """The value with this key's dimensions flattened into one."""
        batch = value.shape[: value.ndim - len(self.shape)]
        return value.reshape(*batch, self.elements)

    def is_present(self, value: Any) -> Any:
        """False for steps where the environment marked this key as absent."""
        if not self.discrete:
            return (self.flat(value) != -np.inf).all(-1)
        if not self.may_miss:
            batch = value.shape[: value.ndim - len(self.shape)]
            return value.__array_namespace__().ones(batch, bool)
        return (self.flat(value) != np.asarray(-1, value.dtype)).all(-1)


@dataclass(frozen=True)
class ImageFeature:
    """An image observation."""

    name: str
    height: int
    width: int
    channels: int


@dataclass(frozen=True)
class Features:
    """An observation, sorted into vectors and images."""

    vectors: tuple[Feature, ...]
    """Sorted by name, the order in which they are concatenated."""
    images: tuple[ImageFeature, ...]
    """In the observation space's order, which is the decoder's order of channels."""

    @classmethod
    def of(cls, spaces: Spaces) -> Features:
        images = {name: space for name, space in spaces.items() if space.image}
        vectors = [Feature.of(name, spaces[name]) for name in sorted(spaces.keys() - images)]
        return cls(
            tuple(vectors), tuple(ImageFeature(name, *s.shape) for name, s in images.items())
        )

    @property
    def vector_width(self) -> int:
        return sum(feature.width for feature in self.vectors)

    @property
    def image_channels(self) -> int:
        return sum(image.channels for image in self.images)

    def mults(self, model: ModelConfig) -> tuple[int, ...]:
        """The channel multipliers of the stages that images of this size go through."""
        return model.mults[-stages(self.images[0].height, self.images[0].width, model) :]

    def smallest_image(self, model: ModelConfig) -> tuple[int, int]:
        """Height and width of the images after all stages."""
        image, factor = self.images[0], 2 ** len(self.mults(model))
        return image.height // factor, image.width // factor


_SMALLEST, _LARGEST = 3, 16  # pixels that an image has after all stages


def stages(height: int, width: int, model: ModelConfig) -> int:
    """How many stages of `model.mults` halve such an image: fewer than all if it is small."""
    side = min(height, width)
    return max([1, *(n for n in range(1, len(model.mults) + 1) if side >> n >= _SMALLEST)])


def observed(obs_space: Spaces) -> dict[str, Space]:
    """The keys that are encoded."""
    return {key: space for key, space in without_logs(obs_space).items() if key not in FLAGS}


def decoded(obs_space: Spaces) -> dict[str, Space]:
    """The keys that the decoder predicts; a mask of actions has a head of its own."""
    return {key: space for key, space in observed(obs_space).items() if key != ACTION_MASK}


def action_features(act_space: Spaces) -> tuple[Feature, ...]:
    """The keys that the policy chooses, sorted."""
    return tuple(Feature.of(name, s) for name, s in sorted(without_reset(act_space).items()))


def embed_actions(features: tuple[Feature, ...], actions: Mapping[str, Any], dtype: Any) -> Any:
    """Action vector: one-hots and raw numbers in sorted key order."""
    parts = [
        feature.one_hot(actions[feature.name], dtype)
        if feature.discrete
        else feature.flat(actions[feature.name]).astype(dtype)
        for feature in features
    ]
    return parts[0].__array_namespace__().concatenate(parts, -1)


def rssm_entries(model: ModelConfig) -> dict[str, Space]:
    """What is stored of the RSSM's state with each step."""
    return {
        "dyn/deter": Space(np.float32, (model.deter,)),
        "dyn/stoch": Space(np.float32, (model.stoch, model.classes)),
    }


# --- which spaces are refused --------------------------------------------------------------------


def check_spaces(obs_space: Spaces, act_space: Spaces) -> None:
    """Refuse spaces that no networks can learn from.

    Raises:
        SpaceError: The message names the key, and the fix.
    """
    missing = [name for name in FLAGS if name not in obs_space]
    if missing:
        raise SpaceError(f"The observation space lacks {', '.join(missing)}; add these keys.")
    if not observed(obs_space):
        raise SpaceError("The observation space holds only reward and flags: add a key.")
    actions = without_reset(act_space)
    if not actions:
        raise SpaceError("The action space holds only reset: add a key.")
    for name, space in actions.items():
        _check_choices(name, space)
    ActionMask.of(obs_space, act_space)


def check_encodable(spaces: Spaces, model: ModelConfig) -> None:
    """Refuse observations that the default encoder does not take: all but vectors, matrices and
    uint8 images of one size."""
    for name, space in spaces.items():
        dimensions = len(space.shape)
        if dimensions == 3 and not space.image:
            raise SpaceError(
                f"Observation {name!r} has dtype {space.dtype} and 3 dimensions: set the "
                "environment's option image_layout (hwc or chw for an image, flat for a vector), "
                "or set model.encoder to your own encoder."
            )
        if dimensions > 3:
            raise SpaceError(
                f"Observation {name!r} has {dimensions} dimensions: set the environment's option "
                "image_layout to flat for a vector, or set model.encoder to your own encoder."
            )
    _check_vectors(spaces)
    _check_images(spaces, model)


def check_decodable(spaces: Spaces, model: ModelConfig) -> None:
    """Refuse observations that the default decoder does not predict: it takes floats of any
    shape, uint8 images of one size and other integers of up to 2 dimensions."""
    for name, space in spaces.items():
        if space.discrete and len(space.shape) > 2 and not space.image:
            raise SpaceError(
                f"Observation {name!r} holds integers in {len(space.shape)} dimensions, which the "
                "default decoder cannot predict: make it a float, or choose a decoder of your own "
                "with model.decoder."
            )
    _check_vectors(spaces)
    _check_images(spaces, model)
    images = Features.of(spaces)
    if not images.images:
        return
    blocks, channels = model.decoder_blocks, model.depth * images.mults(model)[-1]
    if model.deter % blocks or channels % blocks:
        raise SpaceError(
            f"model.decoder_blocks={blocks} must divide model.deter={model.deter} and the "
            f"{channels} channels of the last image stage (model.depth times model.mults)."
        )


def _check_vectors(spaces: Spaces) -> None:
    for name, space in spaces.items():
        if not space.image:
            _check_choices(name, space)


def _check_images(spaces: Spaces, model: ModelConfig) -> None:
    images = {name: space.shape[:2] for name, space in spaces.items() if space.image}
    if len(set(images.values())) > 1:
        sizes = ", ".join(f"{name} {height}x{width}" for name, (height, width) in images.items())
        raise SpaceError(f"All images need the same size, got {sizes}: resize them.")
    for name, (height, width) in images.items():
        count = stages(height, width, model)
        factor = 2**count
        least, most = _SMALLEST * factor, _LARGEST * factor
        sides = (height, width)
        if any(side % factor or not least <= side <= most for side in sides):
            raise SpaceError(
                f"Image {name!r} is {height}x{width}; both sides must be multiples of {factor} "
                f"from {least} to {most}, because {count} stages (model.mults) halve it: resize "
                "it, for example with the environment's option size=[64,64]."
            )


def _check_choices(name: str, space: Space) -> None:
    if not space.discrete:
        return
    if np.any(space.low != space.low.flat[0]):
        raise SpaceError(f"All elements of {name!r} need the same low bound: shift them.")
    choices = int(space.classes.max())
    if choices > _MOST_CHOICES:
        raise SpaceError(
            f"{name!r} has {choices} choices, and one-hot encoding takes at most {_MOST_CHOICES}: "
            "split it into several smaller parts (MultiDiscrete), or give an observation as "
            "numbers in a Box."
        )
