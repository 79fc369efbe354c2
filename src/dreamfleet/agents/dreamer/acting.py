"""Acting: one policy call as a pure function, and the parameters that are published for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import NDArray

from dreamfleet.agents.dreamer.features import Feature, embed_actions
from dreamfleet.agents.dreamer.heads import Policy, mode_actions, sample_actions
from dreamfleet.agents.dreamer.interfaces import Dynamics, Encoder
from dreamfleet.agents.dreamer.layers import cast
from dreamfleet.agents.dreamer.learning import latent_entries
from dreamfleet.agents.dreamer.networks import Networks
from dreamfleet.agents.dreamer.rssm import State
from dreamfleet.masks import ACTION_MASK

Actor = TypeVar("Actor")


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
    """The numbers of call `count` of a stream, for (rows, categorical variables).

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
    """Encode, one posterior step, choose an action: next carry, actions, entries to store."""
    features, dtype = nets.actor.actions, nets.actor.mlp.layers[0].kernel.dtype
    stoch = carry["stoch"].reshape(len(carry["stoch"]), -1)
    before = State(carry["deter"].astype(dtype), stoch.astype(dtype))
    previous = embed_actions(features, carry["previous"], dtype)
    # Networks read sequences: these have one step.
    tokens = nets.encoder({key: value[:, None] for key, value in obs.items()})
    others = (previous, obs["is_first"], draws.state)
    observed = nets.dynamics.observe(before, tokens, *(each[:, None] for each in others))
    state = State(*(part[:, 0] for part in observed.state))
    mask = nets.actor.mask
    choices = nets.actor(state, mask.allowed(obs[ACTION_MASK]) if mask else None)
    if draws.actions is None:
        actions = mode_actions(features, choices)
    else:
        actions = sample_actions(features, choices, draws.actions, masked=mask is not None)
    entries = latent_entries(state, nets.dynamics.classes)
    following = {"deter": entries["dyn/deter"], "stoch": entries["dyn/stoch"], "previous": actions}
    return following, actions, entries


@dataclass(frozen=True)
class Snapshot:
    """Parameters for acting, as they were after some number of updates."""

    nets: Any
    updates: int
    created: float


class Publisher(Generic[Actor]):
    """The newest parameters for the actor; neither side ever waits for the other.

    The learner hands over snapshots that may still be worked out on the training devices. A thread
    waits for them, brings them to where they are used, turns them into what the actor calls, and
    swaps one reference. One snapshot at a time: while `busy`, the learner keeps its own.

    Args:
        first: What to act with until something newer has arrived.
        bring: Returns parameters where they are used.
        prepare: Returns what the actor calls, from parameters that are there.
    """

    def __init__(
        self, first: Snapshot, bring: Callable[[Any], Any], prepare: Callable[[Any], Actor]
    ) -> None:
        self._bring, self._prepare = bring, prepare
        self._take(first)
        self._updates = first.updates
        # Its thread ends with the object.
        self._thread = ThreadPoolExecutor(1, "publish")
        self._coming: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Learner: whether a snapshot is still on its way."""
        return self._coming is not None and not self._coming.done()

    @property
    def published(self) -> int:
        """Learner: the updates of the newest snapshot that was handed over."""
        return self._published

    def publish(self, snapshot: Snapshot) -> None:
        """Learner: a newer snapshot, which need not be there yet; waits for one before it."""
        self.wait()
        if snapshot.updates > self._current[0].updates:
            self._published = snapshot.updates
            self._coming = self._thread.submit(self._take, snapshot)

    def wait(self) -> None:
        """Return when the actor has the newest snapshot."""
        if self._coming is not None:
            self._coming.result()

    def count(self, updates: int) -> None:
        """Learner: how far training is, so that the age of the actor's parameters is known."""
        self._updates = updates

    def latest(self) -> Actor:
        """Actor: the newest parameters that have arrived."""
        return self._current[1]

    def newest(self) -> Any:
        """Anybody: the newest parameters that have arrived."""
        return self._current[0].nets

    def age(self) -> tuple[int, float]:
        """(updates, seconds) that the actor's parameters are behind."""
        current, _ = self._current
        return self._updates - current.updates, time.monotonic() - current.created

    def _take(self, snapshot: Snapshot) -> None:
        arrive: Any = jax.block_until_ready
        nets = arrive(self._bring(snapshot.nets))
        self._current = replace(snapshot, nets=nets), self._prepare(nets)
        self._published = snapshot.updates
