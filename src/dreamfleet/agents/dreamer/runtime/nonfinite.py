"""Finding and reporting NaN and infinity."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.dreamer.config import DreamerConfig
from dreamfleet.agents.dreamer.runtime.saving import named_leaves
from dreamfleet.agents.dreamer.train import TrainState, all_gradients, without_context
from dreamfleet.agents.errors import NonFiniteError
from dreamfleet.files import atomic_write


def check_arrays(kind: str, arrays: Mapping[str, NDArray[Any]], missing: bool = False) -> None:
    """Raise for the first array with a NaN or an infinity; -inf may mean `missing`."""
    for name, value in arrays.items():
        if value.dtype.kind == "f" and _is_bad(value, missing):
            raise NonFiniteError(
                f"{kind} {name!r} holds NaN or infinity: check the environment that sent it."
                if kind == "Observation"
                else f"{kind} {name!r} holds NaN or infinity: the policy's parameters are broken."
            )


def _is_bad(value: NDArray[Any], missing: bool) -> bool:
    # A finite sum proves that all is well, in one pass and without a temporary array.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(value.sum(dtype=np.float64)):
            return False
    bad = ~np.isfinite(value)
    return bool(np.any(bad & ~np.isneginf(value)) if missing else np.any(bad))


def first_bad_tensor(state: TrainState, batch: Mapping[str, Any], config: DreamerConfig) -> str:
    """Name of the first non-finite tensor, in the order in which a training step meets them."""
    for name, value in _suspects(state, batch, config):
        array = np.asarray(value)
        if array.dtype.kind not in "fV":
            continue
        if _is_bad(array.astype(np.float32), missing=name.startswith("batch/")):
            return name
    return "an intermediate result that is finite when recomputed"


def _suspects(
    state: TrainState, batch: Mapping[str, Any], config: DreamerConfig
) -> Iterator[tuple[str, Any]]:
    yield from ((f"batch/{name}", value) for name, value in sorted(batch.items()))
    yield from named_leaves(state).items()

    def compute(state: TrainState, batch: Mapping[str, Any]) -> Any:
        return all_gradients(state, without_context(state, batch, config), config)

    _, outcome, grads = jax.jit(compute)(state, batch)
    latent = named_leaves(outcome.seen.observed)
    yield from ((f"latent/{name}", value) for name, value in latent.items())
    yield from ((f"prediction/{name}", value) for name, value in outcome.seen.predictions.items())
    yield from ((f"loss/{name}", value) for name, value in outcome.losses.items())
    yield from ((f"gradient/{name}", value) for name, value in named_leaves(grads).items())


def write_dump(folder: Path, batch: Mapping[str, Any], bad: str, updates: int) -> Path:
    """The offending batch as an npz file."""
    path = folder / f"nonfinite-{updates:09d}.npz"
    note = np.frombuffer(json.dumps({"first_bad": bad, "updates": updates}).encode(), np.uint8)
    arrays: dict[str, Any] = {k.replace("/", "."): np.asarray(v) for k, v in batch.items()}
    content = io.BytesIO()
    np.savez(content, note=note, **arrays)
    atomic_write(path, content.getvalue())
    return path
