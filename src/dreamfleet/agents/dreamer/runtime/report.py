"""Reports on held-out data: losses, gradient norms, open-loop predictions as videos."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt8
from numpy.typing import NDArray

from dreamfleet.agents.dreamer.config import DreamerConfig
from dreamfleet.agents.dreamer.dynamics import Parts
from dreamfleet.agents.dreamer.layers import cast
from dreamfleet.agents.dreamer.optimizer import tree_norm
from dreamfleet.agents.dreamer.train import (
    Outcome,
    Sequence,
    TrainState,
    learn_behaviour,
    step_key,
    total_loss,
    without_context,
)
from dreamfleet.agents.dreamer.world_model import Seen

_BORDER = 2
_GREEN, _RED = (0, 255, 0), (255, 0, 0)


def report_step(
    state: TrainState, batch: Mapping[str, Array], *, config: DreamerConfig
) -> tuple[dict[str, Array], dict[str, UInt8[Array, "..."]]]:
    """Scalar metrics, predicted frames of each image key."""
    sequence = without_context(state, batch, config)
    total, outcome = total_loss(state.nets, state, sequence, config, update=False)
    total, outcome, _ = learn_behaviour(state.nets, total, outcome, config)
    metrics = {f"loss/{name}": loss for name, loss in outcome.losses.items()}
    metrics |= outcome.metrics | {"loss": total}
    if config.execution.report_gradient_norms:
        metrics |= _gradient_norms(state, sequence, config)
    return metrics, open_loop(state, sequence, outcome.seen, config)


def _gradient_norms(
    state: TrainState, sequence: Sequence, config: DreamerConfig
) -> dict[str, Array]:
    """Norm of each loss's gradient, over all parameters."""

    def losses(nets: Any) -> tuple[dict[str, Array], Outcome]:
        _, outcome = total_loss(nets, state, sequence, config, update=False)
        return outcome.losses, outcome

    values, pullback, outcome = jax.vjp(losses, state.nets, has_aux=True)
    chosen = dict(zip(values, jnp.eye(len(values)), strict=True))
    # One backward pass is compiled, and run for each loss.
    norms = jax.lax.map(lambda seeds: tree_norm(pullback(seeds)[0]), chosen)
    found = {f"gradient_norm/{name}": norms[index] for index, name in enumerate(values)}
    # The policy loss moves the actor only, the value loss the critic only.
    unweighted = replace(config, loss=replace(config.loss, policy_scale=1.0, value_scale=1.0))
    _, _, (actor, critic) = learn_behaviour(state.nets, jnp.zeros(()), outcome, unweighted)
    return {
        **found,
        "gradient_norm/policy": tree_norm(actor),
        "gradient_norm/value": tree_norm(critic),
    }


def open_loop(
    state: TrainState, sequence: Sequence, seen: Seen, config: DreamerConfig
) -> dict[str, UInt8[Array, "rows time height width channels"]]:
    """Reconstructions of the first half, then predictions from it under the recorded actions."""
    dtype = jnp.dtype(config.execution.compute_dtype)
    nets = cast(state.nets, dtype)
    batch, time = sequence.obs["is_first"].shape
    rows, half = min(config.execution.report_rows, batch), _seen(time)
    if rows == 0:
        return {}
    start = jax.tree.map(lambda x: x[:rows, half - 1], seen.observed.states)
    actions = jnp.moveaxis(seen.actions[:rows, half:], 1, 0)
    uniform = jax.random.uniform(step_key(state), (rows, time - half, nets.dynamics.draws))

    def recorded(_: Parts, action: Array) -> tuple[Array, None]:
        return action, None

    uniform = jnp.moveaxis(uniform, 1, 0)
    imagined, last, _ = nets.dynamics.imagine(start, recorded, actions, uniform)
    features = tuple(  # the first imagined state is the last known one
        jnp.concatenate([known[:rows, :half], jnp.moveaxis(new[1:], 0, 1), end[:, None]], 1)
        for known, new, end in zip(seen.features, imagined, last, strict=True)
    )
    return {
        name: jnp.clip(image.astype(jnp.float32) * 255.0, 0.0, 255.0).astype(jnp.uint8)
        for name, image in nets.decoder.images(nets.decoder(features)).items()
    }


def _seen(time: int) -> int:
    """Steps whose observations the model has, before those that it predicts."""
    return max(1, time // 2)


def compose_video(truth: NDArray[np.uint8], prediction: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Truth, prediction and error below each other, sequences side by side, (time, H, W, C).

    A green border marks frames the model has seen, a red one frames it predicts.
    """
    rows, time, _, _, channels = truth.shape
    error = ((prediction.astype(np.int32) - truth + 255) // 2).astype(np.uint8)
    video = np.concatenate([truth, prediction, error], 2)
    padded = np.pad(video, [(0, 0), (0, 0), (_BORDER,) * 2, (_BORDER,) * 2, (0, 0)])
    inner = np.zeros(padded.shape[2:4], bool)
    inner[_BORDER:-_BORDER, _BORDER:-_BORDER] = True
    half = _seen(time)
    for colour, frames in ((_GREEN, slice(0, half)), (_RED, slice(half, time))):
        paint = np.asarray(colour, np.uint8) if channels == 3 else np.full(channels, 255, np.uint8)
        padded[:, frames] = np.where(inner[..., None], padded[:, frames], paint)
    height, width = padded.shape[2:4]
    return padded.transpose(1, 2, 0, 3, 4).reshape(time, height, rows * width, channels)
