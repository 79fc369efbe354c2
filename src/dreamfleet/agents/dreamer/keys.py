"""What the agent does with each key of an observation and of an action.

Keys with up to two dimensions are vectors (floats through symlog, discrete ones as one-hots), keys
with three are uint8 images. Reward and episode flags are never encoded or decoded. Discrete
elements with different numbers of choices share one table as wide as the widest; the surplus
choices have probability zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from dreamfleet.agents.dreamer.fit import check_actions, check_observations, observed
from dreamfleet.spaces import Space

_IMPOSSIBLE = -1e9


@dataclass(frozen=True)
class Key:
    """One entry of an observation or action, reduced to what the networks need."""

    name: str
    shape: tuple[int, ...]
    choices: tuple[int, ...] = ()
    """Choices of each element of a discrete key; empty for a continuous one."""
    low: int = 0
    """The discrete key's smallest value."""
    may_miss: bool = True
    """Whether -1 marks a discrete key as absent."""

    @property
    def discrete(self) -> bool:
        return bool(self.choices)

    @property
    def classes(self) -> int:
        return max(self.choices)

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape))

    @property
    def width(self) -> int:
        """Numbers this key takes in a network's input or output."""
        return self.elements * (self.classes if self.discrete else 1)

    def mask_logits(self, logits: Float[Array, "*batch width"]) -> Float[Array, "..."]:
        """Logits shaped (*batch, *shape, classes), with choices that do not exist ruled out."""
        logits = logits.reshape(*logits.shape[:-1], *self.shape, self.classes)
        if min(self.choices) == self.classes:
            return logits
        table = np.arange(self.classes) < np.reshape(self.choices, (*self.shape, 1))
        return jnp.where(jnp.broadcast_to(table, logits.shape), logits, _IMPOSSIBLE)

    def one_hot(self, value: Array, dtype: jnp.dtype) -> Float[Array, "..."]:
        """One-hot of a discrete value, flattened over the key's shape; out of range is zero."""
        batch = value.shape[: value.ndim - len(self.shape)]
        index = value.astype(jnp.int32) - self.low
        return jax.nn.one_hot(index, self.classes, dtype=dtype).reshape(*batch, self.width)

    def flat(self, value: Array) -> Array:
        """The value with this key's dimensions flattened into one."""
        batch = value.shape[: value.ndim - len(self.shape)]
        return value.reshape(*batch, self.elements)

    def is_present(self, value: Array) -> Bool[Array, "..."]:
        """False for steps where the environment marked this key as absent."""
        flat = self.flat(value)
        if self.discrete:
            if not self.may_miss:
                return jnp.ones(flat.shape[:-1], bool)
            return jnp.all(flat != jnp.asarray(-1, flat.dtype), -1)
        return jnp.all(flat != -jnp.inf, -1)


@dataclass(frozen=True)
class ImageKey:
    """An image observation."""

    name: str
    height: int
    width: int
    channels: int


@dataclass(frozen=True)
class ObsKeys:
    """The observation as the encoder and the decoder see it."""

    vectors: tuple[Key, ...]
    """Sorted by name, the order in which they are concatenated."""
    images: tuple[ImageKey, ...]
    """In the observation space's order, which is the decoder's order of channels."""

    @property
    def vector_width(self) -> int:
        return sum(key.width for key in self.vectors)

    @property
    def image_channels(self) -> int:
        return sum(key.channels for key in self.images)


def observation_keys(space: Mapping[str, Space]) -> ObsKeys:
    """Sort an observation space into vectors and images."""
    check_observations(space)
    entries = observed(space).items()
    vectors = [_key(name, entry) for name, entry in entries if len(entry.shape) <= 2]
    images = [ImageKey(name, *entry.shape) for name, entry in entries if len(entry.shape) == 3]
    return ObsKeys(tuple(sorted(vectors, key=lambda key: key.name)), tuple(images))


def action_keys(space: Mapping[str, Space]) -> tuple[Key, ...]:
    """The keys the policy chooses, sorted; `reset` belongs to the environment's driver."""
    check_actions(space)
    return tuple(_key(name, entry) for name, entry in sorted(space.items()) if name != "reset")


def _key(name: str, space: Space) -> Key:
    if not space.discrete:
        return Key(name, space.shape)
    choices = tuple(int(n) for n in np.ravel(space.classes))
    low = int(space.low.flat[0])
    may_miss = space.dtype.kind == "i" and low >= 0
    return Key(name, space.shape, choices, low, may_miss=may_miss)


def embed_actions(
    keys: tuple[Key, ...], actions: Mapping[str, Array], dtype: jnp.dtype
) -> Float[Array, "*batch width"]:
    """Action vector: one-hots and raw numbers in sorted key order."""
    parts = [
        key.one_hot(actions[key.name], dtype)
        if key.discrete
        else key.flat(actions[key.name]).astype(dtype)
        for key in keys
    ]
    return jnp.concatenate(parts, -1)
