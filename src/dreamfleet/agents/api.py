"""What the runtime knows about an agent.

`Agent` is the whole interface, and `Player` the part of it that acts. `AgentBase` has bodies for
what an agent may leave out. The functions below the classes pass the state that acting needs on,
and work on the rows of a carry: one walk for all code that keeps, pads or cuts carries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dreamfleet.spaces import Space, without_logs, without_reset

Arrays = dict[str, NDArray[Any]]
Mode = Literal["train", "eval", "greedy"]
"""What actions are for; all modes but the greedy one sample them."""
Flat = dict[str, NDArray[Any] | int | float | str]
Carry = Any
Rows = NDArray[np.integer[Any]] | NDArray[np.bool_] | slice


class Player(Protocol):
    """Acts."""

    def init_policy(self, n: int) -> Carry:
        """The carry of n environments that have not started."""

    def policy(
        self, carry: Carry, obs: Mapping[str, NDArray[Any]], mode: Mode = "train"
    ) -> tuple[Carry, Arrays, Arrays]:
        """Next carry, actions, and what to store with the step."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the policy at this moment, logged under `actor/`."""


@runtime_checkable
class Agent(Player, Protocol):
    """Acts, learns, reports and can be saved.

    One object serves an actor thread (`policy`, `init_policy`) and a learner thread (everything
    else) at the same time.

    A policy carry is a numpy array, or a dict, list or tuple of carries; the leading axis of every
    array is the environment. Train and report carries stay on the training devices and are only
    passed to the next call.
    """

    obs_space: dict[str, Space]
    """What it observes, without keys that are only logged."""
    act_space: dict[str, Space]
    """What it chooses, without `reset`."""
    stored_space: dict[str, Space]
    """What is stored with each step in addition: the third result of `policy`."""
    context: int
    """Steps that a batch holds before those that are trained on."""

    def compile(
        self,
        *,
        batch_size: int,
        batch_length: int,
        report_length: int | None,
        policy_batches: Sequence[int],
    ) -> None:
        """Get ready for batches of these sizes; called once, before data is collected."""

    def init_train(self, n: int) -> Carry:
        """The carry of n training sequences."""

    def init_report(self, n: int) -> Carry:
        """The carry of n report sequences."""

    def train(self, carry: Carry, batch: Mapping[str, Any]) -> tuple[Carry, Any, Any]:
        """Next carry, outs, metrics; `outs["replay"]` goes back to the replay."""

    def report(self, carry: Carry, batch: Mapping[str, Any]) -> tuple[Carry, dict[str, Any]]:
        """Next carry, metrics that may hold images and videos."""

    def stream(self, batches: Iterable[Mapping[str, NDArray[Any]]]) -> Iterator[Mapping[str, Any]]:
        """The batches, placed on the training devices ahead of their use."""

    def save(self) -> Flat:
        """A flat dict of arrays and scalars."""

    def load(self, state: Mapping[str, Any], regex: str | None = None) -> None:
        """Take over a saved state, or the entries whose names match `regex` from the start."""


@dataclass(frozen=True)
class Guess:
    """What a world model says about one moment."""

    obs: Arrays
    """The observation, decoded; not every key need be there."""
    reward: float
    """For arriving here."""
    continuation: float
    """The probability that the episode goes on."""
    value: float
    """The return that the critic expects from here on."""
    sample: Arrays
    """An action drawn from the policy."""
    mode: Arrays
    """The policy's likeliest action."""
    allowed: NDArray[np.bool_] | None = None
    """Which choices of the action the model believes are allowed; None if the task has no mask."""


class WorldModel(Protocol):
    """A world model that users can play with; an agent that has one gives it away with a method
    `world_model()`, which is optional.

    A latent state is whatever the model passes to itself, and is never changed in place. The same
    seed and number draw the same random numbers.
    """

    def stored(self, step: Mapping[str, NDArray[Any]]) -> Any | None:
        """The latent state that the replay has stored with a step; None if there is none."""

    def observe(
        self, latent: Any | None, obs: Mapping[str, Any], action: Arrays, seed: int, number: int
    ) -> tuple[Any, Guess]:
        """The next latent state, after an observation; `action` led to it, and the latent state
        before it is None where an episode begins."""

    def imagine(self, latent: Any, action: Arrays, seed: int, number: int) -> tuple[Any, Guess]:
        """The next latent state after an action, without an observation."""


