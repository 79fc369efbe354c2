"""One training step as a pure function: the whole algorithm on one page.

1. The world model observes the sequence and learns to predict it (`world_model`).
2. From its states it imagines what follows under the policy (`imagination`).
3. Actor and critic learn from the imagined returns, the critic from replayed rewards too
   (`actor_critic`).
4. One optimizer updates all networks, and the slow critic follows (`optimizer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt8, UInt32

from dreamfleet.agents.dreamer import actor_critic, world_model
from dreamfleet.agents.dreamer.actor_critic import behaviour_gradient, entropy_metrics
from dreamfleet.agents.dreamer.config import DreamerConfig
from dreamfleet.agents.dreamer.dynamics import State
from dreamfleet.agents.dreamer.features import Spaces, embed_actions
from dreamfleet.agents.dreamer.forms import per_device
from dreamfleet.agents.dreamer.heads import Head, Policy
from dreamfleet.agents.dreamer.imagination import (
    Metrics,
    ReturnRange,
    Rollout,
    Targets,
    imagine,
    imagined_targets,
)
from dreamfleet.agents.dreamer.interfaces import loss_name
from dreamfleet.agents.dreamer.layers import Shapes, cast
from dreamfleet.agents.dreamer.networks import Networks
from dreamfleet.agents.dreamer.optimizer import make_optimizer, tree_norm, tree_rms
from dreamfleet.agents.dreamer.world_model import Seen, extra_losses, observe, step_losses, stop
from dreamfleet.errors import ConfigError

TERMS = {**world_model.TERMS, **actor_critic.TERMS}
"""Every loss: what computes it, the setting that weighs it, the networks that it moves."""


class TrainState(NamedTuple):
    """Everything training changes."""

    nets: Networks
    slow_critic: Head
    """The exponential moving average (EMA) of the critic."""
    optimizer: Any
    returns: ReturnRange
    updates: Int[Array, ""]
    seed: UInt32[Array, " 2"]
    healthy: Bool[Array, ""]
    """False from the first NaN or infinity on; nothing is updated any more."""


class Sequence(NamedTuple):
    """What one training or report call works on; arrays begin with [B, T]."""

    carry: State
    """The state before the sequence, [B, ...]."""
    obs: dict[str, Array]
    previous: dict[str, Array]
    """Actions taken before each step."""
    stepid: UInt8[Array, "B T bytes"]


class Outcome(NamedTuple):
    """What comes with the total loss."""

    losses: Metrics
    """The mean of each loss."""
    step_loss: Float[Array, "B T"]
    """The weighted loss of the world model at each step, without `loss.extra`."""
    seen: Seen
    rollout: Rollout
    targets: Targets
    returns: ReturnRange
    metrics: Metrics


def total_loss(
    nets: Networks, state: TrainState, sequence: Sequence, config: DreamerConfig, *, update: bool
) -> tuple[Float[Array, ""], Outcome]:
    """The weighted losses of the world model and of the critic on replayed states, each averaged
    over its own elements, and the rollout that actor and critic learn from.

    Args:
        nets: The networks to differentiate, in float32.
        state: All else; `state.nets` is not read.
        sequence: What to learn from.
        config: Settings.
        update: Whether this is training, and not a report: the normaliser of returns follows.
    """
    dtype = jnp.dtype(config.execution.compute_dtype)
    key_observe, key_imagine = jax.random.split(step_key(state))
    carry, obs, previous, _ = sequence
    batch, time = obs["is_first"].shape
    uniform = jax.random.uniform(key_observe, (batch, time, nets.dynamics.draws))
    actions = embed_actions(nets.actor.actions, previous, dtype)

    def model_world(
        nets: Networks, carry: State, obs: Mapping[str, Array], actions: Array, uniform: Array
    ) -> tuple[Seen, dict[str, Array]]:
        nets = cast(nets, dtype)
        carry = jax.tree.map(lambda x: x.astype(dtype), carry)
        seen = observe(nets, carry, obs, actions, uniform, config.loss)
        return seen, step_losses(nets, seen, config.loss)

    # Observe and reconstruct.
    seen, by_step = per_device(model_world)(nets, carry, obs, actions, uniform)
    nets = cast(nets, dtype)
    losses = by_step | extra_losses(nets, seen, couples_rows=True)

    # Imagine from the last states, without a gradient.
    last = min(config.loss.imag_last or time, time)
    slow_critic, frozen = stop(cast(state.slow_critic, dtype)), stop(nets)
    start = frozen.dynamics.starts(stop(seen.observed.states), last)
    rollout = stop(imagine(frozen, slow_critic, start, config.loss.imag_length, key_imagine))

    # Returns, advantages, weights.
    targets, returns, metrics = imagined_targets(
        rollout.predicted, state.returns, config.loss, update=update
    )

    # The critic on replayed rewards, for pairs of steps.
    if config.loss.replay_value_scale and last > 1:
        boot = targets.returns[0].reshape(batch, last).T
        losses["replay_value"] = TERMS["replay_value"](nets, slow_critic, seen, boot, config.loss)

    means = {name: loss.mean() for name, loss in losses.items()}
    scales = weights(means, obs, config)
    total = sum((scales[name] * mean for name, mean in means.items()), jnp.zeros(()))
    step_loss = sum(
        (scales[name] * each for name, each in by_step.items() if name not in nets.extra),
        jnp.zeros((batch, time)),
    )
    metrics |= nets.dynamics.metrics(seen.observed)
    return total, Outcome(means, step_loss, seen, rollout, targets, returns, metrics)


def learn_behaviour(
    nets: Networks,
    total: Float[Array, ""],
    outcome: Outcome,
    config: DreamerConfig,
) -> tuple[Float[Array, ""], Outcome, tuple[Policy, Head]]:
    """Loss and outcome with what actor and critic learn from the rollout, and their gradient."""
    actor, critic = cast((nets.actor, nets.critic), jnp.dtype(config.execution.compute_dtype))
    learned, grads = behaviour_gradient(
        actor, critic, outcome.rollout, outcome.targets, config.loss
    )
    scales = weights(learned.losses, {}, config)
    total += sum(scales[name] * loss for name, loss in learned.losses.items())
    losses = outcome.losses | learned.losses
    metrics = outcome.metrics | entropy_metrics(actor, learned.entropies)
    return total, outcome._replace(losses=losses, metrics=metrics), grads


def all_gradients(
    state: TrainState, sequence: Sequence, config: DreamerConfig
) -> tuple[Float[Array, ""], Outcome, Networks]:
    """The loss, what came with it, and the gradient: of the world model and the replayed values,
    and of actor and critic on the rollout, summed in float32."""
    (total, outcome), grads = jax.value_and_grad(total_loss, has_aux=True)(
        state.nets, state, sequence, config, update=True
    )
    total, outcome, behaviour = learn_behaviour(state.nets, total, outcome, config)
    both = jax.tree.map(jnp.add, (grads.actor, grads.critic), behaviour)
    grads = eqx.tree_at(lambda nets: (nets.actor, nets.critic), grads, both)
    return total, outcome, grads


def train_step(
    state: TrainState, batch: Mapping[str, Array], *, config: DreamerConfig
) -> tuple[TrainState, dict[str, Any], Metrics]:
    """One update: the new state, what goes back to the replay, metrics.

    After a non-finite loss or gradient the state stays what it was.
    """
    sequence = without_context(state, batch, config)
    total, outcome, grads = all_gradients(state, sequence, config)
    grad_norm = tree_norm(grads)
    # A bad reward can land in an outermost bin and leave its loss finite.
    known = jnp.all(jnp.isfinite(sequence.obs["reward"]))
    healthy = state.healthy & known & jnp.isfinite(total) & jnp.isfinite(grad_norm)
    updates, optimizer = make_optimizer(config.optimizer).update(grads, state.optimizer, state.nets)
    nets = optax.apply_updates(state.nets, updates)
    slow_critic = optax.incremental_update(nets.critic, state.slow_critic, config.loss.slow_rate)
    new = TrainState(
        nets, slow_critic, optimizer, outcome.returns, state.updates + 1, state.seed, healthy
    )
    new = jax.tree.map(lambda a, b: jnp.where(healthy, a, b), new, state._replace(healthy=healthy))
    metrics = {
        **{f"loss/{name}": loss for name, loss in outcome.losses.items()},
        **outcome.metrics,
        "opt/loss": total,
        "opt/grad_norm": grad_norm,
        "opt/grad_rms": tree_rms(grads),
        "opt/update_rms": tree_rms(updates),
        "opt/param_rms": tree_rms(state.nets),
        "opt/updates": new.updates,
    }
    back = dict(state.nets.dynamics.entries(outcome.seen.observed.states))
    if config.execution.send_priority:
        back["priority"] = outcome.step_loss
    return new, {"replay": {"stepid": sequence.stepid, **back}} if back else {}, metrics


def weights(
    losses: Mapping[str, Array], obs: Mapping[str, Any], config: DreamerConfig
) -> dict[str, Any]:
    """The weight of each loss.

    Raises:
        ConfigError: The table has no loss of this name.
    """
    extra = {loss_name(name): weight for name, weight in config.loss.extra.items()}
    extra["barlow"] = config.loss.barlow_scale

    def weight(name: str, mean: Array) -> Any:
        group, _, key = name.partition("/")
        if group in extra:
            return extra[group]
        if group not in TERMS:
            raise ConfigError(
                f"There is no weight for the loss {name!r}: name its class in loss.extra, or add "
                f"it to the table of losses ({', '.join([*TERMS, *extra])})."
            )
        scale = TERMS[group].scale(config.loss)
        if group != "reconstruction" or not jnp.issubdtype(obs[key].dtype, jnp.floating):
            return scale
        bound: Any = config.loss.float_scale
        if config.loss.float_variance:
            # 1 / (2 variance), of errors with the variance that this batch shows.
            elements = max(1, int(np.prod(obs[key].shape[2:])))
            bound = jnp.minimum(bound, elements / (2.0 * stop(mean) + 1e-8))
        return scale * bound

    return {name: weight(name, mean) for name, mean in losses.items()}


def without_context(
    state: TrainState, batch: Mapping[str, Array], config: DreamerConfig
) -> Sequence:
    """Cut the context off and find the state to start from.

    A batch holds K more steps than are trained on. A sequence starts from the state that was stored
    with them. Dynamics that store none observe these steps first.
    """
    context, nets = config.execution.replay_context, state.nets
    names = tuple(action.name for action in nets.actor.actions)
    stored = type(nets.dynamics).entry_space(config.model)
    obs = {key: x for key, x in batch.items() if key not in {*names, *stored, "stepid"}}
    before = {key: value[:, :context] for key, value in obs.items()}
    if stored:
        carry = nets.dynamics.truncate({key: batch[key][:, :context] for key in stored})
    else:
        rows = batch["stepid"].shape[0]
        shifted = {key: jnp.roll(batch[key][:, :context], 1, 1) for key in names}
        actions = embed_actions(nets.actor.actions, shifted, jnp.dtype(jnp.float32))
        key = jax.random.fold_in(step_key(state), 1)
        uniform = jax.random.uniform(key, (rows, context, nets.dynamics.draws))
        # The replay marks the first step of every window as first.
        seen = nets.dynamics.observe(
            nets.dynamics.initial(rows), nets.encoder(before), actions, before["is_first"], uniform
        )
        carry = jax.tree.map(lambda x: x[:, -1], seen.states)
    return Sequence(
        carry,
        {key: value[:, context:] for key, value in obs.items()},
        {key: batch[key][:, context - 1 : -1] for key in names},
        batch["stepid"][:, context:],
    )


def step_key(state: TrainState) -> PRNGKeyArray:
    """The random key of the update that comes next."""
    return jax.random.fold_in(jax.random.wrap_key_data(state.seed), state.updates)


def init_state(
    config: DreamerConfig, obs_space: Spaces, act_space: Spaces, seed: int
) -> TrainState:
    """A fresh state; the same seed gives the same one."""
    return _fresh(config, obs_space, act_space, np.random.default_rng([seed, 0]))


def state_shapes(config: DreamerConfig, obs_space: Spaces, act_space: Spaces) -> TrainState:
    """A state of shapes and dtypes without numbers, however large it would be."""
    result: TrainState = jax.eval_shape(lambda: _fresh(config, obs_space, act_space, Shapes()))
    return result


def _fresh(
    config: DreamerConfig, obs_space: Spaces, act_space: Spaces, rng: np.random.Generator
) -> TrainState:
    nets = Networks.init(rng, config, obs_space, act_space)
    return TrainState(
        nets=nets,
        slow_critic=jax.tree.map(jnp.copy, nets.critic),
        optimizer=make_optimizer(config.optimizer).init(nets),
        returns=ReturnRange.initial(),
        updates=jnp.zeros((), jnp.int32),
        seed=jnp.asarray(rng.integers(2**32, size=2, dtype=np.uint32)),
        healthy=jnp.ones((), bool),
    )
