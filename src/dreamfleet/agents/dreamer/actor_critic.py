"""Policy and value learned in imagination.

Imagination needs no gradient: the policy follows REINFORCE for discrete and continuous actions
alike, so the rollout runs outside of differentiation and only the heads on the imagined states are
differentiated. Imagined arrays have time first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.config import LossConfig
from dreamfleet.agents.dreamer.heads import (
    Head,
    Policy,
    action_entropies,
    action_log_prob,
    draw_noise,
    sample_actions,
)
from dreamfleet.agents.dreamer.keys import embed_actions
from dreamfleet.agents.dreamer.nets import MLP, matmul_parts
from dreamfleet.agents.dreamer.returns import ReturnRange, lambda_return
from dreamfleet.agents.dreamer.rssm import Latent, State
from dreamfleet.agents.dreamer.world_model import Networks

Metrics = dict[str, Float[Array, ""]]


class Predictions(NamedTuple):
    """What the world model and the slow critic say about imagined states."""

    reward: Float[Array, "*steps rows"]
    cont: Float[Array, "*steps rows"]
    slow_value: Float[Array, "*steps rows"]


class Rollout(NamedTuple):
    """Imagined states with the actions taken at them, and what the heads say."""

    states: State
    actions: dict[str, Array]
    value: Float[Array, "steps_plus_one rows"]
    """Of all states, the final one included."""
    predictions: Predictions
    """On all states, the final one included."""


def imagine(
    nets: Networks, slow_critic: Head, start: State, length: int, key: PRNGKeyArray
) -> Rollout:
    """Follow the policy inside the model for `length` steps.

    Heads that need no gradient are evaluated along the way, while the states are in the cache.
    """
    dynamics, actor = nets.dynamics, nets.actor
    rows = start.deter.shape[0]
    key_action, key_state = jax.random.split(key)
    noise = draw_noise(key_action, actor.keys, (length, rows))
    uniform = jax.random.uniform(key_state, (length, rows, dynamics.variables))
    heads = (nets.critic, nets.reward, nets.cont, slow_critic)

    def look(state: State) -> tuple[Float[Array, "rows units"], tuple[Array, Predictions]]:
        acting, *features = _features([actor.mlp, *(head.mlp for head in heads)], state)
        value, reward, cont, slow = (head.out(x) for head, x in zip(heads, features, strict=True))
        cont_prob = jax.nn.sigmoid(cont[..., 0].astype(jnp.float32))
        predictions = Predictions(dist.twohot_mean(reward), cont_prob, dist.twohot_mean(slow))
        return acting, (dist.twohot_mean(value), predictions)

    def step(
        latent: Latent, draws: tuple[dict[str, Array], Array]
    ) -> tuple[Latent, tuple[State, dict[str, Array], tuple[Array, Predictions]]]:
        noise, uniform = draws
        acting, seen = look(latent.state)
        actions = sample_actions(actor.keys, actor.choices(acting), noise)
        vector = embed_actions(actor.keys, actions, dynamics.dtype)
        following = dynamics.core(latent, dynamics.embed_action(vector))
        deter = following.state.deter
        stoch = dynamics.sample(dynamics.prior_of(deter), uniform)
        outputs = (latent.state, actions, seen)
        return following._replace(state=State(deter, stoch)), outputs

    last, (states, actions, seen) = jax.lax.scan(step, dynamics.enter(start), (noise, uniform))
    _, final = look(last.state)
    value, predictions = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), seen, final)
    return Rollout(states, actions, value, predictions)


class Targets(NamedTuple):
    """What the imagined steps teach; nothing here carries a gradient."""

    advantage: Float[Array, "steps rows"]
    weight: Float[Array, "steps rows"]
    returns: Float[Array, "steps rows"]
    slow_value: Float[Array, "steps rows"]


def imagination_targets(
    value: Float[Array, "steps_plus_one rows"],
    predictions: Predictions,
    range_: ReturnRange,
    config: LossConfig,
    *,
    update: bool = True,
) -> tuple[Targets, ReturnRange, Metrics]:
    """Returns, advantages and weights of a rollout, from predictions on all of its states."""
    value, predictions = jax.lax.stop_gradient((value, predictions))
    reward, cont, slow_value = predictions
    discount = 1.0 if config.continue_discount else 1.0 - 1.0 / config.horizon
    weight = jnp.cumprod(discount * cont, 0) / discount
    bootstrap = slow_value if config.slow_target else value
    returns = lambda_return(
        reward, jnp.zeros_like(cont), 1.0 - cont, bootstrap, discount, config.lambda_
    )
    range_ = range_.update(returns, config) if update else range_
    scale = range_.scale(config)
    advantage = (returns - bootstrap[:-1]) / scale
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
        "weight": weight.mean(),
    }
    return Targets(advantage, weight[:-1], returns, slow_value[:-1]), range_, metrics


def policy_loss(
    log_prob: Float[Array, "*steps rows"],
    entropy: Float[Array, "*steps rows"],
    targets: Targets,
    config: LossConfig,
) -> Float[Array, "*steps rows"]:
    """REINFORCE with an entropy bonus."""
    return -targets.weight * (targets.advantage * log_prob + config.entropy_scale * entropy)


def value_loss(
    logits: Float[Array, "*steps rows bins"], targets: Targets, config: LossConfig
) -> Float[Array, "*steps rows"]:
    return targets.weight * _value_loss(logits, targets.returns, targets.slow_value, config)


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
    rollout = imagine(frozen, slow_critic, start, config.imag_length, key)
    targets, range_, metrics = imagination_targets(
        rollout.value, rollout.predictions, range_, config, update=update
    )
    learned = learn_from(nets.actor, nets.critic, rollout, targets, config)
    losses = {"policy": learned.policy, "value": learned.value}
    metrics |= _entropy_metrics(nets.actor, learned.entropies)
    if config.replay_value_scale:
        boot = targets.returns[0].reshape(batch, starts).T
        losses["replay_value"] = _replay_value(nets, slow_critic, tail, obs, boot, config)
    return ActorCriticResult(losses, range_, metrics)


class Learned(NamedTuple):
    """Mean losses over all imagined steps, and the mean entropy of each action key."""

    policy: Float[Array, ""]
    value: Float[Array, ""]
    entropies: dict[str, Float[Array, ""]]


def learn_from(
    actor: Policy, critic: Head, rollout: Rollout, targets: Targets, config: LossConfig
) -> Learned:
    """Losses of actor and critic on a rollout, one imagined step after the other.

    Gradients are worked out together with the losses, while a step's activations are in the
    cache, and are handed to the backward pass as they are. The policy loss only moves the actor,
    the value loss only the critic.
    """

    def step_losses(models: tuple[Policy, Head], step: tuple[Any, ...]) -> tuple[Array, Learned]:
        actor, critic = models
        states, actions, targets = step
        acting, judging = _features([actor.mlp, critic.mlp], states)
        choices = actor.choices(acting)
        entropies = action_entropies(choices, rank=1)
        log_prob = action_log_prob(actor.keys, choices, actions, rank=1)
        entropy = sum(entropies.values(), jnp.zeros_like(log_prob))
        policy = policy_loss(log_prob, entropy, targets, config).mean()
        value = value_loss(critic.out(judging), targets, config).mean()
        means = {name: jax.lax.stop_gradient(each.mean()) for name, each in entropies.items()}
        return policy + value, Learned(policy, value, means)

    steps = (rollout.states, rollout.actions, targets)

    def average(models: tuple[Policy, Head]) -> tuple[Learned, Any]:
        def body(total: Any, step: Any) -> tuple[Any, Learned]:
            grads, learned = jax.grad(step_losses, has_aux=True)(models, step)
            return jax.tree.map(jnp.add, total, grads), learned

        zeros = jax.tree.map(jnp.zeros_like, models)
        grads, learned = jax.lax.scan(body, zeros, steps)
        count = targets.weight.shape[0]
        mean = jax.tree.map(lambda x: x.mean(0), learned)
        return mean, jax.tree.map(lambda x: x / count, grads)

    @jax.custom_vjp
    def losses(models: tuple[Policy, Head]) -> Learned:
        return average(models)[0]

    def backward(grads: tuple[Policy, Head], cotangent: Learned) -> tuple[tuple[Policy, Head]]:
        by_policy = jax.tree.map(lambda x: x * cotangent.policy.astype(x.dtype), grads[0])
        by_value = jax.tree.map(lambda x: x * cotangent.value.astype(x.dtype), grads[1])
        return ((by_policy, by_value),)

    losses.defvjp(average, backward)
    return losses((actor, critic))


def _replay_value(
    nets: Networks,
    slow_critic: Head,
    state: State,
    obs: dict[str, Array],
    bootstrap: Float[Array, "steps rows"],
    config: LossConfig,
) -> Float[Array, "steps_minus_one rows"]:
    starts = state.deter.shape[1]
    if not config.replay_value_grad:
        state = jax.lax.stop_gradient(state)
    reward, last, terminal = (
        obs[name][:, -starts:].T for name in ("reward", "is_last", "is_terminal")
    )
    loss, _ = replay_value_losses(
        nets.critic(state).swapaxes(0, 1),
        dist.twohot_mean(slow_critic(jax.lax.stop_gradient(state))).T,
        bootstrap,
        reward,
        last,
        terminal,
        config,
    )
    return loss


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


def _entropy_metrics(actor: Policy, entropies: dict[str, Float[Array, ""]]) -> Metrics:
    """Entropy of each action key, and where it lies between its least and its most."""
    metrics = {}
    for key in actor.keys:
        entropy = entropies[key.name]
        metrics[f"entropy/{key.name}"] = entropy
        if key.discrete:
            low, high = jnp.zeros(()), jnp.log(jnp.asarray(key.choices, jnp.float32)).sum()
        else:
            bounds = dist.normal_entropy(jnp.array([actor.min_std, actor.max_std]))
            low, high = key.elements * bounds[0], key.elements * bounds[1]
        metrics[f"randomness/{key.name}"] = (entropy - low) / (high - low)
    return metrics
