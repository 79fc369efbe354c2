"""Acting: one policy call as a pure function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import NDArray

from dreamfleet.agents.dreamer.dynamics import Dynamics
from dreamfleet.agents.dreamer.features import Feature, embed_actions
from dreamfleet.agents.dreamer.heads import Policy, mode_actions, sample_actions
from dreamfleet.agents.dreamer.interfaces import Encoder
from dreamfleet.agents.dreamer.layers import cast
from dreamfleet.agents.dreamer.networks import Networks
from dreamfleet.masks import ACTION_MASK


class ActingNetworks(eqx.Module):
    """The part of the agent that chooses actions, in compute precision."""

    encoder: Encoder
    dynamics: Dynamics
    actor: Policy

    @classmethod
    def of(cls, nets: Networks, dtype: str) -> ActingNetworks:
        return cast(cls(nets.encoder, nets.dynamics, nets.actor), jnp.dtype(dtype))


class Draws(NamedTuple):
    """The random numbers of one call, drawn on the host whichever device acts."""

    state: Any
    actions: dict[str, Any] | None
    """None for the mode of the policy."""


def draw(
    seed: NDArray[np.uint32],
    count: int,
    features: tuple[Feature, ...],
    shape: tuple[int, int],
    *,
    greedy: bool = False,
) -> Draws:
    """The numbers of call `count` of a stream, for (rows, draws of the dynamics).

    Latent states are samples even where actions are `greedy`, as in training.
    """
    whole = int(seed[0]) << 32 | int(seed[1])
    rng = np.random.Generator(np.random.Philox(key=whole, counter=[0, 0, 0, count]))
    actions = {
        feature.name: (rng.random if feature.discrete else rng.standard_normal)(
            (shape[0], *feature.shape), np.float32
        )
        for feature in features
    }
    return Draws(rng.random(shape, np.float32), None if greedy else actions)


def policy_step(
    nets: ActingNetworks,
    carry: Mapping[str, Any],
    obs: Mapping[str, Array],
    draws: Draws,
) -> tuple[dict[str, Any], dict[str, Array], dict[str, Float[Array, "..."]]]:
    """Encode, one posterior step, choose an action: next carry, actions, entries to store.

    A carry holds the `state` of the dynamics, in float32, and the `previous` actions.
    """
    features, dtype = nets.actor.actions, nets.actor.mlp.layers[0].kernel.dtype
    before = jax.tree.map(lambda x: x.astype(dtype), carry["state"])
    previous = embed_actions(features, carry["previous"], dtype)
    # Networks read sequences: these have one step.
    tokens = nets.encoder({key: value[:, None] for key, value in obs.items()})
    others = (previous, obs["is_first"], draws.state)
    observed = nets.dynamics.observe(before, tokens, *(each[:, None] for each in others))
    state = jax.tree.map(lambda x: x[:, 0], observed.states)
    mask = nets.actor.mask
    allowed = mask.allowed(obs[ACTION_MASK]) if mask else None
    choices = nets.actor(nets.dynamics.features(state), allowed)
    if draws.actions is None:
        actions = mode_actions(features, choices)
    else:
        actions = sample_actions(features, choices, draws.actions, masked=mask is not None)
    kept = jax.tree.map(lambda x: x.astype(jnp.float32), state)
    return {"state": kept, "previous": actions}, actions, nets.dynamics.entries(state)
