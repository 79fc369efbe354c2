"""The networks, and the losses that teach the world model from replayed sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.codec import Decoder, Encoder
from dreamfleet.agents.dreamer.config import LossConfig, ModelConfig
from dreamfleet.agents.dreamer.heads import Head, Policy
from dreamfleet.agents.dreamer.keys import Key, ObsKeys
from dreamfleet.agents.dreamer.rssm import RSSM, Observed, State


class Networks(eqx.Module):
    """Everything the optimizer trains."""

    encoder: Encoder
    dynamics: RSSM
    decoder: Decoder
    reward: Head
    cont: Head
    actor: Policy
    critic: Head

    @classmethod
    def init(
        cls, rng: np.random.Generator, config: ModelConfig, obs: ObsKeys, actions: tuple[Key, ...]
    ) -> Networks:
        tokens = config.units if obs.vectors else 0
        if obs.images:
            factor = 2 ** len(config.mults)
            height, width = obs.images[0].height // factor, obs.images[0].width // factor
            tokens += height * width * config.depth * config.mults[-1]
        width = sum(key.width for key in actions)
        return cls(
            encoder=Encoder.init(rng, config, obs),
            dynamics=RSSM.init(rng, config, width, tokens),
            decoder=Decoder.init(rng, config, obs),
            reward=Head.init(rng, config, config.reward_layers, config.bins, 0.0),
            cont=Head.init(rng, config, config.continue_layers, 1, 1.0),
            actor=Policy.init(rng, config, actions),
            critic=Head.init(rng, config, config.critic_layers, config.bins, 0.0),
        )


class WorldModelResult(NamedTuple):
    """What the actor-critic and the report need from a world-model pass."""

    observed: Observed
    losses: dict[str, Float[Array, "batch time"]]
    predictions: dict[str, Array]


def world_model_losses(
    nets: Networks,
    carry: State,
    obs: Mapping[str, Array],
    action: Float[Array, "batch time width"],
    config: LossConfig,
    uniform: Float[Array, "batch time variables"] | None = None,
    teacher: Float[Array, "batch time stoch"] | None = None,
) -> WorldModelResult:
    """Losses of every step; `action` holds the vectors of the previous actions."""
    tokens = nets.encoder(obs)
    observed = nets.dynamics.observe(carry, tokens, action, obs["is_first"], uniform, teacher)
    state = observed.state
    dynamics, representation = nets.dynamics.kl_losses(
        observed.posterior, observed.prior, config.free_nats
    )
    predictions = nets.decoder(state)
    reconstruction = nets.decoder.losses(predictions, obs)
    feature = state if config.reward_grad else jax.lax.stop_gradient(state)
    reward = nets.reward(feature)
    target = dist.twohot_target(obs["reward"], reward.shape[-1])
    losses = {
        **{f"reconstruction/{key}": value for key, value in reconstruction.items()},
        "reward": dist.twohot_loss(reward, target),
        "continue": dist.bernoulli_loss(
            nets.cont(state)[..., 0], continue_target(obs["is_terminal"], config)
        ),
        "dynamics": dynamics,
        "representation": representation,
    }
    return WorldModelResult(observed, losses, predictions)


def continue_target(terminal: Array, config: LossConfig) -> Float[Array, "..."]:
    """One while the episode goes on, with the discount learned into it where configured."""
    alive = 1.0 - terminal.astype(jnp.float32)
    return alive * (1.0 - 1.0 / config.horizon) if config.continue_discount else alive
