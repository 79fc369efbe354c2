"""The loss, from a replayed sequence to one number.

1. The world model learns to reconstruct observations, rewards and continuation, and to predict its
   own next state (`world_model_losses`). If the task has a mask of actions, it learns to predict
   that too, and the imagined policy obeys the predicted mask.
2. From the states of the sequence it imagines what follows under the policy (`imagine`). This needs
   no gradient: the policy follows REINFORCE for discrete and continuous actions alike, so the
   rollout runs outside of differentiation and only the heads on the imagined states are
   differentiated.
3. Actor and critic learn from the imagined returns (`actor_critic_losses`), the critic from
   replayed rewards as well.

Imagined arrays have time first, replayed ones (batch, time).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.config import DreamerConfig, LossConfig
from dreamfleet.agents.dreamer.features import embed_actions
from dreamfleet.agents.dreamer.heads import (
    Allowed,
    Head,
    Policy,
    action_entropies,
    action_log_prob,
    draw_noise,
    predicted_mask,
    sample_actions,
)
from dreamfleet.agents.dreamer.layers import MLP, cast, matmul_parts, per_device
from dreamfleet.agents.dreamer.networks import Networks
from dreamfleet.agents.dreamer.rssm import Observed, State
from dreamfleet.masks import ACTION_MASK, ActionMask

Metrics = dict[str, Float[Array, ""]]


class LossResult(NamedTuple):
    """What comes with the total loss."""

    losses: Metrics
    """The mean of each loss."""
    observed: Observed
    predictions: dict[str, Array]
    step_loss: Float[Array, "batch time"]
    """The weighted loss of the world model at each step."""
    returns: ReturnRange
    metrics: Metrics


def total_loss(
    nets: Networks,
    target_critic: Head,
    returns: ReturnRange,
    carry: State,
    obs: Mapping[str, Array],
    previous: Mapping[str, Array],
    key: PRNGKeyArray,
    config: DreamerConfig,
    *,
    update: bool,
) -> tuple[Float[Array, ""], LossResult]:
    """The weighted sum of all losses, each averaged over its own elements.

    Args:
        nets: All networks, in float32.
        target_critic: The exponential moving average (EMA) of the critic.
        returns: The normaliser of returns; it follows these returns if `update` is set.
        carry: The latent state before the sequence.
        obs: Observations of the sequence.
        previous: The actions before each step.
        key: Of all random draws.
        config: Settings.
        update: Whether this is training, and not a report.
    """
    dtype = jnp.dtype(config.execution.compute_dtype)
    key_observe, key_imagine = jax.random.split(key)
    shape = (*obs["is_first"].shape, config.model.stoch)
    uniform = jax.random.uniform(key_observe, shape)
    actions = embed_actions(nets.actor.actions, previous, dtype)

    def model_world(
        nets: Networks, carry: State, obs: Mapping[str, Array], actions: Array, uniform: Array
    ) -> tuple[Observed, dict[str, Array], dict[str, Array]]:
        nets = cast(nets, dtype)
        tokens = nets.encoder(obs)
        observed = nets.dynamics.observe(carry, tokens, actions, obs["is_first"], uniform)
        return observed, *world_model_losses(nets, observed, obs, config.loss)

    observed, world, predictions = per_device(model_world)(nets, carry, obs, actions, uniform)
    nets, target_critic = cast(nets, dtype), cast(target_critic, dtype)
    behaviour = actor_critic_losses(
        nets,
        jax.lax.stop_gradient(target_critic),
        observed.state,
        obs,
        returns,
        config.loss,
        key_imagine,
        update=update,
    )
    scales = loss_scales(config.loss, world.keys() | behaviour.losses.keys(), obs)
    means = {name: loss.mean() for name, loss in (world | behaviour.losses).items()}
    total = sum((scales[name] * mean for name, mean in means.items()), jnp.zeros(()))
    step_loss = sum((scales[name] * each for name, each in world.items()), jnp.zeros(shape[:2]))
    metrics = behaviour.metrics | latent_entropies(observed, config.model.unimix)
    result = LossResult(means, observed, predictions, step_loss, behaviour.range, metrics)
    return total, result


def loss_scales(
    config: LossConfig, losses: Iterable[str], obs: Mapping[str, Any]
) -> dict[str, float]:
    """The weight of every loss; floats among the reconstructed observations have another one."""
    known = {
        "reward": config.reward_scale,
        "continue": config.continue_scale,
        "mask": config.mask_scale,
        "dynamics": config.dynamics_scale,
        "representation": config.representation_scale,
        "policy": config.policy_scale,
        "value": config.value_scale,
        "replay_value": config.replay_value_scale,
    }

    def scale(name: str) -> float:
        if name in known:
            return known[name]
        key = name.removeprefix("reconstruction/")
        floats = key in obs and jnp.issubdtype(obs[key].dtype, jnp.floating)
        return config.reconstruction_scale * (config.float_scale if floats else 1.0)

    return {name: scale(name) for name in losses}


# --- world model ----------------------------------------------------------------------------------


def world_model_losses(
    nets: Networks, observed: Observed, obs: Mapping[str, Array], config: LossConfig
) -> tuple[dict[str, Float[Array, "batch time"]], dict[str, Array]]:
    """Losses of every step, and the decoder's predictions."""
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
    if nets.mask is not None and nets.actor.mask is not None:
        losses["mask"] = mask_loss(nets.actor.mask, nets.mask(state), obs[ACTION_MASK])
    return losses, predictions


