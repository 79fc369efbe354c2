"""The policy call as a pure function of named arrays, for programs without this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import NDArray

from dreamfleet.agents.dreamer.acting import ActingNetworks, Draws, policy_step
from dreamfleet.agents.dreamer.images import plain_convolutions
from dreamfleet.agents.dreamer.rssm import RSSM
from dreamfleet.errors import ConfigError
from dreamfleet.spaces import Space

Choose = Literal["mode", "sample"]
Bounds = Mapping[str, tuple[NDArray[Any], NDArray[Any]]]
Arrays = dict[str, NDArray[Any]]
Shape = tuple[np.dtype[Any], tuple[int, ...]]


class _ModeRSSM(RSSM):
    """The dynamics with the likeliest latent state instead of a sample."""

    def sample(
        self, logits: Float[Array, "*batch variables classes"], uniform: Array
    ) -> Float[Array, "*batch stoch"]:
        del uniform
        return self._flat(jax.nn.one_hot(jnp.argmax(logits, -1), self.classes, dtype=self.dtype))


@dataclass(frozen=True)
class PolicyGraph:
    """One policy call, from named arrays [B, ...] to named arrays [B, ...].

    Inputs: `obs.<key>`, `is_first`, `state.<...>` and, where something is sampled, `noise.<...>`.
    Outputs: `action.<key>` in the environment's units, and `state_out.<...>`. The state is float32
    and starts as zeros; `is_first` resets its rows.
    """

    inputs: dict[str, Shape]
    """Dtype and shape without the batch axis, in the order of the arguments."""
    outputs: dict[str, Shape]
    function: Callable[..., tuple[Array, ...]]
    """In JAX, with arguments and results in these orders."""
    reference: Callable[[Mapping[str, NDArray[Any]]], Arrays]
    """What the policy of this package computes with the same numbers."""
    action_bounds: dict[str, tuple[NDArray[Any], NDArray[Any]]]
    """The lowest and the highest value of each action."""
    normal_noise: tuple[str, ...]
    """Inputs with standard normal noise; other noise is uniform from 0 to 1, without 1."""


def policy_graph(
    nets: ActingNetworks,
    obs_space: Mapping[str, Space],
    act_space: Mapping[str, Space],
    carry: Any,
    bounds: Bounds,
    *,
    latent: Choose = "sample",
    actions: Choose = "sample",
) -> PolicyGraph:
    """The policy call of these networks, in float32.

    Args:
        nets: The networks.
        obs_space: What is observed, without flags.
        act_space: What is chosen.
        carry: A carry of any number of rows.
        bounds: What -1 and 1 stand for in the environment, by continuous action.
        latent: How the latent state is chosen.
        actions: How actions are chosen.
    """
    if latent == "mode":
        if type(nets.dynamics) is not RSSM:
            raise ConfigError(
                f"latent=mode needs the default dynamics, not {type(nets.dynamics).__name__}: "
                "use latent=sample."
            )
        parts = {each.name: getattr(nets.dynamics, each.name) for each in fields(nets.dynamics)}
        nets = ActingNetworks(nets.encoder, _ModeRSSM(**parts), nets.actor)
    paths, tree = jax.tree_util.tree_flatten_with_path(carry)
    single = np.dtype(np.float32)
    state = {_name(path): (leaf.dtype, leaf.shape[1:]) for path, leaf in paths}
    features = nets.actor.actions
    noise: dict[str, Shape] = {}
    if latent == "sample":
        noise["noise.latent"] = (single, (nets.dynamics.draws,))
    if actions == "sample":
        noise |= {f"noise.action.{each.name}": (single, each.shape) for each in features}
    inputs: dict[str, Shape] = {
        **{f"obs.{key}": (space.dtype, space.shape) for key, space in obs_space.items()},
        "is_first": (np.dtype(bool), ()),
        **{f"state.{name}": (single, shape) for name, (_, shape) in state.items()},
        **noise,
    }
    outputs: dict[str, Shape] = {
        **{
            f"action.{each.name}": (np.dtype(np.int32) if each.discrete else single, each.shape)
            for each in features
        },
        **{f"state_out.{name}": (single, shape) for name, (_, shape) in state.items()},
    }

    def arguments(given: Mapping[str, Any]) -> tuple[Any, dict[str, Any], Draws]:
        """Those of `policy_step`."""
        rows = given["is_first"].shape[0]
        leaves = [given[f"state.{name}"].astype(dtype) for name, (dtype, _) in state.items()]
        obs = {key: given[f"obs.{key}"] for key in obs_space} | {"is_first": given["is_first"]}
        nothing = (
            given["is_first"].__array_namespace__().zeros((rows, nets.dynamics.draws), np.float32)
        )
        drawn = {each.name: given.get(f"noise.action.{each.name}") for each in features}
        return (
            jax.tree.unflatten(tree, leaves),
            obs,
            Draws(given.get("noise.latent", nothing), drawn if actions == "sample" else None),
        )

    def results(following: Any, chosen: Mapping[str, Any]) -> tuple[Any, ...]:
        native = []
        for each in features:
            value = chosen[each.name]
            if not each.discrete:
                low, high = (np.asarray(bound, np.float32) for bound in bounds[each.name])
                arrays = value.__array_namespace__()
                axes = (1, *each.shape)
                center, half = ((high + low) / 2).reshape(axes), ((high - low) / 2).reshape(axes)
                value = arrays.clip(value, np.float32(-1), np.float32(1)) * half + center
                value = arrays.clip(value, low.reshape(axes), high.reshape(axes))
            native.append(value)
        return (*native, *(leaf.astype(np.float32) for leaf in jax.tree.leaves(following)))

    def function(*flat: Array) -> tuple[Array, ...]:
        with plain_convolutions():
            following, chosen, _ = policy_step(
                nets, *arguments(dict(zip(inputs, flat, strict=True)))
            )
        return results(following, chosen)

    compiled = jax.jit(policy_step)

    def reference(given: Mapping[str, NDArray[Any]]) -> Arrays:
        following, chosen, _ = jax.device_get(compiled(nets, *arguments(given)))
        values = results(following, chosen)
        return dict(zip(outputs, map(np.asarray, values), strict=True))

    limits = {
        f"action.{key}": (space.low, space.high - 1) if space.discrete else bounds[key]
        for key, space in act_space.items()
    }
    normal = tuple(f"noise.action.{each.name}" for each in features if not each.discrete)
    return PolicyGraph(inputs, outputs, function, reference, limits, normal)


def _name(path: Any) -> str:
    """`deter` of the dynamics' state, `previous.<key>` of the previous actions."""
    words = [
        str(getattr(step, "key", getattr(step, "name", getattr(step, "idx", "")))) for step in path
    ]
    return ".".join(words[1:] if words[0] == "state" else words)
