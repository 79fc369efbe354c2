"""DreamerV3 as it acts: what the agent shares with the players of further actors."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Arrays, Carry, Flat, Mode
from dreamfleet.agents.dreamer.acting import ActingNetworks, draw, policy_step
from dreamfleet.agents.dreamer.config import DreamerConfig
from dreamfleet.agents.dreamer.features import action_features, check_spaces
from dreamfleet.agents.dreamer.interfaces import check_networks
from dreamfleet.agents.dreamer.layers import Shapes, cast
from dreamfleet.agents.dreamer.networks import Networks
from dreamfleet.agents.dreamer.runtime import nonfinite
from dreamfleet.agents.dreamer.runtime.devices import Placement
from dreamfleet.agents.dreamer.runtime.dreaming import DreamerWorldModel
from dreamfleet.agents.dreamer.runtime.exporting import (
    Bounds,
    Choose,
    PolicyGraph,
    policy_graph,
)
from dreamfleet.agents.dreamer.runtime.programs import Program, enable_cache
from dreamfleet.agents.dreamer.runtime.publishing import Publisher, Snapshot
from dreamfleet.agents.dreamer.runtime.saving import (
    named_leaves,
    replace_leaves,
    select_matching,
    to_flat,
)
from dreamfleet.errors import ConfigError
from dreamfleet.masks import ActionMask, EmptyMasks
from dreamfleet.spaces import FLAGS, Space, without_logs, without_reset

_UNUSED = {*FLAGS} - {"is_first"}


class ActingAgent:
    """Chooses actions with the newest parameters that were published.

    A subclass publishes the first ones with `_act_with`.
    """

    def __init__(
        self,
        obs_space: Mapping[str, Space],
        act_space: Mapping[str, Space],
        config: DreamerConfig,
        placement: Placement,
        seed: int,
    ) -> None:
        self.config = config
        self.obs_space = without_logs(obs_space)
        self.act_space = without_reset(act_space)
        check_spaces(self.obs_space, self.act_space)
        check_networks(self.obs_space, config.model)
        self._actions_of = action_features(self.act_space)
        mask = ActionMask.of(self.obs_space, self.act_space)
        self._empty_masks = EmptyMasks(mask) if mask else None
        self._placement = placement
        enable_cache(config.execution.cache_dir)
        self._updates = 0
        self._actions = 0
        rng = np.random.default_rng([seed, 1])
        self._action_seed = rng.integers(2**32, size=2, dtype=np.uint32)
        self._policy_program = Program("policy", policy_step)

    def init_policy(self, n: int) -> Carry:
        previous = {
            key: np.zeros((n, *space.shape), np.int32 if space.discrete else np.float32)
            for key, space in self.act_space.items()
        }
        state = jax.device_get(self._publisher.newest().dynamics.initial(n))
        return {
            "state": jax.tree.map(lambda x: np.array(x, np.float32), state),
            "previous": previous,
        }

    def policy(
        self,
        carry: Carry,
        obs: Mapping[str, NDArray[Any]],
        mode: Mode = "train",
    ) -> tuple[Carry, Arrays, Arrays]:
        """Choose actions: samples in training and in evaluation, as in the paper, or the mode."""
        inputs = {key: np.asarray(obs[key]) for key in self.obs_space if key not in _UNUSED}
        nonfinite.check_arrays("Observation", inputs, missing=True)
        if self._empty_masks:
            self._empty_masks.check(obs)
        nets = self._publisher.newest()
        shape = (len(inputs["is_first"]), nets.dynamics.draws)
        draws = draw(
            self._action_seed, self._actions, self._actions_of, shape, greedy=mode == "greedy"
        )
        self._actions += 1
        following, actions, entries = jax.device_get(
            self._policy_program(nets, carry, inputs, draws)
        )
        nonfinite.check_arrays("Action", actions)
        for key, space in self.act_space.items():
            if space.discrete:
                actions[key] = actions[key].astype(space.dtype)
        return following, actions, entries

    def metrics(self) -> dict[str, float]:
        """How old the parameters are that `policy` uses at the moment, and how often it met a mask
        that allows nothing."""
        updates, seconds = self._publisher.age()
        ages = {"policy/updates_behind": updates, "policy/seconds_behind": seconds}
        return {**ages, **(self._empty_masks.metrics() if self._empty_masks else {})}

    def compile_policy(self, policy_batches: Sequence[int]) -> None:
        """Get ready to act with batches of these sizes."""
        actions = self._actions
        for size in policy_batches:
            obs = {k: np.zeros((size, *s.shape), s.dtype) for k, s in self.obs_space.items()}
            obs["is_last"][:] = True  # where a mask of zeros is nothing to warn of
            self.policy(self.init_policy(size), obs)
        self._actions = actions  # not taken: a resumed run draws as if they had not been drawn

    def policy_state(self) -> Flat:
        """The parameters that choose actions, in compute precision."""
        return dict(to_flat(self._publisher.newest()))

    def policy_graph(self, bounds: Bounds, *, latent: Choose, actions: Choose) -> PolicyGraph:
        """The policy call as a function of named arrays, to be exported."""
        return policy_graph(
            cast(jax.tree.map(jnp.asarray, self._publisher.newest()), jnp.dtype(jnp.float32)),
            {key: space for key, space in self.obs_space.items() if key not in FLAGS},
            self.act_space,
            self.init_policy(1),
            bounds,
            latent=latent,
            actions=actions,
        )

    def load_policy(self, state: Mapping[str, Any]) -> None:
        """Act with these parameters from now on."""
        nets = self._publisher.newest()
        chosen = select_matching(named_leaves(nets), state, None)
        self._act_with(Snapshot(replace_leaves(nets, chosen), self._updates, time.monotonic()))

    def _act_with(self, first: Snapshot) -> None:
        self._publisher = Publisher(first, self._bring)

    def _bring(self, nets: ActingNetworks) -> ActingNetworks:
        """Parameters where `policy` uses them."""
        if jax.process_count() > 1:  # of what all hosts have, what is here
            nets = jax.tree.map(lambda leaf: leaf.addressable_data(0), nets)
        result: ActingNetworks = jax.device_put(nets, self._placement.policy_device)
        return result


class DreamerPlayer(ActingAgent):
    """Acts with parameters that an agent sends, or has saved. It has no optimizer, and compiles no
    training."""

    def __init__(
        self,
        obs_space: Mapping[str, Space],
        act_space: Mapping[str, Space],
        config: DreamerConfig,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(obs_space, act_space, config, Placement.of(config.execution, None), seed)
        # Only the shapes count: actors act when they have the agent's parameters.
        rng = np.random.default_rng([seed, 0])
        nets = Networks.init(rng, config, self.obs_space, self.act_space)
        acting = ActingNetworks.of(nets, config.execution.compute_dtype)
        self._act_with(Snapshot(acting, 0, time.monotonic()))
        self._nets: Networks | None = None

    def load(self, state: Mapping[str, Any]) -> None:
        """Act with the networks of a saved agent."""
        spaces = (self.obs_space, self.act_space)
        shapes = jax.eval_shape(lambda: Networks.init(Shapes(), self.config, *spaces))
        prefix = "nets/"
        saved = {
            name.removeprefix(prefix): value
            for name, value in state.items()
            if name.startswith(prefix)
        }
        chosen = select_matching(named_leaves(shapes), saved, None)
        self._nets = replace_leaves(shapes, {name: jnp.asarray(x) for name, x in chosen.items()})
        acting = ActingNetworks.of(self._nets, self.config.execution.compute_dtype)
        self._act_with(Snapshot(acting, 0, time.monotonic()))

    def world_model(self) -> DreamerWorldModel:
        """What the saved agent has learned, for a dream."""
        if self._nets is None:
            raise ConfigError("This player has no parameters yet: call load() first.")
        return DreamerWorldModel(self._nets, self.config, self._placement.policy_device)

    def metrics(self) -> dict[str, float]:
        """How old its parameters are is known to who loads them."""
        return self._empty_masks.metrics() if self._empty_masks else {}
