"""The agent of `vtrace.py`: it acts with numpy and learns with JAX."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dreamfleet.agents import AgentBase
from dreamfleet.spaces import FLAGS

from .vtrace import STORED, Spaces, VTraceConfig


class VTrace(AgentBase):
    """One object for two threads: `policy` for the actor, everything else for the learner."""

    def __init__(
        self, obs_space: Spaces, act_space: Spaces, config: VTraceConfig, seed: int
    ) -> None:
        super().__init__(obs_space, act_space)
        self.stored_space = STORED
        self._config = config
        self._inputs = sorted(key for key in self.obs_space if key not in FLAGS)
        ((self._action, space),) = self.act_space.items()
        self._low, self._dtype = int(space.low), space.dtype
        self._rng = np.random.default_rng(seed)
        width = sum(int(np.prod(self.obs_space[key].shape)) for key in self._inputs)
        params = {
            "actor": self._layers(width, config.units, config.units, int(space.classes)),
            "critic": self._layers(width, config.units, config.units, 1),
        }
        self._optimizer = optax.adam(config.learning_rate)
        self._state = {"params": params, "optimizer": self._optimizer.init(params), "updates": 0}
        self._published = params["actor"]  # what the actor thread uses; replaced as a whole
        self._update = jax.jit(self._update_step)

    def _layers(self, *widths: int) -> dict[str, Any]:
        return {
            f"layer{i}": {
                "kernel": self._rng.normal(0, 1 / np.sqrt(n), (n, m)).astype(np.float32),
                "bias": np.zeros(m, np.float32),
            }
            for i, (n, m) in enumerate(itertools.pairwise(widths))
        }

    def policy(self, carry: Any, obs: Mapping[str, Any], mode: str = "train") -> Any:
        """Actions by numpy, and their log-probabilities to store with the step."""
        logits = _network(self._published, self._vector(obs, np), np)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        # Adding Gumbel noise to logits and taking the largest samples from the softmax.
        noise = 0.0 if mode == "greedy" else self._rng.gumbel(size=logits.shape)
        index = (logits + noise).argmax(-1)
        stored = {"logprob": logprobs[np.arange(len(index)), index].astype(np.float32)}
        return carry, {self._action: (index + self._low).astype(self._dtype)}, stored

    def train(self, carry: Any, batch: Mapping[str, Any]) -> Any:
        keys = (*self._inputs, *FLAGS, self._action, "logprob")
        self._state, metrics = self._update(self._state, {key: batch[key] for key in keys})
        self._published = jax.device_get(self._state["params"]["actor"])
        return carry, {}, metrics

    def _update_step(self, state: Any, batch: Mapping[str, Any]) -> Any:
        grads, metrics = jax.grad(self._loss, has_aux=True)(state["params"], batch)
        updates, optimizer = self._optimizer.update(grads, state["optimizer"])
        params = optax.apply_updates(state["params"], updates)
        metrics["opt/updates"] = state["updates"] + 1
        return {"params": params, "optimizer": optimizer, "updates": state["updates"] + 1}, metrics

    def _loss(self, params: Any, batch: Mapping[str, Any]) -> Any:
        """Policy gradient, value error and entropy over all steps but the last.

        The reward and the flags of a step belong to the action of the step before.
        """
        obs = self._vector(batch, jnp)
        logprobs = jax.nn.log_softmax(_network(params["actor"], obs, jnp))[:, :-1]
        index = batch[self._action].astype(jnp.int32)[:, :-1, None] - self._low
        logprob = jnp.take_along_axis(logprobs, index, -1)[..., 0]
        value = _network(params["critic"], obs, jnp)[..., 0]
        # The step before a reset and the reset belong to different episodes.
        inside = 1.0 - batch["is_first"][:, 1:].astype(jnp.float32)
        alive = inside * (1.0 - batch["is_terminal"][:, 1:].astype(jnp.float32))
        ratio = jnp.minimum(1.0, jnp.exp(logprob - batch["logprob"][:, :-1])) * inside
        discount, reward = self._config.discount * alive, batch["reward"][:, 1:]
        goal, advantage = jax.lax.stop_gradient(_vtrace(reward, discount, ratio, value))
        count = jnp.maximum(inside.sum(), 1.0)
        # Centred and scaled: an untrained critic is wrong in the same direction for all actions.
        advantage -= (inside * advantage).sum() / count
        advantage /= jnp.sqrt((inside * advantage**2).sum() / count) + 1e-3
        entropy = -(jnp.exp(logprobs) * logprobs).sum(-1)
        losses = {
            "policy": -(ratio * advantage * logprob).sum() / count,
            "value": (inside * (value[:, :-1] - goal) ** 2).sum() / count,
            "entropy": -(inside * entropy).sum() / count,
        }
        total = losses["policy"] + losses["value"] + self._config.entropy_scale * losses["entropy"]
        return total, {f"loss/{name}": loss for name, loss in losses.items()}

    def _vector(self, obs: Mapping[str, Any], xp: Any) -> Any:
        """All observation keys, concatenated."""
        parts = []
        for key in self._inputs:
            value = xp.asarray(obs[key], xp.float32)
            lead = value.ndim - len(self.obs_space[key].shape)
            parts.append(value.reshape(*value.shape[:lead], -1))
        return xp.concatenate(parts, -1)

    def save(self) -> dict[str, Any]:
        leaves = jax.tree_util.tree_leaves_with_path(self._state)
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}

    def load(self, state: Mapping[str, Any], regex: str | None = None) -> None:
        def leaf(path: Any, old: Any) -> Any:
            name = jax.tree_util.keystr(path)
            return state[name] if regex is None or re.match(regex, name) else old

        self._state = jax.tree_util.tree_map_with_path(leaf, self._state)
        self._published = jax.device_get(self._state["params"]["actor"])


def _vtrace(reward: Any, discount: Any, ratio: Any, value: Any) -> Any:
    """Targets of the value, and advantages: V-trace (Espeholt et al., 2018) with both clips at 1.

    v_t = V_t + ratio_t (r_t+1 + discount_t+1 v_t+1 - V_t), from the end of the sequence.
    """

    def step(following: Any, inputs: Any) -> Any:
        reward, discount, ratio, value = inputs
        advantage = reward + discount * following - value
        return value + ratio * advantage, (value + ratio * advantage, advantage)

    inputs = [x.T for x in (reward, discount, ratio, value[:, :-1])]
    _, (goal, advantage) = jax.lax.scan(step, value[:, -1], inputs, reverse=True)
    return goal.T, advantage.T


def _network(layers: Any, x: Any, xp: Any) -> Any:
    """A multilayer perceptron, in numpy for the actor and in JAX for the learner."""
    for name in sorted(layers):
        x = x @ layers[name]["kernel"] + layers[name]["bias"]
        x = x if name == max(layers) else xp.tanh(x)
    return x
