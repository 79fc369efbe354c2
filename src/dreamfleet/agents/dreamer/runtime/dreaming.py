"""The world model of a trained agent, one step at a time: what `dreamfleet.Dream` runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpy.typing import NDArray

from dreamfleet.agents.api import Arrays, Guess
from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.acting import Draws, draw
from dreamfleet.agents.dreamer.config import DreamerConfig
from dreamfleet.agents.dreamer.dynamics import State
from dreamfleet.agents.dreamer.features import embed_actions
from dreamfleet.agents.dreamer.heads import mode_actions, predicted_mask, sample_actions
from dreamfleet.agents.dreamer.interfaces import stored_space
from dreamfleet.agents.dreamer.layers import cast
from dreamfleet.agents.dreamer.networks import Networks
from dreamfleet.agents.dreamer.runtime.programs import Program
from dreamfleet.spaces import FLAGS

_UNUSED = {*FLAGS} - {"is_first"}


class DreamerWorldModel:
    """All networks of an agent, without its optimizer; `dreamfleet.agents.api.WorldModel`."""

    def __init__(self, nets: Networks, config: DreamerConfig, device: jax.Device) -> None:
        dtype = jnp.dtype(config.execution.compute_dtype)
        self._nets: Networks = jax.device_put(cast(nets, dtype), device)
        self._model, self._dtype = config.model, dtype
        # The head may have learned the discount along with the end of episodes.
        discounted = config.loss.continue_discount
        self._discount = 1.0 - 1.0 / config.loss.horizon if discounted else 1.0
        self._observe = Program("dream's start", _observe)
        self._imagine = Program("dream", _imagine)

    def stored(self, step: Mapping[str, NDArray[Any]]) -> Any | None:
        spaces = stored_space(self._model)
        entries = {key: jnp.asarray(step[key])[None, None] for key in spaces if key in step}
        if not spaces or any(
            key not in entries or entries[key].shape[2:] != space.shape
            for key, space in spaces.items()
        ):
            return None
        return self._narrow(self._nets.dynamics.truncate(entries))

    def observe(
        self, latent: Any | None, obs: Mapping[str, Any], action: Arrays, seed: int, number: int
    ) -> tuple[Any, Guess]:
        first = latent is None
        if latent is None:
            latent = self._narrow(self._nets.dynamics.initial(1))
        seen = {key: np.asarray(value)[None] for key, value in obs.items() if key not in _UNUSED}
        seen["is_first"] = np.array([first])
        previous = {key: np.asarray(value)[None] for key, value in action.items()}
        draws = self._draws(seed, number)
        return self._read(self._observe(self._nets, latent, seen, previous, draws))

    def imagine(self, latent: Any, action: Arrays, seed: int, number: int) -> tuple[Any, Guess]:
        taken = {key: np.asarray(value)[None] for key, value in action.items()}
        return self._read(self._imagine(self._nets, latent, taken, self._draws(seed, number)))

    def _narrow(self, state: State) -> Any:
        return jax.device_get(jax.tree.map(lambda x: jnp.asarray(x, self._dtype), state))

    def _draws(self, seed: int, number: int) -> Draws:
        words = np.random.SeedSequence(seed).generate_state(2).astype(np.uint32)
        return draw(words, number, self._nets.actor.actions, (1, self._nets.dynamics.draws))

    def _read(self, result: Any) -> tuple[Any, Guess]:
        latent, found = jax.device_get(result)
        row = jax.tree.map(lambda x: x[0], found)
        guess = Guess(
            obs=row["obs"],
            reward=float(row["reward"]),
            continuation=min(float(row["continuation"]) / self._discount, 1.0),
            value=float(row["value"]),
            sample=row["sample"],
            mode=row["mode"],
            allowed=row.get("allowed"),
        )
        return latent, guess


def _observe(
    nets: Networks,
    state: State,
    obs: Mapping[str, Array],
    previous: Mapping[str, Array],
    draws: Draws,
) -> tuple[Any, dict[str, Any]]:
    """One posterior step."""
    tokens = nets.encoder({key: value[:, None] for key, value in obs.items()})
    action = embed_actions(nets.actor.actions, previous, tokens.dtype)
    others = (action, obs["is_first"], draws.state)
    observed = nets.dynamics.observe(state, tokens, *(each[:, None] for each in others))
    now = jax.tree.map(lambda x: x[:, 0], observed.states)
    return now, _guess(nets, now, draws)


def _imagine(
    nets: Networks, state: State, action: Mapping[str, Array], draws: Draws
) -> tuple[Any, dict[str, Any]]:
    """One prior step."""
    dtype = nets.actor.mlp.layers[0].kernel.dtype
    vector = embed_actions(nets.actor.actions, action, dtype)
    following = nets.dynamics.step(state, vector, draws.state)
    return following, _guess(nets, following, draws)


def _guess(nets: Networks, state: State, draws: Draws) -> dict[str, Any]:
    """What decoder, heads and policy say about states."""
    features = nets.dynamics.features(state)
    predictions = nets.decoder(tuple(part[:, None] for part in features))
    values = dict(nets.decoder.values(predictions)) if hasattr(nets.decoder, "values") else {}
    for name, image in nets.decoder.images(predictions).items():
        scaled = jnp.round(image.astype(jnp.float32) * 255.0)
        values[name] = jnp.clip(scaled, 0.0, 255.0).astype(jnp.uint8)
    actor, result = nets.actor, {}
    allowed = None
    if nets.mask is not None and actor.mask is not None:
        allowed = result["allowed"] = predicted_mask(actor.mask, nets.mask(features))
    choices = actor(features, allowed)
    assert draws.actions is not None
    return {
        **result,
        "obs": {name: value[:, 0] for name, value in values.items()},
        "reward": dist.twohot_mean(nets.reward(features)),
        "continuation": jax.nn.sigmoid(nets.cont(features)[..., 0].astype(jnp.float32)),
        "value": dist.twohot_mean(nets.critic(features)),
        "sample": sample_actions(actor.actions, choices, draws.actions, masked=allowed is not None),
        "mode": mode_actions(actor.actions, choices),
    }
