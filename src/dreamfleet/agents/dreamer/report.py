"""Reports on held-out data: losses, gradient norms, open-loop predictions as videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt8
from numpy.typing import NDArray

from dreamfleet.agents.dreamer.config import DreamerConfig
from dreamfleet.agents.dreamer.features import embed_actions
from dreamfleet.agents.dreamer.layers import cast
from dreamfleet.agents.dreamer.learning import Sequence, TrainState, apply_context, sequence_loss
from dreamfleet.agents.dreamer.optimizer import tree_norm
from dreamfleet.agents.dreamer.rssm import Observed, State

_BORDER = 2
_GREEN, _RED = (0, 255, 0), (255, 0, 0)


def report_step(
    state: TrainState, carry: State, batch: Mapping[str, Array], *, config: DreamerConfig
) -> tuple[State, dict[str, Array], dict[str, UInt8[Array, "..."]]]:
    """Next carry, scalar metrics, predicted frames of each image key."""
    names = tuple(action.name for action in state.nets.actor.actions)
    sequence = apply_context(carry, batch, config.execution.replay_context, names)
    total, result = sequence_loss(state.nets, state, sequence, config, update=False)
    metrics = {f"loss/{name}": loss for name, loss in result.losses.items()}
    metrics |= result.metrics | {"loss": total}
    if config.execution.report_gradient_norms:
        metrics |= _gradient_norms(state, sequence, config)
    frames = open_loop(state, sequence, result.observed, config)
    following = jax.tree.map(lambda x: x[:, -1], result.observed.state)
    return following, metrics, frames


def _gradient_norms(
    state: TrainState, sequence: Sequence, config: DreamerConfig
) -> dict[str, Array]:
    """Norm of each loss's gradient, over all parameters."""

    def losses(nets: Any) -> dict[str, Array]:
        return sequence_loss(nets, state, sequence, config, update=False)[1].losses

    values, pullback = jax.vjp(losses, state.nets)
    chosen = dict(zip(values, jnp.eye(len(values)), strict=True))
    # One backward pass is compiled, and run for each loss.
    norms = jax.lax.map(lambda seeds: tree_norm(pullback(seeds)[0]), chosen)
    return {f"gradient_norm/{name}": norms[index] for index, name in enumerate(values)}


def open_loop(
    state: TrainState, sequence: Sequence, observed: Observed, config: DreamerConfig
) -> dict[str, UInt8[Array, "rows time height width channels"]]:
    """Reconstructions of the first half, then predictions from it under the recorded actions."""
    dtype = jnp.dtype(config.execution.compute_dtype)
    nets = cast(state.nets, dtype)
    time = sequence.obs["is_first"].shape[1]
    rows = min(config.execution.report_rows, sequence.obs["is_first"].shape[0])
    half = _seen(time)
    if rows == 0:
        return {}
    context = jax.tree.map(lambda x: x[:rows, :half], observed.state)
    actions = embed_actions(nets.actor.actions, sequence.previous, dtype)[:rows, half:]
    key = jax.random.fold_in(jax.random.wrap_key_data(state.seed), state.updates)
    uniform = jax.random.uniform(key, (rows, time - half, config.model.stoch))

    def step(latent: Any, inputs: tuple[Array, Array]) -> tuple[Any, State]:
        latent = nets.dynamics.imagine_step(latent, *inputs)
        return latent, latent.state

    start = nets.dynamics.enter(jax.tree.map(lambda x: x[:, -1], context))
    inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (actions, uniform))
    _, imagined = jax.lax.scan(step, start, inputs)
    states = jax.tree.map(
        lambda seen, new: jnp.concatenate([seen, jnp.moveaxis(new, 0, 1)], 1), context, imagined
    )
    return {
        name: jnp.clip(image.astype(jnp.float32) * 255.0, 0.0, 255.0).astype(jnp.uint8)
        for name, image in nets.decoder.images(nets.decoder(states)).items()
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
