"""The policy call in numpy, for acting on a CPU.

The arithmetic of `acting.policy_step`, without the cost of dispatching a compiled program with a
hundred arguments, and without waiting for the compiler's thread pool while a training step has it.
Calls are so short that Python's own work counts: parameters are unpacked once into plain tuples,
and arrays that nobody else holds are changed in place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import threadpoolctl
from numpy.typing import NDArray

from dreamfleet.agents.dreamer.acting import ActingNetworks, Draws
from dreamfleet.agents.dreamer.encoder import DefaultEncoder
from dreamfleet.agents.dreamer.features import IMPOSSIBLE, Feature, embed_actions
from dreamfleet.agents.dreamer.heads import Policy
from dreamfleet.agents.dreamer.layers import EPSILON
from dreamfleet.agents.dreamer.rssm import RSSM, State
from dreamfleet.envs.masks import ACTION_MASK

Floats = NDArray[np.float32]
_ONE, _HALF = np.float32(1), np.float32(0.5)


@functools.cache
def use_one_blas_thread() -> None:
    """Keep numpy's products on the calling thread, in this whole process.

    They are too small to gain from more, and while a training step has the cores a product that is
    split over threads waits for the slowest.
    """
    threadpoolctl.threadpool_limits(1, user_api="blas")


class _Linear(NamedTuple):
    kernel: Floats
    bias: Floats

    @classmethod
    def of(cls, layer: Any) -> _Linear:
        return cls(np.asarray(layer.kernel), np.asarray(layer.bias))

    def __call__(self, x: Floats) -> Floats:
        y: Floats = x @ self.kernel
        y += self.bias
        return y


class _Norm(NamedTuple):
    """Bias, RMS norm over the last axis and SiLU, of an array that may be overwritten."""

    bias: Floats
    scale: Floats
    epsilon: Floats

    @classmethod
    def of(cls, layer: Any, shape: tuple[int, ...] = (-1,)) -> _Norm:
        """The norm as the sum of squares gives it, and halved for the SiLU that follows."""
        width = layer.scale.shape[-1]
        scale = np.asarray(layer.scale) * np.float32(0.5 * math.sqrt(width))
        epsilon = np.asarray(EPSILON * width, np.float32)
        return cls(np.asarray(layer.bias).reshape(shape), scale.reshape(shape), epsilon)

    def __call__(self, y: Floats) -> Floats:
        y += self.bias
        inverse: Floats = np.vecdot(y, y)
        inverse += self.epsilon
        np.sqrt(inverse, out=inverse)
        np.reciprocal(inverse, out=inverse)
        y *= inverse[..., None]
        y *= self.scale
        # silu(2h) = h (1 + tanh(h)): x sigmoid(x) without a division.
        gate: Floats = np.tanh(y)
        gate += _ONE
        gate *= y
        return gate


class _Dense(NamedTuple):
    kernel: Floats
    norm: _Norm

    @classmethod
    def of(cls, layer: Any) -> _Dense:
        return cls(np.asarray(layer.kernel), _Norm.of(layer))

    def __call__(self, x: Floats) -> Floats:
        return self.norm(x @ self.kernel)


class NumpyActor:
    """Chooses actions with parameters that are numpy arrays in float32."""

    @staticmethod
    def knows(nets: ActingNetworks) -> bool:
        """Whether this class computes what these networks do: vectors, and no subclasses."""
        known = (DefaultEncoder, RSSM, Policy)
        encoder: Any = nets.encoder
        return (type(encoder), type(nets.dynamics), type(nets.actor)) == known and not encoder.cnn

    def __init__(self, nets: ActingNetworks) -> None:
        encoder: Any = nets.encoder
        dynamics: Any = nets.dynamics
        actor = nets.actor
        self._vectors = encoder.features.vectors
        self._encoder = [_Dense.of(each) for each in encoder.mlp.layers]
        self._core = _Core(dynamics)
        self._posterior = [_Dense.of(layer) for layer in dynamics.posterior]
        self._posterior_logits = _Linear.of(dynamics.posterior_logits)
        self._classes = dynamics.classes
        self._unimix = np.float32(dynamics.unimix)
        self._actor = [_Dense.of(layer) for layer in actor.mlp.layers]
        self._outputs = {name: _Linear.of(layer) for name, layer in actor.outputs.items()}
        self._actions = actor.actions
        self._mask = actor.mask
        self._min_std, self._max_std = actor.min_std, actor.max_std

    def __call__(
        self, carry: Mapping[str, Any], obs: Mapping[str, NDArray[Any]], draws: Draws
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]], dict[str, Floats]]:
        batch = len(obs["is_first"])
        previous = embed_actions(self._actions, carry["previous"], np.float32)
        deter, stoch = carry["state"]
        if np.any(obs["is_first"]):
            keep = 1.0 - obs["is_first"].astype(np.float32)[:, None]
            deter, stoch, previous = deter * keep, stoch * keep, previous * keep
        deter = self._core(deter, stoch, previous)
        x = np.concatenate([deter, self._tokens(obs)], -1)
        for layer in self._posterior:
            x = layer(x)
        logits = self._posterior_logits(x).reshape(batch, -1, self._classes)
        probs = _softmax(_classes_first(logits))
        probs *= _ONE - self._unimix
        probs += self._unimix / np.float32(self._classes)
        stoch = _one_hot(_sample(probs, draws.state), self._classes)
        allowed = self._mask.allowed(obs[ACTION_MASK]) if self._mask else None
        flat = stoch.reshape(batch, -1)
        actions = self._act(deter, flat, draws, allowed)
        entries = {"dyn/deter": deter, "dyn/stoch": stoch}
        state: Any = State(deter, flat)  # type: ignore[arg-type]
        return {"state": state, "previous": actions}, actions, entries

    def _tokens(self, obs: Mapping[str, NDArray[Any]]) -> Floats:
        x = np.concatenate([_encode(each, obs[each.name]) for each in self._vectors], -1)
        for layer in self._encoder:
            x = layer(x)
        return x

    def _act(
        self, deter: Floats, stoch: Floats, draws: Draws, allowed: NDArray[np.bool_] | None
    ) -> dict[str, NDArray[Any]]:
        x = np.concatenate([deter, stoch], -1)
        for layer in self._actor:
            x = layer(x)
        actions: dict[str, NDArray[Any]] = {}
        for action in self._actions:
            name = action.name
            noise = draws.actions[name] if draws.actions is not None else None
            if action.discrete:
                logits = action.mask_logits(self._outputs[f"{name}.logits"](x))
                if allowed is not None:
                    logits = np.where(allowed, logits, np.float32(IMPOSSIBLE))
                logits = _classes_first(logits)
                sample = _sample if allowed is None else _sample_possible
                index = logits.argmax(0) if noise is None else sample(_softmax(logits), noise)
                actions[name] = (index + action.low).astype(np.int32)
                continue
            mean = np.tanh(self._outputs[f"{name}.mean"](x)).reshape(-1, *action.shape)
            actions[name] = mean
            if noise is None:
                continue
            raw = self._outputs[f"{name}.stddev"](x)
            sigmoid = 0.5 + 0.5 * np.tanh(0.5 * (raw + 2.0))
            std = (self._max_std - self._min_std) * sigmoid + self._min_std
            mean += std.reshape(noise.shape) * noise
        return actions


class _Core:
    """The recurrent cell."""

    def __init__(self, dynamics: Any) -> None:
        inputs = (dynamics.deter_in, dynamics.stoch_in, dynamics.action_in)
        self._kernels = [np.asarray(layer.kernel) for layer in inputs]
        norms = [_Norm.of(layer) for layer in inputs]
        self._inputs_norm = _Norm(
            np.stack([norm.bias for norm in norms])[:, None],
            np.stack([norm.scale for norm in norms])[:, None],
            norms[0].epsilon,
        )
        first = dynamics.hidden[0]
        self._count, width, self._width = first.kernel.shape
        own = dynamics.widths[0] // self._count
        self._own_kernel = np.ascontiguousarray(first.kernel[:, :own])
        shared = np.asarray(first.kernel[:, own:]).transpose(1, 0, 2)
        self._shared_kernel = np.ascontiguousarray(shared.reshape(width - own, -1))
        self._norms = [_Norm.of(layer) for layer in dynamics.hidden]
        self._further = [np.asarray(layer.kernel) for layer in dynamics.hidden[1:]]
        # Reset and update gates side by side and halved, so that one tanh gives both sigmoids:
        # sigmoid(x) = (1 + tanh(x / 2)) / 2. The candidate is halved for the reset gate's share.
        width = self._width
        bias = np.array(dynamics.gates.bias).reshape(self._count, 1, 3 * width)
        bias[..., 2 * width :] -= 1.0
        order = np.r_[0:width, 2 * width : 3 * width, width : 2 * width]
        self._gates_kernel = np.ascontiguousarray(dynamics.gates.kernel[..., order]) * _HALF
        self._gates_bias = bias[..., order] * _HALF

    def __call__(self, deter: Floats, stoch: Floats, action: Floats) -> Floats:
        rows, width = len(deter), self._width
        previous = deter.reshape(rows, self._count, -1).swapaxes(0, 1)
        mixed: Floats = self._shared(deter, stoch, action) @ self._shared_kernel
        by_block = mixed.reshape(rows, self._count, -1).swapaxes(0, 1)
        by_block += previous @ self._own_kernel
        mixed = self._norms[0](mixed)
        for kernel, norm in zip(self._further, self._norms[1:], strict=True):
            by_block = mixed.reshape(rows, self._count, -1).swapaxes(0, 1)
            mixed = norm((by_block @ kernel).swapaxes(0, 1).reshape(rows, -1))
        gates = mixed.reshape(rows, self._count, -1).swapaxes(0, 1) @ self._gates_kernel
        gates += self._gates_bias
        both = np.tanh(gates[..., : 2 * width])
        both += _ONE
        candidate = gates[..., 2 * width :] * both[..., :width]
        np.tanh(candidate, out=candidate)
        candidate -= previous
        candidate *= both[..., width:]
        candidate *= _HALF
        candidate += previous
        return np.asarray(candidate.swapaxes(0, 1).reshape(rows, -1))

    def _shared(self, deter: Floats, stoch: Floats, action: Floats) -> Floats:
        """The three inputs through their layers, side by side."""
        rows = len(deter)
        products = np.empty((3, rows, self._kernels[0].shape[1]), np.float32)
        limit: Floats = np.maximum(_ONE, np.abs(action))
        inputs = (deter, stoch, action / limit)
        for out, x, kernel in zip(products, inputs, self._kernels, strict=True):
            np.matmul(x, kernel, out=out)
        return self._inputs_norm(products).swapaxes(0, 1).reshape(rows, -1)


def _classes_first(logits: Floats) -> Floats:
    """The last axis moved to the front, where numpy reduces fastest if it is short."""
    return np.ascontiguousarray(logits.reshape(-1, logits.shape[-1]).T).reshape(
        logits.shape[-1], *logits.shape[:-1]
    )


def _softmax(logits: Floats) -> Floats:
    """Softmax over the first axis."""
    exp: Floats = np.exp(logits - np.maximum.reduce(logits, 0))
    exp /= np.add.reduce(exp, 0)
    return exp


def _sample(probs: Floats, uniform: Floats) -> NDArray[np.int64]:
    """An index of the first axis for each uniform number."""
    classes = len(probs)
    reached = np.add.reduce(_cumulative(probs) <= uniform.reshape(-1), 0, dtype=np.int64)
    return np.asarray(np.minimum(reached, classes - 1).reshape(uniform.shape))


def _sample_possible(probs: Floats, uniform: Floats) -> NDArray[np.int64]:
    """`_sample` that never draws a class without probability, whatever the rounding."""
    possible = probs.reshape(len(probs), -1) > 0.0
    reached = (_cumulative(probs) > uniform.reshape(-1)) & possible
    last = len(probs) - 1 - possible[::-1].argmax(0)
    index = np.where(reached.any(0), reached.argmax(0), last)
    return np.asarray(index.reshape(uniform.shape))


def _cumulative(probs: Floats) -> Floats:
    """Running sums over the first axis, the others flattened; as a product with a triangle,
    because numpy's own go element by element."""
    classes = len(probs)
    return np.asarray(np.tri(classes, dtype=np.float32) @ probs.reshape(classes, -1))


def _one_hot(index: NDArray[np.integer[Any]], classes: int) -> Floats:
    """All zeros where the index is out of range."""
    return np.asarray(index[..., None] == np.arange(classes), np.float32)


def _encode(feature: Feature, value: NDArray[Any]) -> Floats:
    encoded: Floats
    if feature.discrete:
        encoded = feature.one_hot(value, np.float32)
    else:
        wide = feature.flat(value).astype(np.float32)
        encoded = np.sign(wide) * np.log1p(np.abs(wide))
    present = feature.is_present(value)
    if not present.all():
        encoded[~present] = 0.0
    return encoded