def mask_loss(
    mask: ActionMask, logits: Float[Array, "*batch choices"], target: Array
) -> Float[Array, "*batch"]:
    """Loss of the choices that are predicted to be allowed; an empty mask teaches nothing."""
    each = dist.bernoulli_loss(logits, target.astype(bool).astype(jnp.float32))
    return jnp.where(mask.empty(target), 0.0, jnp.sum(each, -1))


def continue_target(terminal: Array, config: LossConfig) -> Float[Array, "..."]:
    """One while the episode continues, with the discount learned into it where configured."""
    alive = 1.0 - terminal.astype(jnp.float32)
    return alive * (1.0 - 1.0 / config.horizon) if config.continue_discount else alive


def latent_entropies(observed: Observed, unimix: float) -> Metrics:
    """Mean entropies of the prior and the posterior over the stochastic state."""
    return {
        name: dist.entropy_of_probs(dist.unimix_probs(logits, unimix)).sum(-1).mean()
        for name, logits in (
            ("prior_entropy", observed.prior),
            ("posterior_entropy", observed.posterior),
        )
    }


# --- imagination ----------------------------------------------------------------------------------


class Predictions(NamedTuple):
    """What the world model and the target critic say about imagined states."""

    reward: Float[Array, "*steps rows"]
    cont: Float[Array, "*steps rows"]
    target_value: Float[Array, "*steps rows"]


class Rollout(NamedTuple):
    """Imagined states with the actions taken at them, and what the heads predict."""

    states: State
    actions: dict[str, Array]
    value: Float[Array, "steps_plus_one rows"]
    """Of all states, the final one included."""
    predictions: Predictions
    """On all states, the final one included."""
    allowed: Allowed = None
    """Which choices the predicted masks allowed, of the states with actions."""


IMAGINATION = "imagination"
"""What the operations of a rollout are called in profiles and in compiled programs."""


