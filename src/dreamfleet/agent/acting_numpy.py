"""The policy call in numpy, for acting on a CPU.

The arithmetic of `acting.policy_step`, without the cost of dispatching a compiled program with a
hundred arguments, and without waiting for the compiler's thread pool while a training step has it.
Only images go through a compiled program.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agent.acting import ActingNetworks, Draws
from dreamfleet.agent.keys import Key
from dreamfleet.agent.nets import EPSILON, MLP, Dense, Linear

Floats = NDArray[np.float32]


def use_one_blas_thread() -> None:
    """Keep numpy's products on the calling thread.

    They are too small to gain from more, and while a training step has the cores a product that is
    split over threads waits for the slowest. Does nothing where numpy has another BLAS.
    """
    library = ctypes.CDLL(importlib.import_module("numpy._core._multiarray_umath").__file__)
    for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads"):
        try:
            setter = getattr(library, name)
        except AttributeError:
            continue
        setter(1)
        return


class NumpyActor:
    """Chooses actions with parameters that are numpy arrays in float32."""

    def __init__(
        self,
        nets: ActingNetworks,
        encode_images: Callable[[Mapping[str, NDArray[Any]]], Floats] | None = None,
    ) -> None:
        self._nets = nets
        self._encode_images = encode_images
        first = nets.dynamics.hidden[0]
        self._blocks, inputs, self._width = first.kernel.shape
        own = nets.dynamics.deter_width // self._blocks
        self._own_kernel = np.ascontiguousarray(first.kernel[:, :own])
        shared = np.asarray(first.kernel[:, own:]).transpose(1, 0, 2)
        self._shared_kernel = np.ascontiguousarray(shared.reshape(inputs - own, -1))
        # Reset and update gates side by side and halved, so that one tanh gives both sigmoids:
        # sigmoid(x) = (1 + tanh(x / 2)) / 2.
        gates = nets.dynamics.gates
        width = self._width
        bias = np.array(gates.bias).reshape(self._blocks, 1, 3 * width)
        bias[..., 2 * width :] -= 1.0
        order = np.r_[0:width, 2 * width : 3 * width, width : 2 * width]
        half = np.repeat(np.array([0.5, 0.5, 1.0], np.float32), width)
        self._gates_kernel = np.ascontiguousarray(gates.kernel[..., order]) * half
        self._gates_bias = bias[..., order] * half

    def __call__(
        self, carry: Mapping[str, Any], obs: Mapping[str, NDArray[Any]], draws: Draws
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]], dict[str, Floats]]:
        batch = len(obs["is_first"])
        keep = 1.0 - obs["is_first"].astype(np.float32)[:, None]
        keys, unimix = self._nets.actor.keys, self._nets.dynamics.unimix
        previous = np.concatenate([_embed(key, carry["previous"][key.name]) for key in keys], -1)
        deter = self._core(
            carry["deter"] * keep, carry["stoch"].reshape(batch, -1) * keep, previous * keep
        )
        logits = _classes_first(self._posterior(deter, self._tokens(obs)))
        probs = (1.0 - unimix) * _softmax(logits) + unimix / len(logits)
        stoch = _one_hot(_sample(probs, draws.state), len(logits))
        actions = self._act(deter, stoch.reshape(batch, -1), draws)
        entries = {"dyn/deter": deter, "dyn/stoch": stoch}
        return {"deter": deter, "stoch": stoch, "previous": actions}, actions, entries

    def _tokens(self, obs: Mapping[str, NDArray[Any]]) -> list[Floats]:
        encoder, parts = self._nets.encoder, []
        if encoder.mlp is not None:
            vectors = [_encode(key, obs[key.name]) for key in encoder.keys.vectors]
            parts.append(_mlp(encoder.mlp, np.concatenate(vectors, -1)))
        if self._encode_images is not None:
            parts.append(self._encode_images(obs))
        return parts

    def _core(self, deter: Floats, stoch: Floats, action: Floats) -> Floats:
        dynamics, rows = self._nets.dynamics, len(deter)
        limit: Floats = np.maximum(np.float32(1), np.abs(action))
        shared = np.concatenate(
            [
                _dense(dynamics.deter_in, deter),
                _dense(dynamics.stoch_in, stoch),
                _dense(dynamics.action_in, action / limit),
            ],
            -1,
        )
        previous = deter.reshape(rows, self._blocks, -1).transpose(1, 0, 2)
        mixed = (shared @ self._shared_kernel).reshape(rows, self._blocks, -1).transpose(1, 0, 2)
        mixed = mixed + previous @ self._own_kernel
        for index, layer in enumerate(dynamics.hidden):
            if index:
                mixed = mixed @ layer.kernel
            shape = (self._blocks, 1, self._width)
            mixed = mixed + layer.bias.reshape(shape)
            mean = np.einsum("gri,gri->r", mixed, mixed) / (self._blocks * self._width)
            inverse = (1.0 / np.sqrt(mean + EPSILON))[None, :, None]
            mixed = _silu(np.asarray(mixed * (inverse * layer.scale.reshape(shape)), np.float32))
        gates = mixed @ self._gates_kernel + self._gates_bias
        reset, update = np.split(0.5 + 0.5 * np.tanh(gates[..., : 2 * self._width]), 2, -1)
        candidate = np.tanh(reset * gates[..., 2 * self._width :])
        following = previous + update * (candidate - previous)
        return np.ascontiguousarray(following.transpose(1, 0, 2)).reshape(rows, -1)

    def _posterior(self, deter: Floats, tokens: list[Floats]) -> Floats:
        dynamics = self._nets.dynamics
        x = np.concatenate([deter, *tokens], -1)
        for layer in dynamics.posterior:
            x = _dense(layer, x)
        logits = _linear(dynamics.posterior_logits, x)
        return logits.reshape(len(deter), dynamics.variables, dynamics.classes)

    def _act(self, deter: Floats, stoch: Floats, draws: Draws) -> dict[str, NDArray[Any]]:
        actor = self._nets.actor
        x = _mlp(actor.mlp, np.concatenate([deter, stoch], -1))
        actions: dict[str, NDArray[Any]] = {}
        for key in actor.keys:
            noise = draws.actions[key.name]
            if key.discrete:
                logits = _linear(actor.outputs[f"{key.name}.logits"], x)
                index = _sample(_softmax(_classes_first(_mask(key, logits))), noise)
                actions[key.name] = (index + key.low).astype(np.int32)
                continue
            mean = np.tanh(_linear(actor.outputs[f"{key.name}.mean"], x))
            raw = _linear(actor.outputs[f"{key.name}.stddev"], x)
            std = (actor.max_std - actor.min_std) * _sigmoid(raw + 2.0) + actor.min_std
            actions[key.name] = mean.reshape(noise.shape) + std.reshape(noise.shape) * noise
        return actions


def _linear(layer: Linear, x: Floats) -> Floats:
    return np.asarray(x @ layer.kernel + layer.bias)


def _dense(layer: Dense, x: Floats) -> Floats:
    y = x @ layer.kernel + layer.bias
    mean = np.einsum("ri,ri->r", y, y) / y.shape[-1]
    return _silu(y * ((1.0 / np.sqrt(mean + EPSILON))[:, None] * layer.scale))


def _mlp(mlp: MLP, x: Floats) -> Floats:
    for layer in mlp.layers:
        x = _dense(layer, x)
    return x


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(0.5 + 0.5 * np.tanh(0.5 * x))


def _silu(x: Floats) -> Floats:
    return np.asarray(x * _sigmoid(x))


def _softmax(logits: Floats) -> Floats:
    """Softmax over the first axis, where numpy reduces fastest if it is short."""
    exp = np.exp(logits - logits.max(0))
    return np.asarray(exp / exp.sum(0))


def _sample(probs: Floats, uniform: Floats) -> NDArray[np.int64]:
    """An index of the first axis for each uniform number."""
    reached = (np.cumsum(probs, 0) <= uniform).sum(0)
    return np.asarray(np.minimum(reached, len(probs) - 1))


def _classes_first(logits: Floats) -> Floats:
    return np.ascontiguousarray(np.moveaxis(logits, -1, 0))


def _one_hot(index: NDArray[np.integer[Any]], classes: int) -> Floats:
    """All zeros where the index is out of range."""
    return np.asarray(index[..., None] == np.arange(classes), np.float32)


def _embed(key: Key, value: NDArray[Any]) -> Floats:
    if key.discrete:
        return _one_hot(value.astype(np.int64) - key.low, key.classes).reshape(len(value), -1)
    return value.reshape(len(value), -1).astype(np.float32)


def _encode(key: Key, value: NDArray[Any]) -> Floats:
    flat = value.reshape(len(value), -1)
    if key.discrete:
        encoded = _embed(key, value)
        absent = np.any(flat == -1, -1) if key.may_miss else None
    else:
        wide = flat.astype(np.float32)
        encoded = np.sign(wide) * np.log1p(np.abs(wide))
        absent = np.any(np.isneginf(wide), -1)
    if absent is not None and absent.any():
        encoded[absent] = 0.0
    return encoded


def _mask(key: Key, logits: Floats) -> Floats:
    logits = logits.reshape(len(logits), *key.shape, key.classes)
    possible = np.arange(key.classes) < np.reshape(key.choices, (*key.shape, 1))
    return np.where(possible, logits, np.float32(-1e9))
