"""Heads on the features of a state: reward, value, continuation, mask of actions and policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.config import ModelConfig
from dreamfleet.agents.dreamer.dynamics import Parts
from dreamfleet.agents.dreamer.features import IMPOSSIBLE, Feature
from dreamfleet.agents.dreamer.layers import MLP, Linear
from dreamfleet.masks import ActionMask


class Head(eqx.Module):
    """An MLP on the features of a state, with one output layer."""

    mlp: MLP
    out: Linear

    @classmethod
    def init(
        cls,
        rng: np.random.Generator,
        inputs: int,
        units: int,
        layers: int,
        outputs: int,
        scale: float,
    ) -> Head:
        return cls(MLP.init(rng, inputs, units, layers), Linear.init(rng, units, outputs, scale))

    def __call__(self, features: Parts) -> Float[Array, "*batch outputs"]:
        return self.out(self.mlp(*features))


class Normal(NamedTuple):
    """A diagonal normal distribution."""

    mean: Float[Array, "..."]
    std: Float[Array, "..."]


Choice = Normal | Float[Array, "..."]
"""Distribution of one action key: a normal, or the logits of categoricals."""


Allowed = Bool[Array, "..."] | None
"""Which choices of the only action are allowed, shaped like its logits; None for all."""


class Policy(eqx.Module):
    """A distribution over every action key, from one shared MLP."""

    mlp: MLP
    outputs: dict[str, Linear]
    actions: tuple[Feature, ...] = eqx.field(static=True)
    min_std: float = eqx.field(static=True)
    max_std: float = eqx.field(static=True)
    mask: ActionMask | None = eqx.field(static=True, default=None)
    """Of the only action, if it has one."""

    @classmethod
    def init(
        cls,
        rng: np.random.Generator,
        inputs: int,
        config: ModelConfig,
        actions: tuple[Feature, ...],
        mask: ActionMask | None = None,
    ) -> Policy:
        outputs = {}
        for action in actions:
            for part in ("logits",) if action.discrete else ("mean", "stddev"):
                name = f"{action.name}.{part}"
                outputs[name] = Linear.init(rng, config.units, action.width, 0.01)
        mlp = MLP.init(rng, inputs, config.units, config.actor_layers)
        return cls(mlp, outputs, actions, config.min_std, config.max_std, mask)

    def __call__(self, features: Parts, allowed: Allowed = None) -> dict[str, Choice]:
        """The distributions; what is not `allowed` has probability 0."""
        x = self.mlp(*features)
        result: dict[str, Choice] = {}
        for action in self.actions:
            name = action.name
            if action.discrete:
                logits = self.outputs[f"{name}.logits"](x).astype(jnp.float32)
                logits = action.mask_logits(logits)
                result[name] = logits if allowed is None else mask_logits(logits, allowed)
                continue
            shape = (*x.shape[:-1], *action.shape)
            mean = self.outputs[f"{name}.mean"](x).astype(jnp.float32).reshape(shape)
            raw = self.outputs[f"{name}.stddev"](x).reshape(shape)
            std = dist.bounded_std(raw, self.min_std, self.max_std)
            result[name] = Normal(jnp.tanh(mean), std)
        return result


def mask_logits(logits: Float[Array, "..."], allowed: Bool[Array, "..."]) -> Float[Array, "..."]:
    """Logits of choices among those that are allowed."""
    return jnp.where(allowed, logits, jnp.asarray(IMPOSSIBLE, logits.dtype))


def predicted_mask(mask: ActionMask, logits: Float[Array, "*batch choices"]) -> Bool[Array, "..."]:
    """Which choices are allowed according to the mask's head: those that probably are, and of
    every element at least the likeliest."""
    table: Array = mask.table(logits.astype(jnp.float32), -jnp.inf)
    return (table > 0.0) | (table == jnp.max(table, -1, keepdims=True))


def draw_noise(
    key: PRNGKeyArray, features: tuple[Feature, ...], batch: tuple[int, ...]
) -> dict[str, Float[Array, "..."]]:
    """The random numbers that turn distributions into actions."""
    split = jax.random.split(key, len(features))
    return {
        feature.name: (jax.random.uniform if feature.discrete else jax.random.normal)(
            split[i], (*batch, *feature.shape), jnp.float32
        )
        for i, feature in enumerate(features)
    }


def sample_actions(
    features: tuple[Feature, ...],
    choices: Mapping[str, Choice],
    noise: Mapping[str, Float[Array, "..."]],
    *,
    masked: bool = False,
) -> dict[str, Array]:
    """One action for each key: int32 for discrete ones, unclipped float32 for continuous ones."""
    actions = {}
    sample = dist.sample_possible if masked else dist.sample_index
    for feature in features:
        choice = choices[feature.name]
        if isinstance(choice, Normal):
            actions[feature.name] = choice.mean + choice.std * noise[feature.name]
        else:
            index = sample(jax.nn.softmax(choice, -1), noise[feature.name])
            actions[feature.name] = index + feature.low
    return actions


def mode_actions(features: tuple[Feature, ...], choices: Mapping[str, Choice]) -> dict[str, Array]:
    """The mode of every distribution, in the form of `sample_actions`."""
    actions = {}
    for feature in features:
        choice = choices[feature.name]
        if isinstance(choice, Normal):
            actions[feature.name] = choice.mean
        else:
            actions[feature.name] = jnp.argmax(choice, -1).astype(jnp.int32) + feature.low
    return actions


def action_log_prob(
    features: tuple[Feature, ...],
    choices: Mapping[str, Choice],
    actions: Mapping[str, Array],
    rank: int,
) -> Float[Array, "*batch"]:
    """Log-probability of stopped actions, summed over keys and dimensions; `rank` batch axes."""
    total = jnp.zeros(())
    for feature in features:
        choice, action = choices[feature.name], jax.lax.stop_gradient(actions[feature.name])
        if isinstance(choice, Normal):
            logp = dist.normal_log_prob(choice.mean, choice.std, action)
        else:
            logp = dist.categorical_log_prob(choice, action - feature.low)
        summed = jnp.sum(logp, tuple(range(rank, logp.ndim)))
        total = summed if total.ndim == 0 else total + summed
    return total


def action_entropies(choices: Mapping[str, Choice], rank: int) -> dict[str, Float[Array, "*batch"]]:
    """Entropy of each key, summed over its dimensions; `rank` batch axes."""
    result = {}
    for name, choice in choices.items():
        if isinstance(choice, Normal):
            entropy = dist.normal_entropy(choice.std)
        else:
            entropy = dist.categorical_entropy(choice)
        result[name] = jnp.sum(entropy, tuple(range(rank, entropy.ndim)))
    return result
