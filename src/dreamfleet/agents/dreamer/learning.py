"""One training step as a pure function: replay context, gradients, optimizer, target critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, UInt8, UInt32

from dreamfleet.agents.dreamer.config import DreamerConfig
from dreamfleet.agents.dreamer.features import Spaces
from dreamfleet.agents.dreamer.heads import Head
from dreamfleet.agents.dreamer.layers import Shapes
from dreamfleet.agents.dreamer.losses import LossResult, ReturnRange, total_loss
from dreamfleet.agents.dreamer.networks import Networks
from dreamfleet.agents.dreamer.optimizer import make_optimizer, tree_norm, tree_rms
from dreamfleet.agents.dreamer.rssm import State


class TrainState(NamedTuple):
    """Everything training changes."""

    nets: Networks
    slow_critic: Head
    """The target critic: the exponential moving average (EMA) of the critic."""
    optimizer: Any
    returns: ReturnRange
    updates: Int[Array, ""]
    seed: UInt32[Array, " 2"]
    healthy: Bool[Array, ""]
    """False from the first NaN or infinity on; nothing is updated any more."""


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
    nets = Networks.init(rng, config.model, obs_space, act_space)
    return TrainState(
        nets=nets,
        slow_critic=jax.tree.map(jnp.copy, nets.critic),
        optimizer=make_optimizer(config.optimizer).init(nets),
        returns=ReturnRange.initial(),
        updates=jnp.zeros((), jnp.int32),
        seed=jnp.asarray(rng.integers(2**32, size=2, dtype=np.uint32)),
        healthy=jnp.ones((), bool),
    )


class Sequence(NamedTuple):
    """What one training or report call works on."""

    carry: State
    obs: dict[str, Array]
    previous: dict[str, Array]
    """Actions taken before each step."""
    stepid: UInt8[Array, "batch time bytes"]


def apply_context(
    carry: State, batch: Mapping[str, Array], context: int, action_names: tuple[str, ...]
) -> Sequence:
    """Cut the context off and pick the state to start from.

    A batch holds K more steps than are trained on. A fresh sequence (`consec` 0) starts from the
    latent state that was stored with step K - 1; a later piece of the same window continues from
    the previous training call.
    """
    stored = State(
        batch["dyn/deter"][:, context - 1].astype(carry.deter.dtype),
        batch["dyn/stoch"][:, context - 1].reshape(carry.stoch.shape).astype(carry.stoch.dtype),
    )
    fresh = (batch["consec"][:, 0] == 0)[:, None]
    start = State(*(jnp.where(fresh, new, old) for new, old in zip(stored, carry, strict=True)))
    internal = ("dyn/deter", "dyn/stoch", "consec", "stepid", *action_names)
    obs = {key: value[:, context:] for key, value in batch.items() if key not in internal}
    previous = {key: batch[key][:, context - 1 : -1] for key in action_names}
    return Sequence(start, obs, previous, batch["stepid"][:, context:])


def sequence_loss(
    nets: Networks, state: TrainState, sequence: Sequence, config: DreamerConfig, *, update: bool
) -> tuple[Float[Array, ""], LossResult]:
    """`total_loss` of these networks with everything else from the state."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state.seed), state.updates)
    carry, obs, previous, _ = sequence
    return total_loss(
        nets, state.slow_critic, state.returns, carry, obs, previous, key, config, update=update
    )


def train_step(
    state: TrainState, carry: State, batch: Mapping[str, Array], *, config: DreamerConfig
) -> tuple[TrainState, State, dict[str, Any], dict[str, Array]]:
    """One update; after a non-finite loss or gradient the state stays what it was."""
    names = tuple(action.name for action in state.nets.actor.actions)
    sequence = apply_context(carry, batch, config.execution.replay_context, names)
    (total, result), grads = jax.value_and_grad(sequence_loss, has_aux=True)(
        state.nets, state, sequence, config, update=True
    )
    grad_norm = tree_norm(grads)
    # A bad reward can land in an outermost bin and leave its loss finite.
    known = jnp.all(jnp.isfinite(sequence.obs["reward"]))
    healthy = state.healthy & known & jnp.isfinite(total) & jnp.isfinite(grad_norm)
    updates, optimizer = make_optimizer(config.optimizer).update(grads, state.optimizer, state.nets)
    nets = optax.apply_updates(state.nets, updates)
    target = optax.incremental_update(nets.critic, state.slow_critic, config.loss.slow_rate)
    new = TrainState(
        nets, target, optimizer, result.returns, state.updates + 1, state.seed, healthy
    )
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
    states = result.observed.state
    following = jax.tree.map(lambda x: x[:, -1], states)
    back = {"stepid": sequence.stepid, **latent_entries(states, config.model.classes)}
    if config.execution.send_priority:
        back["priority"] = result.step_loss
    return new, following, {"replay": back}, metrics


def latent_entries(states: State, classes: int) -> dict[str, Float[Array, "..."]]:
    """A latent state in the form in which the replay stores it."""
    stoch = states.stoch.reshape(*states.stoch.shape[:-1], -1, classes)
    return {
        "dyn/deter": states.deter.astype(jnp.float32),
        "dyn/stoch": stoch.astype(jnp.float32),
    }