def imagine(
    nets: Networks, target_critic: Head, start: State, length: int, key: PRNGKeyArray
) -> Rollout:
    """Follow the policy inside the model for `length` steps, in the form that suits the device.

    On a CPU the heads are evaluated along the way, while the states are in the cache. Elsewhere
    every operation in the loop is a kernel to be started, so they follow on all states at once.
    """
    dynamics, actor = nets.dynamics, nets.actor
    rows, dtype = start.deter.shape[0], start.deter.dtype
    key_action, key_state = jax.random.split(key)
    noise = draw_noise(key_action, actor.actions, (length, rows))
    variables = start.stoch.shape[-1] // dynamics.classes
    uniform = jax.random.uniform(key_state, (length, rows, variables))
    heads = (nets.critic, nets.reward, nets.cont, target_critic)

    def evaluate(*features: Float[Array, "*steps units"]) -> tuple[Array, Predictions]:
        value, reward, cont, target = (head.out(x) for head, x in zip(heads, features, strict=True))
        cont_prob = jax.nn.sigmoid(cont[..., 0].astype(jnp.float32))
        predictions = Predictions(dist.twohot_mean(reward), cont_prob, dist.twohot_mean(target))
        return dist.twohot_mean(value), predictions

    def act(
        latent: Any, acting: Float[Array, "rows units"], draws: tuple[dict[str, Array], Array]
    ) -> tuple[Any, dict[str, Array], Allowed]:
        noise, uniform = draws
        allowed = None
        if nets.mask is not None and actor.mask is not None:
            allowed = predicted_mask(actor.mask, nets.mask(latent.state))
        choices = actor.choices(acting, allowed)
        actions = sample_actions(actor.actions, choices, noise, masked=allowed is not None)
        vector = embed_actions(actor.actions, actions, dtype)
        return dynamics.imagine_step(latent, vector, uniform), actions, allowed

    def append(steps: Any, last: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), steps, last)

    def heads_along_the_way(start: State, *draws: Any) -> Rollout:
        mlps = [actor.mlp, *(head.mlp for head in heads)]

        def step(latent: Any, draws: Any) -> tuple[Any, tuple[Any, ...]]:
            acting, *features = _features(mlps, latent.state)
            following, actions, allowed = act(latent, acting, draws)
            return following, (latent.state, actions, evaluate(*features), allowed)

        last, outputs = jax.lax.scan(step, dynamics.enter(start), draws)
        states, actions, evaluated, allowed = outputs
        final = evaluate(*_features(mlps, last.state)[1:])
        value, predictions = append(evaluated, final)
        return Rollout(states, actions, value, predictions, allowed)

    def heads_at_once(start: State, *draws: Any) -> Rollout:
        def step(latent: Any, draws: Any) -> tuple[Any, tuple[Any, ...]]:
            acting = actor.mlp(latent.state.deter, latent.state.stoch)
            following, actions, allowed = act(latent, acting, draws)
            return following, (latent.state, actions, allowed)

        last, (states, actions, allowed) = jax.lax.scan(step, dynamics.enter(start), draws)
        features = _features([head.mlp for head in heads], append(states, last.state))
        value, predictions = evaluate(*features)
        return Rollout(states, actions, value, predictions, allowed)

    result: Rollout = jax.lax.platform_dependent(
        start, noise, uniform, cpu=heads_along_the_way, default=heads_at_once
    )
    return result


