"""Steps per second of vectorised environments, beside their bare loop.

Both step the same environments with the same random actions, in turns of a second in one process.
Ours is what an environment process does: translate, check, and mark where episodes begin and end.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from benchmarks.report import Row, compare
from dreamfleet.envs.registry import make_lanes
from dreamfleet.spaces import RESET

_ROUNDS = 5


def cartpole(num_envs: int) -> VectorEnv[Any, Any, Any]:
    return gymnasium.make_vec("CartPole-v1", num_envs, "vector_entry_point")


def atari(num_envs: int) -> VectorEnv[Any, Any, Any]:
    import ale_py

    gymnasium.register_envs(ale_py)
    return gymnasium.make_vec("ALE/Pong-v5", num_envs)


def envpool_atari(num_envs: int) -> Any:
    return importlib.import_module("envpool").make_gymnasium("Pong-v5", num_envs=num_envs)


class Gymnax(VectorEnv[Any, Any, Any]):
    """CartPole of gymnax; a lane that was done before a step is reset by it."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - Gymnasium's

    def __init__(self, num_envs: int) -> None:
        import jax
        import jax.numpy as jnp

        env, params = importlib.import_module("gymnax").make("CartPole-v1")
        self.num_envs = num_envs
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,))
        self.single_action_space = gymnasium.spaces.Discrete(2)

        def step(key: Any, state: Any, done: Any, action: Any) -> Any:
            obs, after, reward, over, _ = env.step_env(key, state, action, params)
            first, begun = env.reset_env(key, params)
            made = (obs, after, reward, over), (first, begun, 0.0, False)
            return jax.tree.map(lambda old, new: jnp.where(done, new, old), *made)

        self._reset: Any = jax.jit(jax.vmap(lambda key: env.reset_env(key, params)))
        self._step: Any = jax.jit(jax.vmap(step))
        self._split: Any = jax.jit(lambda key: jax.random.split(key, num_envs + 1))
        self._key: Any = jax.random.key(0)

    def _keys(self) -> Any:
        keys = self._split(self._key)
        self._key = keys[0]
        return keys[1:]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # noqa: ARG002
        obs, self._state = self._reset(self._keys())
        self._done = np.zeros(self.num_envs, bool)
        return np.asarray(obs, np.float32), {}

    def step(self, actions: Any) -> Any:
        made = self._step(self._keys(), self._state, self._done, actions)
        obs, self._state, reward, self._done = made
        done = np.asarray(self._done)
        return np.asarray(obs), np.asarray(reward), done, np.zeros_like(done), {}


WORLDS: dict[str, tuple[Callable[[int], Any], str, int]] = {
    "Gymnasium's CartPole": (cartpole, "gymnasium", 1024),
    "CartPole of gymnax": (Gymnax, "gymnax", 1024),
    "Pong of EnvPool": (envpool_atari, "envpool", 64),
    "Pong of ALE": (atari, "ale_py", 64),
}


def run(quick: bool = False) -> Iterator[Row]:
    """Each world that is installed."""
    for name, (make, package, lanes) in WORLDS.items():
        if importlib.util.find_spec(package) is None:
            yield Row(name, None, "steps/s", note=f"{package} is not installed")
            continue
        count = 8 if quick else lanes
        ours, bare = _ours(make, count), _bare(make, count)
        rates: tuple[list[float], list[float]] = ([], [])
        for _ in range(1 if quick else _ROUNDS):
            for step, found in zip((ours, bare), rates, strict=True):
                found.append(count * _rate(step, 0.05 if quick else 1.0))
        mine, theirs = map(statistics.median, rates)
        yield compare(f"{name}, {count} lanes", mine, "steps/s", "bare loop", theirs)


def _ours(make: Callable[[int], Any], count: int) -> Callable[[], object]:
    def factory(num_envs: int) -> Any:
        return make(num_envs)

    env = make_lanes(factory, count)
    actions = _actions(int(env.act_space["action"].high), count)
    obs = env.step(env.reset_action)

    def step() -> None:
        nonlocal obs
        obs = env.step({"action": next(actions), RESET: obs["is_last"]})

    return step


def _bare(make: Callable[[int], Any], count: int) -> Callable[[], object]:
    env = make(count)
    actions = _actions(int(env.single_action_space.n), count)
    env.reset()
    return lambda: env.step(next(actions))


def _actions(choices: int, count: int) -> Iterator[Any]:
    drawn = np.random.default_rng(0).integers(0, choices, (64, count), np.int32)
    while True:
        yield from drawn


def _rate(step: Callable[[], object], seconds: float) -> float:
    """Calls per second."""
    step()
    start, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds:
        step()
        calls += 1
    return calls / passed
