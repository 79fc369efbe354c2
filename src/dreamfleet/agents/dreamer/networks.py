"""All networks of the agent together."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from dreamfleet.agents.dreamer.config import ModelConfig
from dreamfleet.agents.dreamer.features import Spaces, action_features, decoded, observed
from dreamfleet.agents.dreamer.heads import Head, Policy
from dreamfleet.agents.dreamer.interfaces import Decoder, Dynamics, Encoder, find_network
from dreamfleet.errors import ConfigError
from dreamfleet.masks import ActionMask


class Networks(eqx.Module):
    """Everything the optimizer trains."""

    encoder: Encoder
    dynamics: Dynamics
    decoder: Decoder
    reward: Head
    cont: Head
    actor: Policy
    critic: Head
    mask: Head | None = None
    """Logits of the choices being allowed, for tasks with a mask of actions."""

    @classmethod
    def init(
        cls, rng: np.random.Generator, model: ModelConfig, obs_space: Spaces, act_space: Spaces
    ) -> Networks:
        spaces, actions = observed(obs_space), action_features(act_space)
        encoder = find_network("encoder", model).init(rng, model, spaces)
        if model.encoder != "default":
            _check_tokens(encoder, spaces, model)
        width = sum(action.width for action in actions)
        mask = ActionMask.of(obs_space, act_space)
        nets = cls(
            encoder=encoder,
            dynamics=find_network("dynamics", model).init(rng, model, width, encoder.width),
            decoder=find_network("decoder", model).init(rng, model, decoded(obs_space)),
            reward=Head.init(rng, model, model.reward_layers, model.bins, 0.0),
            cont=Head.init(rng, model, model.continue_layers, 1, 1.0),
            actor=Policy.init(rng, model, actions, mask),
            critic=Head.init(rng, model, model.critic_layers, model.bins, 0.0),
            mask=Head.init(rng, model, model.mask_layers, sum(mask.choices), 1.0) if mask else None,
        )
        for kind in ("encoder", "dynamics", "decoder"):
            _check_parameters(kind, getattr(nets, kind))
        return nets


def _check_tokens(encoder: Any, spaces: Spaces, model: ModelConfig) -> None:
    """An encoder of somebody's own is asked for tokens once, without computing them."""
    obs = {key: np.zeros((2, 3, *space.shape), space.dtype) for key, space in spaces.items()}
    tokens = eqx.filter_eval_shape(lambda encoder, obs: encoder(obs), encoder, obs)
    if getattr(tokens, "shape", None) != (2, 3, encoder.width):
        raise ConfigError(
            f"model.encoder={model.encoder} gives {tokens} for a batch of 2 sequences of 3 steps: "
            f"it must return one array of shape (2, 3, {encoder.width}), its width being "
            f"{encoder.width}."
        )


def _check_parameters(kind: str, network: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(network):
        if not (eqx.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)):
            raise ConfigError(
                f"The {kind}'s field {jax.tree_util.keystr(path)} is not a float array and cannot "
                "be trained: mark it with equinox.field(static=True)."
            )
