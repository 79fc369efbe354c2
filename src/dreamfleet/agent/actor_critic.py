"""Policy and value learned in imagination.

Imagination needs no gradient: the policy follows REINFORCE for discrete and continuous actions
alike, so the rollout runs outside of differentiation and only the heads on the imagined states are
differentiated. Imagined arrays have time first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from dreamfleet.agent import distributions as dist
from dreamfleet.agent.config import LossConfig
from dreamfleet.agent.heads import (
    Head,
    Policy,
    action_entropies,
    action_log_prob,
    draw_noise,
    sample_actions,
)
from dreamfleet.agent.keys import Key, embed_actions
from dreamfleet.agent.nets import MLP, matmul_parts
from dreamfleet.agent.returns import ReturnRange, lambda_return
from dreamfleet.agent.rssm import RSSM, Latent, State
from dreamfleet.agent.world_model import Networks

Metrics = dict[str, Float[Array, ""]]


class Rollout(NamedTuple):
    """Imagined states with the actions taken at them, and the state after the last action."""

    states: State
    actions: dict[str, Array]
    final: State


def imagine(dynamics: RSSM, actor: Policy, start: State, length: int, key: PRNGKeyArray) -> Rollout:
    """Follow the policy inside the model for `length` steps."""
    rows = start.deter.shape[0]
    key_action, key_state = jax.random.split(key)
    noise = draw_noise(key_action, actor.keys, (length, rows))
    uniform = jax.random.uniform(key_state, (length, rows, dynamics.variables))

    def step(
        latent: Latent, draws: tuple[dict[str, Array], Array]
    ) -> tuple[Latent, tuple[State, dict[str, Array]]]:
        noise, uniform = draws
        actions = sample_actions(actor.keys, actor(latent.state), noise)
        vector = embed_actions(actor.keys, actions, dynamics.dtype)
        following = dynamics.core(latent, dynamics.embed_action(vector))
        deter = following.state.deter
        stoch = dynamics.sample(dynamics.prior_of(deter), uniform)
        return following._replace(state=State(deter, stoch)), (latent.state, actions)

    final, (states, actions) = jax.lax.scan(step, dynamics.enter(start), (noise, uniform))
    return Rollout(states, actions, final.state)


class ImaginationLosses(NamedTuple):
    """Losses (steps, rows) and what follows from the imagined returns."""

    policy: Float[Array, "steps rows"]
    value: Float[Array, "steps rows"]
    returns: Float[Array, "steps rows"]
    range: ReturnRange
    metrics: Metrics


def imagination_losses(
    log_prob: Float[Array, "steps rows"],
    entropy: Float[Array, "steps rows"],
    value_logits: Float[Array, "steps rows bins"],
    value: Float[Array, "steps_plus_one rows"],
    slow_value: Float[Array, "steps_plus_one rows"],
    reward: Float[Array, "steps_plus_one rows"],
    cont: Float[Array, "steps_plus_one rows"],
    range_: ReturnRange,
    config: LossConfig,
    *,
    update: bool = True,
) -> ImaginationLosses:
    """Actor and critic losses of a rollout.

    Predictions (`value`, `slow_value`, `reward`, `cont`) cover one state more than there are
    actions. Gradients flow into `log_prob`, `entropy` and `value_logits` only.
    """
    value, slow_value, reward, cont = jax.lax.stop_gradient((value, slow_value, reward, cont))
    discount = 1.0 if config.continue_discount else 1.0 - 1.0 / config.horizon
    weights = jnp.cumprod(discount * cont, 0) / discount
    weight = weights[:-1]
    bootstrap = slow_value if config.slow_target else value
    returns = lambda_return(
        reward, jnp.zeros_like(cont), 1.0 - cont, bootstrap, discount, config.lambda_
    )
    range_ = range_.update(returns, config) if update else range_
    scale = range_.scale(config)
    advantage = (returns - bootstrap[:-1]) / scale
    policy = -weight * (advantage * log_prob + config.entropy_scale * entropy)
    value_loss = weight * _value_loss(value_logits, returns, slow_value[:-1], config)
    normalised = (returns - range_.low) / scale
    metrics = {
        "adv": advantage.mean(),
        "adv_std": advantage.std(),
        "adv_mag": jnp.abs(advantage).mean(),
        "reward": reward.mean(),
        "continue": cont.mean(),
        "return": normalised.mean(),
        "return_min": normalised.min(),
        "return_max": normalised.max(),
        "return_rate": (jnp.abs(normalised) >= 1.0).astype(jnp.float32).mean(),
        "return_scale": scale,
        "value": value.mean(),
        "slow_value": slow_value.mean(),
        "target": returns.mean(),
        "weight": weights.mean(),
    }
    return ImaginationLosses(policy, value_loss, returns, range_, metrics)


def replay_value_losses(
    value_logits: Float[Array, "steps rows bins"],
    slow_value: Float[Array, "steps rows"],
    bootstrap: Float[Array, "steps rows"],
    reward: Float[Array, "steps rows"],
    last: Bool[Array, "steps rows"],
    terminal: Bool[Array, "steps rows"],
    config: LossConfig,
) -> tuple[Float[Array, "steps_minus_one rows"], Float[Array, "steps_minus_one rows"]]:
    """Value loss on replayed states, and its returns; bootstraps are imagined returns."""
    last_, terminal_ = last.astype(jnp.float32), terminal.astype(jnp.float32)
    returns = lambda_return(
        reward, last_, terminal_, bootstrap, 1.0 - 1.0 / config.horizon, config.lambda_
    )
    returns, slow_value = jax.lax.stop_gradient((returns, slow_value))
    loss = _value_loss(value_logits[:-1], returns, slow_value[:-1], config)
    return (1.0 - last_[:-1]) * loss, returns


def _value_loss(
    logits: Float[Array, "*batch bins"],
    returns: Float[Array, "*batch"],
    slow: Float[Array, "*batch"],
    config: LossConfig,
) -> Float[Array, "*batch"]:
    bins = logits.shape[-1]
    target = dist.twohot_target(returns, bins)
    return dist.twohot_loss(
        logits, target + config.slow_regularizer * dist.twohot_target(slow, bins)
    )


class ActorCriticResult(NamedTuple):
    """Losses with row-major shapes, ready for averaging."""

    losses: dict[str, Float[Array, "..."]]
    range: ReturnRange
    metrics: Metrics


def actor_critic_losses(
    nets: Networks,
    slow_critic: Head,
    state: State,
    obs: dict[str, Array],
    range_: ReturnRange,
    config: LossConfig,
    key: PRNGKeyArray,
    *,
    update: bool = True,
) -> ActorCriticResult:
    """Imagine from the posterior `state` (batch, time, ...) of a sequence, then learn."""
    batch, time = state.deter.shape[:2]
    starts = min(config.imag_last or time, time)
    tail = jax.tree.map(lambda x: x[:, time - starts :], state)
    start = jax.tree.map(lambda x: x.reshape(batch * starts, -1), jax.lax.stop_gradient(tail))
    frozen = jax.lax.stop_gradient(nets)
    rollout = imagine(frozen.dynamics, frozen.actor, start, config.imag_length, key)
    rollout = jax.lax.stop_gradient(rollout)

    keys = nets.actor.keys
    actor_x, critic_x = _features([nets.actor.mlp, nets.critic.mlp], rollout.states)
    choices = nets.actor.choices(actor_x)
    entropies = action_entropies(choices, rank=2)
    value_logits = nets.critic.out(critic_x)
    predictions = _predict(frozen, slow_critic, rollout)
    final_value = dist.twohot_mean(frozen.critic(rollout.final))
    value = jnp.concatenate([dist.twohot_mean(value_logits), final_value[None]])
    result = imagination_losses(
        action_log_prob(keys, choices, rollout.actions, rank=2),
        sum(entropies.values(), jnp.zeros_like(value[:-1])),
        value_logits,
        value,
        predictions.slow_value,
        predictions.reward,
        predictions.cont,
        range_,
        config,
        update=update,
    )
    losses = {"policy": result.policy, "value": result.value}
    metrics = result.metrics | _entropy_metrics(keys, entropies, nets.actor)
    if config.replay_value_scale:
        losses["replay_value"] = _replay_value(nets, slow_critic, tail, obs, result, config)
    return ActorCriticResult(losses, result.range, metrics)


def _replay_value(
    nets: Networks,
    slow_critic: Head,
    state: State,
    obs: dict[str, Array],
    imagined: ImaginationLosses,
    config: LossConfig,
) -> Float[Array, "steps rows"]:
    batch, starts = state.deter.shape[:2]
    if not config.replay_value_grad:
        state = jax.lax.stop_gradient(state)
    reward, last, terminal = (
        obs[name][:, -starts:].T for name in ("reward", "is_last", "is_terminal")
    )
    loss, _ = replay_value_losses(
        nets.critic(state).swapaxes(0, 1),
        dist.twohot_mean(slow_critic(jax.lax.stop_gradient(state))).T,
        imagined.returns[0].reshape(batch, starts).T,
        reward,
        last,
        terminal,
        config,
    )
    return loss


class _Predictions(NamedTuple):
    """Scalar predictions on all states of a rollout, the final one included."""

    reward: Float[Array, "steps_plus_one rows"]
    cont: Float[Array, "steps_plus_one rows"]
    slow_value: Float[Array, "steps_plus_one rows"]


def _predict(frozen: Networks, slow_critic: Head, rollout: Rollout) -> _Predictions:
    heads = [frozen.reward, frozen.cont, slow_critic]
    columns = []
    for states in (rollout.states, jax.tree.map(lambda x: x[None], rollout.final)):
        features = _features([head.mlp for head in heads], states)
        reward, cont, slow = (head.out(x) for head, x in zip(heads, features, strict=True))
        columns.append(
            (
                dist.twohot_mean(reward),
                jax.nn.sigmoid(cont[..., 0].astype(jnp.float32)),
                dist.twohot_mean(slow),
            )
        )
    return _Predictions(*(jnp.concatenate(pair) for pair in zip(*columns, strict=True)))


def _features(mlps: Sequence[MLP], state: State) -> list[Float[Array, "*batch units"]]:
    """Several MLPs on the same states, their first layers in one wide product."""
    widths = [mlp.layers[0].kernel.shape[1] for mlp in mlps]
    kernel = jnp.concatenate([mlp.layers[0].kernel for mlp in mlps], 1)
    product = matmul_parts(state, kernel)
    offsets = [sum(widths[:i]) for i in range(len(widths))]
    return [
        mlp.after_first(product[..., offset : offset + width])
        for mlp, offset, width in zip(mlps, offsets, widths, strict=True)
    ]


def _entropy_metrics(keys: tuple[Key, ...], entropies: dict[str, Array], actor: Policy) -> Metrics:
    """Entropy of each action key, and where it lies between its least and its most."""
    metrics = {}
    for key in keys:
        entropy = entropies[key.name].mean()
        metrics[f"entropy/{key.name}"] = entropy
        if key.discrete:
            low, high = jnp.zeros(()), jnp.log(jnp.asarray(key.choices, jnp.float32)).sum()
        else:
            bounds = dist.normal_entropy(jnp.array([actor.min_std, actor.max_std]))
            low, high = key.elements * bounds[0], key.elements * bounds[1]
        metrics[f"randomness/{key.name}"] = (entropy - low) / (high - low)
    return metrics
