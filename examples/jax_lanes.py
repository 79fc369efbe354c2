"""Brax and MuJoCo Playground as vectorised environments: one compiled step for all lanes.

    pip install brax playground
    dreamfleet train --task examples.jax_lanes:brax --env-options name=hopper --envs 64 \
        --envs-per-process 64 --logdir runs/hopper
    dreamfleet train --task examples.jax_lanes:playground --env-options name=CartpoleBalance \
        --envs 64 --envs-per-process 64 --logdir runs/balance

Every process compiles the step, which may take a minute. `docs/environments.md` says what a
vectorised environment has to offer.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv


class JaxLanes(VectorEnv):
    """Lanes of a batched Brax environment that does not reset by itself.

    The gym wrapper and the automatic resets of Brax would lose the last observation of an episode.
    """

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, env: Any, num_envs: int) -> None:
        self.num_envs, self._key = num_envs, jax.random.key(0)
        self.single_observation_space = Box(-np.inf, np.inf, (env.observation_size,))
        self.single_action_space = Box(-1.0, 1.0, (env.action_size,))

        def step(state: Any, action: jax.Array, key: jax.Array) -> Any:
            stepped = env.step(state, action)

            def reset_done() -> Any:
                def pick(new: jax.Array, old: jax.Array) -> jax.Array:
                    done = state.done.reshape(-1, *[1] * (old.ndim - 1))  # [N, 1, ...]
                    return jnp.where(done > 0, new, old)

                return jax.tree.map(pick, env.reset(key), stepped)

            return _strongly_typed(jax.lax.cond(state.done.any(), reset_done, lambda: stepped))

        self._reset = jax.jit(lambda key: _strongly_typed(env.reset(key)))
        self._step = jax.jit(step)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._key = jax.random.key(seed)
        self._state = self._reset(self._next_key())
        return np.asarray(self._state.obs), self._info()

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._state = state = self._step(self._state, action, self._next_key())
        done, cut = np.asarray(state.done, bool), np.asarray(state.info["truncation"], bool)
        return np.asarray(state.obs), np.asarray(state.reward), done & ~cut, cut, self._info()

    def _next_key(self) -> jax.Array:
        self._key, key = jax.random.split(self._key)
        return key

    def _info(self) -> dict[str, Any]:
        """The metrics; names that start with log/ are logged for each episode."""
        return {f"log/{name}": np.asarray(each) for name, each in self._state.metrics.items()}


def _strongly_typed(state: Any) -> Any:
    """Weak types would make JAX compile the step twice."""
    return jax.tree.map(lambda each: jnp.asarray(each, each.dtype), state)


def brax(num_envs: int, name: str = "hopper", episode_length: int = 1000) -> JaxLanes:
    from brax import envs

    env = envs.create(name, episode_length, auto_reset=False, batch_size=num_envs)
    return JaxLanes(env, num_envs)


def playground(
    num_envs: int, name: str = "CartpoleBalance", episode_length: int = 1000
) -> JaxLanes:
    from brax.envs.wrappers.training import EpisodeWrapper, VmapWrapper
    from mujoco_playground import registry

    env = registry.load(name, config_overrides={"impl": "jax"})  # the default needs a GPU
    return JaxLanes(VmapWrapper(EpisodeWrapper(env, episode_length, 1), num_envs), num_envs)
