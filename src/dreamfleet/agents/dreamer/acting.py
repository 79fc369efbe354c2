"""One policy call as a pure function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import NDArray

from dreamfleet.agents.dreamer.codec import Encoder
from dreamfleet.agents.dreamer.heads import Policy, likeliest_actions, sample_actions
from dreamfleet.agents.dreamer.keys import Key, embed_actions
from dreamfleet.agents.dreamer.learning import latent_entries
from dreamfleet.agents.dreamer.nets import cast
from dreamfleet.agents.dreamer.rssm import RSSM, State
from dreamfleet.agents.dreamer.world_model import Networks


class ActingNetworks(eqx.Module):
    """The part of the agent that chooses actions, in compute precision."""

    encoder: Encoder
    dynamics: RSSM
    actor: Policy

    @classmethod
    def of(cls, nets: Networks, dtype: str) -> ActingNetworks:
        return cast(cls(nets.encoder, nets.dynamics, nets.actor), jnp.dtype(dtype))


class Draws(NamedTuple):
    """The random numbers of one call, drawn on the host whichever device acts."""

    state: Any
    actions: dict[str, Any] | None
    """None for the likeliest actions."""


def draw(
    seed: NDArray[np.uint32],
    count: int,
    keys: tuple[Key, ...],
    shape: tuple[int, int],
    *,
    greedy: bool = False,
) -> Draws:
    """The numbers of call `count` of a stream, for (rows, categorical variables).

    Latent states are samples even where actions are `greedy`, as in training.
    """
    whole = int(seed[0]) << 32 | int(seed[1])
    rng = np.random.Generator(np.random.Philox(key=whole, counter=[0, 0, 0, count]))
    actions = {
        key.name: (rng.random if key.discrete else rng.standard_normal)(
            (shape[0], *key.shape), np.float32
        )
        for key in keys
    }
    return Draws(rng.random(shape, np.float32), None if greedy else actions)


def add_time(obs: Mapping[str, Array]) -> dict[str, Array]:
    """Observations of one step as sequences of length one."""
    return {key: value[:, None] for key, value in obs.items()}


def policy_step(
    nets: ActingNetworks,
    carry: Mapping[str, Any],
    obs: Mapping[str, Array],
    draws: Draws,
) -> tuple[dict[str, Any], dict[str, Array], dict[str, Float[Array, "..."]]]:
    """Encode, one posterior step, choose an action: next carry, actions, entries to store."""
    dtype = nets.dynamics.dtype
    dynamics, keys = nets.dynamics, nets.actor.keys
    batch = obs["is_first"].shape[0]
    stoch = carry["stoch"].reshape(batch, -1).astype(dtype)
    previous = embed_actions(keys, carry["previous"], dtype)
    tokens = nets.encoder(add_time(obs))[:, 0]
    keep = 1.0 - obs["is_first"].astype(dtype)[:, None]
    before = dynamics.enter(State(carry["deter"].astype(dtype) * keep, stoch * keep))
    deter = dynamics.core(before, dynamics.embed_action(previous * keep)).state.deter
    logits = dynamics.posterior_of(deter, dynamics.token_share(tokens))
    state = State(deter, dynamics.sample(logits, draws.state))
    choices = nets.actor(state)
    if draws.actions is None:
        actions = likeliest_actions(keys, choices)
    else:
        actions = sample_actions(keys, choices, draws.actions)
    entries = latent_entries(state, dynamics.classes)
    following = {"deter": entries["dyn/deter"], "stoch": entries["dyn/stoch"], "previous": actions}
    return following, actions, entries
