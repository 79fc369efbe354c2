"""Action masks: which choices of a discrete action are allowed.

An observation with the key `action_mask` holds a number for each choice of the action: 0 for a
forbidden choice, 1 for an allowed one. A task with a mask has one action, which is discrete. If it
has several elements (MultiDiscrete), their masks are concatenated.

A mask that forbids every choice of an element allows them all. That is usual at the last step of an
episode, because no action follows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.spaces import Space, SpaceError, without_reset

log = logging.getLogger(__name__)

ACTION_MASK = "action_mask"
"""The key of an observation that holds the mask."""


@dataclass(frozen=True)
class ActionMask:
    """The mask of the action `name`. Methods take arrays of NumPy and of JAX."""

    name: str
    space: Space
    """Of the action."""

    @classmethod
    def of(
        cls, obs_space: Mapping[str, Space], act_space: Mapping[str, Space]
    ) -> ActionMask | None:
        """The mask of a task; None if it has none.

        Raises:
            SpaceError: The mask does not fit the action.
        """
        mask = obs_space.get(ACTION_MASK)
        if mask is None:
            return None
        actions = without_reset(act_space)
        name, space = next(iter(actions.items()), ("", None))
        if len(actions) != 1 or space is None or not space.discrete:
            kinds = [
                f"{key} ({'discrete' if s.discrete else 'float'})" for key, s in actions.items()
            ]
            raise SpaceError(
                f"Observation {ACTION_MASK!r} masks one discrete action, and the action space "
                f"holds {', '.join(kinds) or 'none'}: make it one Discrete or MultiDiscrete "
                "action, or give the observation another name."
            )
        total = int(space.classes.sum())
        if mask.shape != (total,):
            raise SpaceError(
                f"Observation {ACTION_MASK!r} has shape {mask.shape}, and action {name!r} has "
                f"{total} choices: give it the shape ({total},), with 1 for each choice that is "
                "allowed and 0 for each that is not, or another name."
            )
        if np.any(mask.low < 0) or np.any(mask.high > (2 if mask.discrete else 1)):
            raise SpaceError(
                f"Observation {ACTION_MASK!r} is {mask}, but may hold only 0 and 1: declare it as "
                f"Space(bool, ({total},)), or as MultiBinary({total}) of Gymnasium."
            )
        return cls(name, space)

    @cached_property
    def choices(self) -> tuple[int, ...]:
        """Choices of each element."""
        return tuple(int(n) for n in np.ravel(self.space.classes))

    @cached_property
    def _exists(self) -> NDArray[np.bool_]:
        """Which choices there are in a table as wide as the element with the most choices."""
        widest = np.arange(max(self.choices))
        return widest < np.reshape(self.choices, (*self.space.shape, 1))

    def table(self, values: Any, missing: Any) -> Any:
        """Numbers of all choices, shaped (*batch, choices), as (*batch, *shape, widest), with
        `missing` where an element has fewer choices than the widest (False among bools)."""
        shape = (*values.shape[:-1], *self._exists.shape)
        if self._exists.all():
            return values.reshape(shape)
        places = np.where(self._exists, np.cumsum(self._exists).reshape(self._exists.shape) - 1, 0)
        spread = values[..., places.ravel()].reshape(shape)
        arrays = values.__array_namespace__()
        exists = arrays.broadcast_to(self._exists, shape)
        if values.dtype == bool:  # ONNX runtimes do not choose between bools
            return spread & exists
        return arrays.where(exists, spread, np.asarray(missing, values.dtype))

    def allowed(self, mask: Any) -> Any:
        """Which choices a mask allows, as a table; every element has at least one."""
        table = self.table(mask.astype(bool), False)
        exists = table.__array_namespace__().broadcast_to(self._exists, table.shape)
        return table | (~table.any(-1, keepdims=True) & exists)

    def empty(self, mask: Any) -> Any:
        """Where a mask, of shape (*batch, choices), forbids every choice of an element."""
        nothing = ~self.table(mask.astype(bool), False).any(-1)
        return nothing.reshape(*mask.shape[:-1], -1).any(-1)

    def sample(self, rng: np.random.Generator, mask: NDArray[Any]) -> NDArray[Any]:
        """Uniform draws from the choices that each mask allows."""
        table = self.allowed(mask)
        index = np.where(table, rng.random(table.shape), -1.0).argmax(-1)
        return np.asarray(index + self.space.low, self.space.dtype)

    def allows(self, mask: NDArray[Any], action: Any) -> bool:
        """Whether a mask allows all elements of an action."""
        index = np.asarray(action - self.space.low, np.intp)
        return bool(np.take_along_axis(self.allowed(mask), index[..., None], -1).all())


class EmptyMasks:
    """Counts policy calls with a mask that allows no action although one follows, and warns of the
    first."""

    def __init__(self, mask: ActionMask) -> None:
        self._mask = mask
        self._calls = 0

    def check(self, obs: Mapping[str, Any]) -> None:
        """Check the observations of a policy call."""
        if not np.any(self._mask.empty(obs[ACTION_MASK]) & ~obs["is_last"]):
            return
        if not self._calls:
            log.warning(
                "%s forbids every action although the episode continues, so every action is "
                "allowed. Fix the environment that sent it.",
                ACTION_MASK,
            )
        self._calls += 1

    def metrics(self) -> dict[str, float]:
        return {"policy/empty_masks": self._calls}
