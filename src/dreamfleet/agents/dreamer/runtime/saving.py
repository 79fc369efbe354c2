"""Saved states: a flat dict of arrays and scalars with readable names, checked on the way in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.errors import StateMismatchError
from dreamfleet.checkpoint import sliced

Tree = TypeVar("Tree")


def path_name(path: tuple[Any, ...]) -> str:
    """Where a leaf sits, as words between slashes."""
    words = []
    for entry in path:
        for attribute in ("name", "key", "idx"):
            if hasattr(entry, attribute):
                words.append(str(getattr(entry, attribute)))
                break
    return "/".join(words)


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by name."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def to_flat(tree: Any) -> dict[str, NDArray[Any]]:
    """All leaves as numpy arrays, by name; they are read-only.

    From an accelerator they are copies. On a CPU they are the memory of the leaves, which nothing
    overwrites either: what is computed there is not donated.
    """
    result = {name: np.asarray(leaf) for name, leaf in named_leaves(jax.device_get(tree)).items()}
    for array in result.values():
        array.flags.writeable = False
    return result


def own_share(tree: Any, host: int, hosts: int) -> dict[str, NDArray[Any]]:
    """What one of several hosts saves of a state: its slices of leaves that are split over hosts,
    and every so manieth of the others, so that all have about as much."""
    result, sizes = {}, [0] * hosts
    for name, leaf in sorted(named_leaves(tree).items(), key=lambda each: -each[1].size):
        if leaf.is_fully_replicated:
            owner = sizes.index(min(sizes))
            sizes[owner] += leaf.size
            if owner == host:
                result[name] = np.array(leaf)
            continue
        spec = leaf.sharding.spec
        axis = next(number for number, each in enumerate(spec) if each is not None)
        shards = {shard.index[axis].start or 0: shard.data for shard in leaf.addressable_shards}
        parts = [np.asarray(shards[start]) for start in sorted(shards)]
        result[sliced(name, axis, min(shards))] = np.concatenate(parts, axis)
    return result


# Names of the optimizer's statistics in states that were saved before Optax kept them.
_RENAMED = (
    (r"^optimizer/(\d+)/seen$", r"optimizer/\1/count"),
    (r"^optimizer/1/average/", "optimizer/1/nu/"),
    (r"^optimizer/2/average/", "optimizer/2/ema/"),
)


def current_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """A saved state under the names of today."""

    def rename(name: str) -> str:
        for pattern, replacement in _RENAMED:
            name = re.sub(pattern, replacement, name)
        return name

    return {rename(name): value for name, value in state.items()}


def select_matching(
    expected: Mapping[str, Any], state: Mapping[str, Any], regex: str | None
) -> dict[str, NDArray[Any]]:
    """The entries of `state` to take over, after checking all of them.

    Without a regex names must agree exactly; with one, only the expected names that it matches
    (from their start) are taken. Every difference is listed in one error.
    """
    if regex is None:
        wanted = set(expected)
        problems = [f"unknown: {name}" for name in sorted(set(state) - wanted)]
    else:
        wanted = {name for name in expected if re.match(regex, name)}
        problems = []
        if not wanted:
            raise StateMismatchError(
                f"No entry of the agent matches {regex!r}: check the expression."
            )
    chosen: dict[str, NDArray[Any]] = {}
    for name in sorted(wanted):
        if name not in state:
            problems.append(f"missing: {name}")
            continue
        ours, theirs = expected[name], np.asarray(state[name])
        if not hasattr(ours, "shape"):  # a counter
            ours = np.asarray(ours)
        if ours.shape != theirs.shape:
            problems.append(f"shape of {name}: {theirs.shape} instead of {ours.shape}")
        elif ours.dtype != theirs.dtype:
            problems.append(f"dtype of {name}: {theirs.dtype} instead of {ours.dtype}")
        else:
            chosen[name] = theirs
    if problems:
        raise StateMismatchError(
            f"The saved state does not fit this agent ({len(problems)} differences); use the "
            "configuration and environment it was saved with, or load a part of it with a "
            "regular expression:\n  " + "\n  ".join(problems)
        )
    return chosen


def replace_leaves(tree: Tree, values: Mapping[str, Any]) -> Tree:
    """The tree with some of its leaves exchanged, by name."""
    result: Tree = jax.tree_util.tree_map_with_path(
        lambda path, leaf: values.get(path_name(path), leaf), tree
    )
    return result
