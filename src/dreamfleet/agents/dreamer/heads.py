"""Heads on the latent state: reward, value, continuation and policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.config import ModelConfig
from dreamfleet.agents.dreamer.keys import Key
from dreamfleet.agents.dreamer.nets import MLP, Linear
from dreamfleet.agents.dreamer.rssm import State


class Head(eqx.Module):
    """An MLP on [deter, stoch] with one output layer."""

    mlp: MLP
    out: Linear

    @classmethod
    def init(
        cls, rng: np.random.Generator, config: ModelConfig, layers: int, outputs: int, scale: float
    ) -> Head:
        feature = config.deter + config.stoch * config.classes
        return cls(
            MLP.init(rng, feature, config.units, layers),
            Linear.init(rng, config.units, outputs, scale),
        )

    def __call__(self, state: State) -> Float[Array, "*batch outputs"]:
        return self.out(self.mlp(state.deter, state.stoch))


class Normal(NamedTuple):
    """A diagonal normal distribution."""

    mean: Float[Array, "..."]
    std: Float[Array, "..."]


Choice = Normal | Float[Array, "..."]
"""Distribution of one action key: a normal, or the logits of categoricals."""


class Policy(eqx.Module):
    """A distribution over every action key, from one shared MLP."""

    mlp: MLP
    outputs: dict[str, Linear]
    keys: tuple[Key, ...] = eqx.field(static=True)
    min_std: float = eqx.field(static=True)
    max_std: float = eqx.field(static=True)

    @classmethod
    def init(cls, rng: np.random.Generator, config: ModelConfig, keys: tuple[Key, ...]) -> Policy:
        feature = config.deter + config.stoch * config.classes
        outputs = {}
        for entry in keys:
            for part in ("logits",) if entry.discrete else ("mean", "stddev"):
                name = f"{entry.name}.{part}"
                outputs[name] = Linear.init(rng, config.units, entry.width, 0.01)
        mlp = MLP.init(rng, feature, config.units, config.actor_layers)
        return cls(mlp, outputs, keys, config.min_std, config.max_std)

    def __call__(self, state: State) -> dict[str, Choice]:
        return self.choices(self.mlp(state.deter, state.stoch))

    def choices(self, x: Float[Array, "*batch units"]) -> dict[str, Choice]:
        """The distributions, from the MLP's features."""
        result: dict[str, Choice] = {}
        for key in self.keys:
            if key.discrete:
                logits = self.outputs[f"{key.name}.logits"](x).astype(jnp.float32)
                result[key.name] = key.mask_logits(logits)
                continue
            shape = (*x.shape[:-1], *key.shape)
            mean = self.outputs[f"{key.name}.mean"](x).astype(jnp.float32).reshape(shape)
            raw = self.outputs[f"{key.name}.stddev"](x).reshape(shape)
            std = dist.bounded_std(raw, self.min_std, self.max_std)
            result[key.name] = Normal(jnp.tanh(mean), std)
        return result


def draw_noise(
    key: PRNGKeyArray, keys: tuple[Key, ...], batch: tuple[int, ...]
) -> dict[str, Float[Array, "..."]]:
    """The random numbers that turn distributions into actions."""
    split = jax.random.split(key, len(keys))
    return {
        entry.name: (jax.random.uniform if entry.discrete else jax.random.normal)(
            split[i], (*batch, *entry.shape), jnp.float32
        )
        for i, entry in enumerate(keys)
    }


def sample_actions(
    keys: tuple[Key, ...],
    choices: Mapping[str, Choice],
    noise: Mapping[str, Float[Array, "..."]],
) -> dict[str, Array]:
    """One action a key: int32 for discrete ones, unclipped float32 for continuous ones."""
    actions = {}
    for key in keys:
        choice = choices[key.name]
        if isinstance(choice, Normal):
            actions[key.name] = choice.mean + choice.std * noise[key.name]
        else:
            index = dist.sample_index(jax.nn.softmax(choice, -1), noise[key.name])
            actions[key.name] = index + key.low
    return actions


def likeliest_actions(keys: tuple[Key, ...], choices: Mapping[str, Choice]) -> dict[str, Array]:
    """The mode of every distribution, in the form of `sample_actions`."""
    actions = {}
    for key in keys:
        choice = choices[key.name]
        if isinstance(choice, Normal):
            actions[key.name] = choice.mean
        else:
            actions[key.name] = jnp.argmax(choice, -1).astype(jnp.int32) + key.low
    return actions


def action_log_prob(
    keys: tuple[Key, ...], choices: Mapping[str, Choice], actions: Mapping[str, Array], rank: int
) -> Float[Array, "*batch"]:
    """Log-probability of stopped actions, summed over keys and dimensions; `rank` batch axes."""
    total = jnp.zeros(())
    for key in keys:
        choice, action = choices[key.name], jax.lax.stop_gradient(actions[key.name])
        if isinstance(choice, Normal):
            logp = dist.normal_log_prob(choice.mean, choice.std, action)
        else:
            logp = dist.categorical_log_prob(choice, action - key.low)
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
