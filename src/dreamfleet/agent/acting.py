"""One policy call as a pure function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from dreamfleet.agent.codec import Encoder
from dreamfleet.agent.heads import Policy, draw_noise, sample_actions
from dreamfleet.agent.keys import embed_actions
from dreamfleet.agent.learning import latent_entries
from dreamfleet.agent.nets import cast
from dreamfleet.agent.rssm import RSSM, State
from dreamfleet.agent.world_model import Networks


class ActingNetworks(eqx.Module):
    """The part of the agent that chooses actions, in compute precision."""

    encoder: Encoder
    dynamics: RSSM
    actor: Policy

    @classmethod
    def of(cls, nets: Networks, dtype: str) -> ActingNetworks:
        return cast(cls(nets.encoder, nets.dynamics, nets.actor), jnp.dtype(dtype))


def policy_step(
    nets: ActingNetworks,
    carry: Mapping[str, Any],
    obs: Mapping[str, Array],
    seed: UInt32[Array, "2"],
    count: UInt32[Array, ""],
) -> tuple[dict[str, Any], dict[str, Array], dict[str, Array]]:
    """Encode, one posterior step, sample an action; `count` numbers the random stream."""
    dtype = nets.dynamics.dtype
    key_state, key_action = jax.random.split(
        jax.random.fold_in(jax.random.wrap_key_data(seed), count)
    )
    batch = obs["is_first"].shape[0]
    deter = carry["deter"].astype(dtype)
    stoch = carry["stoch"].reshape(batch, -1).astype(dtype)
    previous = embed_actions(nets.actor.keys, carry["previous"], dtype)
    tokens = nets.encoder({key: value[:, None] for key, value in obs.items()})[:, 0]
    keep = 1.0 - obs["is_first"].astype(dtype)[:, None]
    dynamics = nets.dynamics
    before = dynamics.enter(State(deter * keep, stoch * keep))
    deter = dynamics.core(before, dynamics.embed_action(previous * keep)).state.deter
    logits = dynamics.posterior_of(deter, dynamics.token_share(tokens))
    uniform = jax.random.uniform(key_state, (batch, dynamics.variables))
    state = State(deter, dynamics.sample(logits, uniform))
    noise = draw_noise(key_action, nets.actor.keys, (batch,))
    actions = sample_actions(nets.actor.keys, nets.actor(state), noise)
    entries = latent_entries(state, nets)
    following = {"deter": entries["dyn/deter"], "stoch": entries["dyn/stoch"], "previous": actions}
    return following, actions, entries
