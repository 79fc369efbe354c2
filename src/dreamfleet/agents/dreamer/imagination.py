"""Imagination: the policy inside the world model, and the returns of what it does there.

It needs no gradient: the policy follows REINFORCE for discrete and continuous actions alike, so
that only the heads on the imagined states are differentiated. Arrays begin with [H, N], time first;
those with a number for the last state too with [H + 1, N].
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.config import LossConfig
from dreamfleet.agents.dreamer.dynamics import Parts, State
from dreamfleet.agents.dreamer.features import embed_actions
from dreamfleet.agents.dreamer.heads import (
    Allowed,
    Head,
    draw_noise,
    predicted_mask,
    sample_actions,
)
from dreamfleet.agents.dreamer.networks import Networks

Metrics = dict[str, Float[Array, ""]]

IMAGINATION = "imagination"
"""What the operations of a rollout are called in profiles and in compiled programs."""


class Predicted(NamedTuple):
    """What the heads say about imagined states."""

    reward: Float[Array, "*steps rows"]
    cont: Float[Array, "*steps rows"]
    value: Float[Array, "*steps rows"]
    slow_value: Float[Array, "*steps rows"]


class Rollout(NamedTuple):
    """Imagined states with the actions taken at them, and what the heads predict there."""

    features: Parts
    actions: dict[str, Array]
    allowed: Allowed
    """Which choices the predicted masks allowed; None without masks."""
    predicted: Predicted
    """[H + 1, N]"""


@jax.named_scope(IMAGINATION)
def imagine(
    nets: Networks, slow_critic: Head, start: State, length: int, key: PRNGKeyArray
) -> Rollout:
    """Follow the policy inside the model for `length` steps, from N rows."""
    actor, dynamics = nets.actor, nets.dynamics
    rows = jax.tree.leaves(start)[0].shape[0]
    dtype = actor.mlp.layers[0].kernel.dtype
    key_action, key_state = jax.random.split(key)
    noise = draw_noise(key_action, actor.actions, (length, rows))
    uniform = jax.random.uniform(key_state, (length, rows, dynamics.draws))

    def act(features: Parts, noise: Any) -> tuple[Array, tuple[dict[str, Array], Allowed]]:
        allowed = None
        if nets.mask is not None and actor.mask is not None:
            allowed = predicted_mask(actor.mask, nets.mask(features))
        choices = actor(features, allowed)
        actions = sample_actions(actor.actions, choices, noise, masked=allowed is not None)
        return embed_actions(actor.actions, actions, dtype), (actions, allowed)

    def predict(features: Parts) -> Predicted:
        cont = jax.nn.sigmoid(nets.cont(features)[..., 0].astype(jnp.float32))
        heads = (nets.reward, nets.critic, slow_critic)
        reward, value, slow_value = (dist.twohot_mean(head(features)) for head in heads)
        return Predicted(reward, cont, value, slow_value)

    def append(steps: Any, last: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), steps, last)

    def follow(start: State, noise: Any, uniform: Array, *, along: bool) -> Rollout:
        def step(features: Parts, noise: Any) -> tuple[Array, Any]:
            action, chosen = act(features, noise)
            return action, (*chosen, predict(features) if along else None)

        found = dynamics.imagine(start, step, noise, uniform)
        features, last, (actions, allowed, predicted) = found
        every = append(predicted, predict(last)) if along else predict(append(features, last))
        return Rollout(features, actions, allowed, every)

    # A CPU predicts along the way, while states are in its cache: a tenth of the training step.
    # Elsewhere each operation of a loop is a kernel to be started.
    result: Rollout = jax.lax.platform_dependent(
        start, noise, uniform, cpu=partial(follow, along=True), default=partial(follow, along=False)
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
        """What advantages are divided by: max(limit, high - low)."""
        return jax.lax.stop_gradient(jnp.maximum(config.return_limit, self.high - self.low))


class Targets(NamedTuple):
    """What the imagined steps teach; nothing here carries a gradient. All are [H, N]."""

    advantage: Float[Array, "steps rows"]
    weight: Float[Array, "steps rows"]
    returns: Float[Array, "steps rows"]
    slow_value: Float[Array, "steps rows"]


def imagined_targets(
    predicted: Predicted,
    range_: ReturnRange,
    config: LossConfig,
    *,
    update: bool = True,
) -> tuple[Targets, ReturnRange, Metrics]:
    """Returns, advantages and weights of a rollout, from predictions at all of its states.

    weight_t = prod_{i <= t} (discount cont_i) / discount
    advantage_t = (R_t - v_t) / max(limit, range of the returns)
    """
    reward, cont, value, slow_value = predicted
    discount = 1.0 if config.continue_discount else 1.0 - 1.0 / config.horizon
    weight = jnp.cumprod(discount * cont, 0) / discount
    bootstrap = slow_value if config.slow_target else value
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
        "slow_value": slow_value.mean(),
        "target": returns.mean(),
        "weight": weight.mean(),
    }
    return Targets(advantage, weight[:-1], returns, slow_value[:-1]), range_, metrics
