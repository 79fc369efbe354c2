"""What training needs on each device, as compiled, and whether that is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from dreamfleet.agents.dreamer.train import TrainState
from dreamfleet.errors import ConfigError
from dreamfleet.memory import memory_limit


def footprint(state: TrainState, step: jax.stages.Compiled | None, mesh: Mesh) -> dict[str, float]:
    """Bytes by what they are for, on each device.

    Args:
        state: What is trained.
        step: The training step, as compiled; None if it is not yet.
        mesh: The devices that train.

    Returns:
        `parameters`, `optimizer`; `activations` (all that a step keeps until its end) and `step`
        (all of it: the state, what replaces it, the batch, the results and the activations), by
        XLA's analysis, if there is one; `limit`, what there is.
    """
    device = mesh.local_devices[0]
    optimizer = _bytes(state.optimizer, device)
    found = {
        "parameters": _bytes(state, device) - optimizer,
        "optimizer": optimizer,
        "limit": _limit(mesh),
    }
    analysis: Any = step.memory_analysis() if step is not None else None
    if analysis is not None:
        kept = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        found["activations"] = float(analysis.temp_size_in_bytes)
        found["step"] = float(analysis.argument_size_in_bytes + kept + analysis.temp_size_in_bytes)
    return found


def check_fit(found: Mapping[str, float], platform: str) -> None:
    """Refuse a training step that cannot run, before it is tried.

    Raises:
        ConfigError: It needs more memory than there is, however much of that is free.
    """
    if found.get("step", 0.0) <= found["limit"]:
        return
    parts = ("parameters", "optimizer", "activations")
    words = ", ".join(f"{name} {found[name] / 1e9:.1f} GB" for name in parts)
    where = "this machine" if platform == "cpu" else f"a device of {platform}"
    raise ConfigError(
        f"A training step needs {found['step'] / 1e9:.1f} GB of memory ({words}), and {where} has "
        f"{found['limit'] / 1e9:.1f} GB: choose a smaller --dreamer.model, --batch-size, "
        "--batch-length or --dreamer.loss.imag-last."
    )


def check_state(shapes: TrainState, mesh: Mesh, *, sharded: bool) -> None:
    """Refuse a model whose state cannot be held, before it is made.

    Raises:
        ConfigError: A step has the state twice, and there is not as much memory.
    """
    leaves = jax.tree.leaves(shapes)
    needed = 2.0 * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    needed /= mesh.size if sharded else 1
    if needed > (limit := _limit(mesh)):
        raise ConfigError(
            f"An update needs {needed / 1e9:.1f} GB for two copies of parameters and optimizer, "
            f"and there are {limit / 1e9:.1f} GB of memory: choose a smaller --dreamer.model."
        )


def has_room(state: TrainState, mesh: Mesh) -> bool:
    """Whether a second state fits on an accelerator beside all that was ever in use there."""
    device = mesh.local_devices[0]
    counted = device.memory_stats() or {}
    used = float(counted.get("peak_bytes_in_use", 0.0))
    return used + _bytes(state, device) <= float(counted.get("bytes_limit", 0.0))


def _limit(mesh: Mesh) -> float:
    """Bytes that there are: an accelerator's own, or a share of this machine's."""
    counted = mesh.local_devices[0].memory_stats() or {}
    return float(counted.get("bytes_limit") or memory_limit() / len(mesh.local_devices))


def _bytes(tree: Any, device: jax.Device) -> float:
    """Of a tree, those on one device."""
    return float(
        sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
            if shard.device == device
        )
    )
