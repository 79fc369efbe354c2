"""Replay context: where a training sequence continues from.

A batch holds K more steps than are trained on. A fresh sequence (`consec` 0) starts from the
latent state that was stored with step K - 1; a later piece of the same window continues from the
previous training call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, UInt8

from dreamfleet.agents.dreamer.rssm import State


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
    """Cut the context off and pick the state to start from."""
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