def lambda_return(
    reward: Float[Array, "steps *batch"],
    last: Float[Array, "steps *batch"],
    terminal: Float[Array, "steps *batch"],
    bootstrap: Float[Array, "steps *batch"],
    discount: float,
    return_lambda: float,
) -> Float[Array, "steps_minus_one *batch"]:
    """Returns of all steps but the last; time comes first.

        live_t = discount (1 - terminal_t)
        cont_t = lambda (1 - last_t)
        R_t = r_{t+1} + live_{t+1} [(1 - cont_{t+1}) b_{t+1} + cont_{t+1} R_{t+1}]

    and R at the final step is the bootstrap b.
    """
    live = discount * (1.0 - terminal[1:])
    cont = return_lambda * (1.0 - last[1:])
    # R_t = base_t + slope_t R_{t+1}
    base = reward[1:] + live * (1.0 - cont) * bootstrap[1:]
    slope = live * cont

    def step(following: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        base, slope = inputs
        value = base + slope * following
        return value, value

    _, returns = jax.lax.scan(step, bootstrap[-1], (base, slope), reverse=True)
    return returns


class ReturnRange(NamedTuple):
    """Running percentiles of the returns."""

    low: Float[Array, ""]
    high: Float[Array, ""]

    @classmethod
    def initial(cls) -> ReturnRange:
        return cls(jnp.zeros(()), jnp.zeros(()))

    def update(self, returns: Float[Array, "..."], config: LossConfig) -> ReturnRange:
        """Follow the data; without debiasing, so early returns are hardly scaled."""
        quantiles = jnp.array([config.return_low, config.return_high], jnp.float32)
        low, high = jnp.percentile(jax.lax.stop_gradient(returns).reshape(-1), quantiles)
        rate = config.return_rate
        return ReturnRange(
            (1.0 - rate) * self.low + rate * low, (1.0 - rate) * self.high + rate * high
        )

    def scale(self, config: LossConfig) -> Float[Array, ""]:
        return jax.lax.stop_gradient(jnp.maximum(config.return_limit, self.high - self.low))


# --- actor and critic -----------------------------------------------------------------------------


class ActorCriticResult(NamedTuple):
    """Losses with row-major shapes, ready for averaging."""

    losses: dict[str, Float[Array, "..."]]
    range: ReturnRange
    metrics: Metrics


def actor_critic_losses(
    nets: Networks,
    target_critic: Head,
    state: State,
    obs: Mapping[str, Array],
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
    with jax.named_scope(IMAGINATION):
        rollout = imagine(frozen, target_critic, start, config.imag_length, key)
    targets, range_, metrics = imagination_targets(
        rollout.value, rollout.predictions, range_, config, update=update
    )
    learned = learn_from(nets.actor, nets.critic, rollout, targets, config)
    losses = {"policy": learned.policy, "value": learned.value}
    metrics |= _entropy_metrics(nets.actor, learned.entropies)
    if config.replay_value_scale and starts > 1:  # it is about pairs of steps
        boot = targets.returns[0].reshape(batch, starts).T
        losses["replay_value"] = _replay_value(nets, target_critic, tail, obs, boot, config)
    return ActorCriticResult(losses, range_, metrics)


class Targets(NamedTuple):
    """What the imagined steps teach; nothing here carries a gradient."""

    advantage: Float[Array, "steps rows"]
    weight: Float[Array, "steps rows"]
    returns: Float[Array, "steps rows"]
    target_value: Float[Array, "steps rows"]


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
    reward, cont, target_value = predictions
    discount = 1.0 if config.continue_discount else 1.0 - 1.0 / config.horizon
    weight = jnp.cumprod(discount * cont, 0) / discount
    bootstrap = target_value if config.slow_target else value
    returns = lambda_return(
        reward, jnp.zeros_like(cont), 1.0 - cont, bootstrap, discount, config.return_lambda
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
        "slow_value": target_value.mean(),
        "target": returns.mean(),
        "weight": weight.mean(),
    }
    return Targets(advantage, weight[:-1], returns, target_value[:-1]), range_, metrics


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
    """Two-hot loss towards the imagined returns, and towards the target critic."""
    return targets.weight * _value_loss(logits, targets.returns, targets.target_value, config)


def replay_value_losses(
    value_logits: Float[Array, "steps rows bins"],
    target_value: Float[Array, "steps rows"],
    bootstrap: Float[Array, "steps rows"],
    reward: Float[Array, "steps rows"],
    last: Bool[Array, "steps rows"],
    terminal: Bool[Array, "steps rows"],
    config: LossConfig,
) -> tuple[Float[Array, "steps_minus_one rows"], Float[Array, "steps_minus_one rows"]]:
    """Value loss on replayed states, and its returns; bootstraps are imagined returns."""
    last_, terminal_ = last.astype(jnp.float32), terminal.astype(jnp.float32)
    returns = lambda_return(
        reward, last_, terminal_, bootstrap, 1.0 - 1.0 / config.horizon, config.return_lambda
    )
    returns, target_value = jax.lax.stop_gradient((returns, target_value))
    loss = _value_loss(value_logits[:-1], returns, target_value[:-1], config)
    return (1.0 - last_[:-1]) * loss, returns


def _value_loss(
    logits: Float[Array, "*batch bins"],
    returns: Float[Array, "*batch"],
    regularize_to: Float[Array, "*batch"],
    config: LossConfig,
) -> Float[Array, "*batch"]:
    bins = logits.shape[-1]
    target = dist.twohot_target(returns, bins)
    return dist.twohot_loss(
        logits, target + config.slow_regularizer * dist.twohot_target(regularize_to, bins)
    )


class Learned(NamedTuple):
    """Mean losses over all imagined steps, and the mean entropy of each action key."""

    policy: Float[Array, ""]
    value: Float[Array, ""]
    entropies: dict[str, Float[Array, ""]]


def learn_from(
    actor: Policy, critic: Head, rollout: Rollout, targets: Targets, config: LossConfig
) -> Learned:
    """Losses of actor and critic on a rollout, in the form that suits the device: one imagined step
    after the other on a CPU, all at once elsewhere.

    Gradients are worked out together with the losses, while activations are in the cache, and are
    passed to the backward pass as they are. The policy loss only moves the actor, the value loss
    only the critic.
    """

    def losses_of(models: tuple[Policy, Head], steps: tuple[Any, ...]) -> tuple[Array, Learned]:
        actor, critic = models
        states, actions, allowed, targets = steps
        rank = targets.weight.ndim
        acting, judging = _features([actor.mlp, critic.mlp], states)
        choices = actor.choices(acting, allowed)
        entropies = action_entropies(choices, rank)
        log_prob = action_log_prob(actor.actions, choices, actions, rank)
        entropy = sum(entropies.values(), jnp.zeros_like(log_prob))
        policy = policy_loss(log_prob, entropy, targets, config).mean()
        value = value_loss(critic.out(judging), targets, config).mean()
        means = {name: jax.lax.stop_gradient(each.mean()) for name, each in entropies.items()}
        return policy + value, Learned(policy, value, means)

    steps = (rollout.states, rollout.actions, rollout.allowed, targets)
    wide = jnp.dtype(jnp.float32)

    def step_by_step(models: tuple[Policy, Head], steps: Any) -> tuple[Learned, Any]:
        def body(total: Any, step: Any) -> tuple[Any, Learned]:
            grads, learned = jax.grad(losses_of, has_aux=True)(models, step)
            return jax.tree.map(jnp.add, total, cast(grads, wide)), learned

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), models)
        grads, learned = jax.lax.scan(body, zeros, steps)
        count = targets.weight.shape[0]
        mean = jax.tree.map(lambda x: x.mean(0), learned)
        return mean, jax.tree.map(lambda x: x / count, grads)

    def at_once(models: tuple[Policy, Head], steps: Any) -> tuple[Learned, Any]:
        grads, learned = jax.grad(losses_of, has_aux=True)(models, steps)
        return learned, cast(grads, wide)

    def average(models: tuple[Policy, Head]) -> tuple[Learned, Any]:
        on_cpu = per_device(step_by_step, rows=1, mean=True)
        learned, grads = jax.lax.platform_dependent(models, steps, cpu=on_cpu, default=at_once)
        return learned, jax.tree.map(lambda x, like: x.astype(like.dtype), grads, models)

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
    target_critic: Head,
    state: State,
    obs: Mapping[str, Array],
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
        dist.twohot_mean(target_critic(jax.lax.stop_gradient(state))).T,
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