class AgentBase:
    """An agent without a memory that needs no compilation and reports nothing.

    A subclass adds `policy`, `train`, `save` and `load`, and overrides what else it needs.
    """

    def __init__(self, obs_space: Mapping[str, Space], act_space: Mapping[str, Space]) -> None:
        self.obs_space = without_logs(obs_space)
        self.act_space = without_reset(act_space)
        self.stored_space: dict[str, Space] = {}
        self.context = 0

    def compile(
        self,
        *,
        batch_size: int,
        batch_length: int,
        report_length: int | None,
        policy_batches: Sequence[int],
    ) -> None:
        """Nothing to compile."""

    def metrics(self) -> dict[str, float]:
        return {}

    def init_policy(self, n: int) -> Carry:  # noqa: ARG002 - the protocol's
        return {}

    def init_train(self, n: int) -> Carry:  # noqa: ARG002 - the protocol's
        return {}

    def init_report(self, n: int) -> Carry:  # noqa: ARG002 - the protocol's
        return {}

    def report(
        self,
        carry: Carry,
        batch: Mapping[str, Any],  # noqa: ARG002 - the protocol's
    ) -> tuple[Carry, dict[str, Any]]:
        return carry, {}

    def stream(self, batches: Iterable[Mapping[str, NDArray[Any]]]) -> Iterator[Mapping[str, Any]]:
        return iter(batches)


# --- actors in processes of their own ------------------------------------------------------------


def policy_state(agent: Agent) -> Flat:
    """What another object needs to act as this agent does: its method `policy_state`, or, if it has
    none, all of its state. Called by the learner's thread."""
    own: Callable[[], Flat] | None = getattr(agent, "policy_state", None)
    return own() if own else agent.save()


def load_policy(agent: Any, state: Mapping[str, Any]) -> None:
    """Have an agent act with what `policy_state` gave: its method `load_policy`, or, if it has
    none, `load`. Never called while it chooses actions."""
    (agent.load_policy if hasattr(agent, "load_policy") else agent.load)(state)


def compile_policy(agent: Player, policy_batches: Sequence[int]) -> None:
    """Get an agent that only acts ready for batches of these sizes, if it has such a method."""
    if own := getattr(agent, "compile_policy", None):
        own(policy_batches)


def settle(agent: Any) -> None:
    """Have an agent act with the parameters of its last update from now on, however long that
    takes: its method `settle`, if it has one. Others act with them anyway. Called by the learner's
    thread."""
    if own := getattr(agent, "settle", None):
        own()


def save_later(agent: Any) -> Callable[[], Flat]:
    """What returns the state that `save` would return now, from any thread, while the agent goes on
    learning: its method `save_later`, or, if it has none, a copy that is made at once. Called by
    the learner's thread."""
    if own := getattr(agent, "save_later", None):
        later: Callable[[], Flat] = own()
        return later
    state = {
        key: value.copy() if isinstance(value, np.ndarray) and value.flags.writeable else value
        for key, value in agent.save().items()
    }
    return lambda: state


def memory(agent: Any) -> dict[str, float]:
    """Bytes that training needs on each device, by what they are for, if the agent has a method
    `memory`: `parameters`, `optimizer`, `activations`, and the `limit` of what there is."""
    own: Callable[[], dict[str, float]] | None = getattr(agent, "memory", None)
    return own() if own else {}


def trace(agent: Any, folder: Path) -> AbstractContextManager[object]:
    """What has an agent write a profile of all that it computes meanwhile into a folder: its method
    `trace`, if it has one. Called by the learner's thread."""
    own: Callable[[Path], AbstractContextManager[object]] | None = getattr(agent, "trace", None)
    return own(folder) if own else nullcontext()


# --- rows of carries -----------------------------------------------------------------------------


def map_arrays(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """The function's result for every array of a carry, with the arrays at the same place in
    `others`, in the carry's form."""
    if isinstance(tree, dict):
        return {
            key: map_arrays(function, value, *(other[key] for other in others))
            for key, value in tree.items()
        }
    if isinstance(tree, (tuple, list)):
        parts = [map_arrays(function, *each) for each in zip(tree, *others, strict=True)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return function(tree, *others)


def take_rows(carry: Carry, rows: Rows) -> Carry:
    """Some rows of a policy carry."""
    return map_arrays(lambda array: array[rows], carry)


def put_rows(carry: Carry, rows: Rows, values: Carry) -> None:
    """Write rows of a policy carry in place."""

    def put(new: Any, array: Any) -> None:
        array[rows] = new

    map_arrays(put, values, carry)


def pad_rows(carry: Carry, count: int) -> Carry:
    """The carry with `count` more rows at its end, copies of its first row."""
    return map_arrays(lambda x: np.concatenate([x, np.repeat(x[:1], count, axis=0)]), carry)
