"""One training step as a pure function: losses, gradients, optimizer, slow critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, UInt32

from dreamfleet.agents.dreamer.actor_critic import actor_critic_losses
from dreamfleet.agents.dreamer.config import DreamerConfig, LossConfig
from dreamfleet.agents.dreamer.context import Sequence, apply_context
from dreamfleet.agents.dreamer.distributions import entropy_of_probs, unimix_probs
from dreamfleet.agents.dreamer.heads import Head
from dreamfleet.agents.dreamer.keys import Key, ObsKeys, embed_actions
from dreamfleet.agents.dreamer.nets import cast
from dreamfleet.agents.dreamer.optimizer import make_optimizer, tree_norm, tree_rms
from dreamfleet.agents.dreamer.returns import ReturnRange
from dreamfleet.agents.dreamer.rssm import State
from dreamfleet.agents.dreamer.world_model import Networks, WorldModelResult, world_model_losses


class TrainState(NamedTuple):
    """Everything training changes."""

    nets: Networks
    slow_critic: Head
    optimizer: Any
    returns: ReturnRange
    updates: Int[Array, ""]
    seed: UInt32[Array, " 2"]
    healthy: Bool[Array, ""]
    """False from the first NaN or infinity on; nothing is updated any more."""


class LossResult(NamedTuple):
    """Beside the total loss: the parts, and what the caller carries on."""

    losses: dict[str, Float[Array, ""]]
    world: WorldModelResult
    returns: ReturnRange
    metrics: dict[str, Float[Array, ""]]


def init_state(
    config: DreamerConfig, obs: ObsKeys, actions: tuple[Key, ...], seed: int
) -> TrainState:
    rng = np.random.default_rng([seed, 0])
    nets = Networks.init(rng, config.model, obs, actions)
    return TrainState(
        nets=nets,
        slow_critic=jax.tree.map(jnp.copy, nets.critic),
        optimizer=make_optimizer(config.optimizer).init(nets),
        returns=ReturnRange.initial(),
        updates=jnp.zeros((), jnp.int32),
        seed=jnp.asarray(rng.integers(2**32, size=2, dtype=np.uint32)),
        healthy=jnp.ones((), bool),
    )


def loss_scales(config: LossConfig, keys: ObsKeys) -> dict[str, float]:
    """The weight of every loss."""
    whole, floats = config.reconstruction_scale, config.reconstruction_scale * config.float_scale
    decoded = {key.name: whole for key in keys.images}
    decoded |= {key.name: whole if key.discrete else floats for key in keys.vectors}
    return {
        **{f"reconstruction/{name}": scale for name, scale in decoded.items()},
        "reward": config.reward_scale,
        "continue": config.continue_scale,
        "dynamics": config.dynamics_scale,
        "representation": config.representation_scale,
        "policy": config.policy_scale,
        "value": config.value_scale,
        "replay_value": config.replay_value_scale,
    }


def total_loss(
    nets: Networks,
    state: TrainState,
    sequence: Sequence,
    config: DreamerConfig,
    *,
    update: bool,
) -> tuple[Float[Array, ""], LossResult]:
    """The weighted sum of all losses, each averaged over its own elements."""
    dtype = jnp.dtype(config.execution.compute_dtype)
    nets, slow = cast(nets, dtype), cast(state.slow_critic, dtype)
    key = jax.random.fold_in(jax.random.wrap_key_data(state.seed), state.updates)
    key_observe, key_imagine = jax.random.split(key)
    batch = sequence.obs["is_first"].shape
    uniform = jax.random.uniform(key_observe, (*batch, nets.dynamics.variables))
    actions = embed_actions(nets.actor.keys, sequence.previous, dtype)
    world = world_model_losses(
        nets, sequence.carry, sequence.obs, actions, config.loss, uniform=uniform
    )
    behaviour = actor_critic_losses(
        nets,
        jax.lax.stop_gradient(slow),
        world.observed.state,
        sequence.obs,
        state.returns,
        config.loss,
        key_imagine,
        update=update,
    )
    means = {name: loss.mean() for name, loss in (world.losses | behaviour.losses).items()}
    scales = loss_scales(config.loss, nets.decoder.keys)
    total = sum((scales[name] * mean for name, mean in means.items()), jnp.zeros(()))
    metrics = behaviour.metrics | _latent_entropies(nets, world)
    return total, LossResult(means, world, behaviour.range, metrics)


def train_step(
    state: TrainState, carry: State, batch: Mapping[str, Array], *, config: DreamerConfig
) -> tuple[TrainState, State, dict[str, Any], dict[str, Array]]:
    """One update; after a non-finite loss or gradient the state stays what it was."""
    names = tuple(key.name for key in state.nets.actor.keys)
    sequence = apply_context(carry, batch, config.execution.replay_context, names)
    (total, result), grads = jax.value_and_grad(total_loss, has_aux=True)(
        state.nets, state, sequence, config, update=True
    )
    grad_norm = tree_norm(grads)
    # A bad reward can land in an outermost bin and leave its loss finite.
    known = jnp.all(jnp.isfinite(sequence.obs["reward"]))
    healthy = state.healthy & known & jnp.isfinite(total) & jnp.isfinite(grad_norm)
    updates, optimizer = make_optimizer(config.optimizer).update(grads, state.optimizer, state.nets)
    nets = optax.apply_updates(state.nets, updates)
    rate = config.loss.slow_rate
    slow = jax.tree.map(
        lambda new, old: rate * new + (1.0 - rate) * old, nets.critic, state.slow_critic
    )
    new = TrainState(nets, slow, optimizer, result.returns, state.updates + 1, state.seed, healthy)
    new = jax.tree.map(lambda a, b: jnp.where(healthy, a, b), new, state._replace(healthy=healthy))
    metrics = {
        **{f"loss/{name}": loss for name, loss in result.losses.items()},
        **result.metrics,
        "opt/loss": total,
        "opt/grad_norm": grad_norm,
        "opt/grad_rms": tree_rms(grads),
        "opt/update_rms": tree_rms(updates),
        "opt/param_rms": tree_rms(state.nets),
        "opt/updates": new.updates,
    }
    states = result.world.observed.state
    following = jax.tree.map(lambda x: x[:, -1], states)
    outs = {
        "replay": {"stepid": sequence.stepid, **latent_entries(states, state.nets.dynamics.classes)}
    }
    return new, following, outs, metrics


def latent_entries(states: State, classes: int) -> dict[str, Float[Array, "..."]]:
    """A latent state in the form in which the replay stores it."""
    stoch = states.stoch.reshape(*states.stoch.shape[:-1], -1, classes)
    return {
        "dyn/deter": states.deter.astype(jnp.float32),
        "dyn/stoch": stoch.astype(jnp.float32),
    }


def _latent_entropies(nets: Networks, world: WorldModelResult) -> dict[str, Float[Array, ""]]:
    unimix = nets.dynamics.unimix
    return {
        name: entropy_of_probs(unimix_probs(logits, unimix)).sum(-1).mean()
        for name, logits in (
            ("prior_entropy", world.observed.prior),
            ("posterior_entropy", world.observed.posterior),
        )
    }
