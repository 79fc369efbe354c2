"""Which spaces the agent can be built for.

Without JAX, so that it can be asked before a run starts, and of an environment alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dreamfleet.agents.dreamer.config import ModelConfig
from dreamfleet.agents.errors import SpaceError
from dreamfleet.spaces import FLAGS, RESET, Space, without_logs

_MOST_CHOICES = 4096


def check_spaces(
    obs_space: Mapping[str, Space], act_space: Mapping[str, Space], model: ModelConfig
) -> None:
    """Refuse spaces that no agent with this model can be built for.

    Raises:
        SpaceError: The message names the key, and the fix.
    """
    check_observations(obs_space)
    check_actions(act_space)
    for name, space in observed(obs_space).items():
        if len(space.shape) == 3:
            check_image_size(name, space.shape[0], space.shape[1], model)


def stored_space(model: ModelConfig) -> dict[str, Space]:
    """The latent state that is stored with each step."""
    return {
        "dyn/deter": Space(np.float32, (model.deter,)),
        "dyn/stoch": Space(np.float32, (model.stoch, model.classes)),
    }


def observed(space: Mapping[str, Space]) -> dict[str, Space]:
    """The keys that are encoded and decoded."""
    return {key: entry for key, entry in without_logs(space).items() if key not in FLAGS}


def check_observations(space: Mapping[str, Space]) -> None:
    missing = [name for name in FLAGS if name not in space]
    if missing:
        raise SpaceError(f"The observation space lacks {', '.join(missing)}; add these keys.")
    images = {}
    for name, entry in observed(space).items():
        if len(entry.shape) == 3:
            if entry.dtype != np.uint8:
                raise SpaceError(
                    f"Image {name!r} must hold uint8 values, not {entry.dtype}: convert it in the "
                    "environment, or flatten it to use it as a vector."
                )
            images[name] = entry.shape[:2]
        elif len(entry.shape) <= 2:
            _check_choices(name, entry)
        else:
            raise SpaceError(
                f"Observation {name!r} has {len(entry.shape)} dimensions: use up to 2 for vectors, "
                "3 for images."
            )
    if not observed(space):
        raise SpaceError("There is nothing to observe: add a key beside reward and flags.")
    if len(set(images.values())) > 1:
        sizes = ", ".join(f"{name} {height}x{width}" for name, (height, width) in images.items())
        raise SpaceError(f"All images need the same size, got {sizes}: resize them.")


def check_actions(space: Mapping[str, Space]) -> None:
    names = [name for name in space if name != RESET]
    for name in names:
        _check_choices(name, space[name])
    if not names:
        raise SpaceError("There is nothing to decide: the action space has no key beside reset.")


def check_image_size(name: str, height: int, width: int, model: ModelConfig) -> None:
    factor = 2 ** len(model.mults)
    if height % factor or width % factor:
        raise SpaceError(
            f"Image {name!r} is {height}x{width}; both sides must be multiples of {factor}, "
            f"because model.mults has {len(model.mults)} stages that each halve it: resize it, for "
            "example with the environment's option size=[64,64]."
        )


def _check_choices(name: str, space: Space) -> None:
    if not space.discrete:
        return
    if np.any(space.low != space.low.flat[0]):
        raise SpaceError(f"All elements of {name!r} need the same low bound: shift them.")
    choices = int(space.classes.max())
    if choices > _MOST_CHOICES:
        raise SpaceError(
            f"{name!r} has {choices} choices, too many for one-hots: give it bounds, or make it a "
            "float."
        )
