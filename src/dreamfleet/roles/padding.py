"""Policy batches of a few sizes only.

A compiled policy is compiled for each size it meets, and batches that were closed by waiting may
have any. So they are filled up to the next of a few sizes, with copies of their first row, which
is as valid as any; what comes out for the copies is dropped. Full batches stay as they are.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Agent, Arrays, Carry, Mode
from dreamfleet.config import RunConfig


def policy_sizes(args: RunConfig) -> tuple[int, ...]:
    """The sizes of policy batches in a run: powers of two, a full batch, and a whole process."""
    usual = {args.policy_batch, min(args.envs_per_process, args.all_envs)}
    powers = {2**power for power in range(max(usual).bit_length())}
    return tuple(sorted(size for size in usual | powers if size <= max(usual)))


def padded_policy(
    agent: Agent, sizes: tuple[int, ...], carry: Carry, obs: Arrays, mode: Mode
) -> tuple[Carry, Arrays, Arrays]:
    """`agent.policy` with a batch of one of these sizes; a larger one stays as it is."""
    rows = len(obs["is_first"])
    index = bisect_left(sizes, rows)
    missing = sizes[index] - rows if index < len(sizes) else 0
    if not missing:
        return agent.policy(carry, obs, mode)
    results = agent.policy(_extend(carry, missing), _extend(obs, missing), mode)
    carry, actions, outs = (_cut(result, rows) for result in results)
    return carry, actions, outs


def _extend(tree: Any, count: int) -> Any:
    if isinstance(tree, dict):
        return {key: _extend(value, count) for key, value in tree.items()}
    array: NDArray[Any] = tree
    return np.concatenate([array, np.repeat(array[:1], count, axis=0)])


def _cut(tree: Any, rows: int) -> Any:
    if isinstance(tree, dict):
        return {key: _cut(value, rows) for key, value in tree.items()}
    return tree[:rows]
