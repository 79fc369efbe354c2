"""Actor and critic: what they learn from imagined steps, and the critic from replayed ones too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.config import LossConfig
from dreamfleet.agents.dreamer.forms import gradient_over_steps
from dreamfleet.agents.dreamer.heads import (
    Head,
    Policy,
    action_entropies,
    action_log_prob,
)
from dreamfleet.agents.dreamer.imagination import Metrics, Rollout, Targets, lambda_return
from dreamfleet.agents.dreamer.networks import Networks
from dreamfleet.agents.dreamer.world_model import Seen, Term, stop


def policy_loss(
    log_prob: Float[Array, "*steps rows"],
    entropy: Float[Array, "*steps rows"],
    targets: Targets,
    config: LossConfig,
) -> Float[Array, "*steps rows"]:
    """-weight_t [advantage_t ln pi(a_t | s_t) + entropy_scale entropy_t]: REINFORCE."""
    return -targets.weight * (targets.advantage * log_prob + config.entropy_scale * entropy)


def value_loss(
    logits: Float[Array, "*steps rows bins"], targets: Targets, config: LossConfig
) -> Float[Array, "*steps rows"]:
    """weight_t times the two-hot loss towards the imagined returns and the slow critic."""
    return targets.weight * critic_loss(logits, targets.returns, targets.slow_value, config)


def critic_loss(
    logits: Float[Array, "*batch bins"],
    returns: Float[Array, "*batch"],
    slow_value: Float[Array, "*batch"],
    config: LossConfig,
) -> Float[Array, "*batch"]:
    """twohot(v; R) + slow_regularizer twohot(v; slow v)."""
    bins = logits.shape[-1]
    target = dist.twohot_target(returns, bins)
    return dist.twohot_loss(
        logits, target + config.slow_regularizer * dist.twohot_target(slow_value, bins)
    )


class Behaviour(NamedTuple):
    """Mean losses over all imagined steps, and the mean entropy of each action key."""

    losses: dict[str, Float[Array, ""]]
    entropies: dict[str, Float[Array, ""]]


def behaviour_gradient(
    actor: Policy, critic: Head, rollout: Rollout, targets: Targets, config: LossConfig
) -> tuple[Behaviour, tuple[Policy, Head]]:
    """The losses of actor and critic on a rollout, and their weighted gradient in float32."""

    def loss(models: tuple[Policy, Head], steps: Any) -> tuple[Float[Array, ""], Behaviour]:
        actor, critic = models
        features, actions, allowed, targets = steps
        rank = targets.weight.ndim
        choices = actor(features, allowed)
        entropies = action_entropies(choices, rank)
        log_prob = action_log_prob(actor.actions, choices, actions, rank)
        entropy = sum(entropies.values(), jnp.zeros_like(log_prob))
        losses = {
            "policy": policy_loss(log_prob, entropy, targets, config).mean(),
            "value": value_loss(critic(features), targets, config).mean(),
        }
        total = sum(TERMS[name].scale(config) * each for name, each in losses.items())
        means = {name: each.mean() for name, each in entropies.items()}
        return jnp.asarray(total), stop(Behaviour(losses, means))

    steps = (rollout.features, rollout.actions, rollout.allowed, targets)
    return gradient_over_steps(loss, (actor, critic), steps)


def replay_value_loss(
    nets: Networks,
    slow_critic: Head,
    seen: Seen,
    bootstrap: Float[Array, "K B"],
    config: LossConfig,
) -> Float[Array, "K_minus_one B"]:
    """The critic on the last K replayed states, with imagined returns as bootstraps."""
    last = bootstrap.shape[0]
    features = jax.tree.map(lambda x: x[:, -last:], seen.features)
    if not config.replay_value_grad:
        features = stop(features)
    reward, ends, terminal = (
        seen.obs[name][:, -last:].T for name in ("reward", "is_last", "is_terminal")
    )
    slow_value = dist.twohot_mean(slow_critic(stop(features))).T
    logits = nets.critic(features).swapaxes(0, 1)
    return replay_value_losses(logits, slow_value, bootstrap, reward, ends, terminal, config)[0]


def replay_value_losses(
    logits: Float[Array, "steps rows bins"],
    slow_value: Float[Array, "steps rows"],
    bootstrap: Float[Array, "steps rows"],
    reward: Float[Array, "steps rows"],
    last: Bool[Array, "steps rows"],
    terminal: Bool[Array, "steps rows"],
    config: LossConfig,
) -> tuple[Float[Array, "steps_minus_one rows"], Float[Array, "steps_minus_one rows"]]:
    """The losses, and the returns that they move the critic towards."""
    last_, terminal_ = last.astype(jnp.float32), terminal.astype(jnp.float32)
    returns = lambda_return(
        reward, last_, terminal_, bootstrap, 1.0 - 1.0 / config.horizon, config.return_lambda
    )
    returns, slow_value = stop((returns, slow_value))
    loss = critic_loss(logits[:-1], returns, slow_value[:-1], config)
    return (1.0 - last_[:-1]) * loss, returns


TERMS: Mapping[str, Term] = {
    "policy": Term(policy_loss, lambda loss: loss.policy_scale, "actor"),
    "value": Term(value_loss, lambda loss: loss.value_scale, "critic"),
    "replay_value": Term(
        replay_value_loss, lambda loss: loss.replay_value_scale, "encoder dynamics critic"
    ),
}
"""The losses of actor and critic."""


def entropy_metrics(actor: Policy, entropies: Mapping[str, Float[Array, ""]]) -> Metrics:
    """Entropy of each action key, and where it lies between its least and its most."""
    metrics = {}
    for action in actor.actions:
        entropy = entropies[action.name]
        metrics[f"entropy/{action.name}"] = entropy
        if action.discrete:
            low, high = jnp.zeros(()), jnp.log(jnp.asarray(action.choices, jnp.float32)).sum()
        else:
            bounds = dist.normal_entropy(jnp.array([actor.min_std, actor.max_std]))
            low, high = action.elements * bounds[0], action.elements * bounds[1]
        # Both are the same if there is one choice only.
        metrics[f"randomness/{action.name}"] = (entropy - low) / jnp.maximum(high - low, 1e-8)
    return metrics
