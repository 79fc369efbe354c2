"""All networks of the agent together."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from dreamfleet.agents.dreamer.config import DreamerConfig, ModelConfig
from dreamfleet.agents.dreamer.dynamics import Dynamics
from dreamfleet.agents.dreamer.features import Spaces, action_features, decoded, observed
from dreamfleet.agents.dreamer.heads import Head, Policy
from dreamfleet.agents.dreamer.interfaces import (
    Decoder,
    Encoder,
    ExtraLoss,
    extra_losses,
    find_network,
)
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
    extra: dict[str, ExtraLoss] = eqx.field(default_factory=dict)
    """Losses with parameters of their own, by name."""

    @classmethod
    def init(
        cls, rng: np.random.Generator, config: DreamerConfig, obs_space: Spaces, act_space: Spaces
    ) -> Networks:
        model, spaces, actions = config.model, observed(obs_space), action_features(act_space)
        encoder = find_network("encoder", model).init(rng, model, spaces)
        if model.encoder != "default":
            _check_tokens(encoder, spaces, model)
        width = sum(action.width for action in actions)
        mask = ActionMask.of(obs_space, act_space)
        dynamics = find_network("dynamics", model).init(rng, model, width, encoder.width)
        parts = dynamics.widths
        decoder = find_network("decoder", model).init(rng, model, decoded(obs_space), parts)

        def head(layers: int, outputs: int, scale: float) -> Head:
            return Head.init(rng, sum(parts), model.units, layers, outputs, scale)

        nets = cls(
            encoder=encoder,
            dynamics=dynamics,
            decoder=decoder,
            reward=head(model.reward_layers, model.bins, 0.0),
            cont=head(model.continue_layers, 1, 1.0),
            actor=Policy.init(rng, sum(parts), model, actions, mask),
            critic=head(model.critic_layers, model.bins, 0.0),
            mask=head(model.mask_layers, sum(mask.choices), 1.0) if mask else None,
            extra={
                name: loss.init(rng, model, parts, encoder.width, width)
                for name, loss in extra_losses(config).items()
            },
        )
        for kind in ("encoder", "dynamics", "decoder", "extra"):
            _check_parameters(kind, getattr(nets, kind))
        return nets


def _check_tokens(encoder: Any, spaces: Spaces, model: ModelConfig) -> None:
    """Ask a user's encoder for the shape of its tokens, without computing them."""
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
