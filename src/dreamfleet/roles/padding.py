"""Policy batches of a few sizes only.

A compiled policy is compiled for each size it meets, and batches that were closed by waiting may
have any. So they are filled up to the next of a few sizes, with copies of their first row, which
is as valid as any; what comes out for the copies is dropped. Full batches stay as they are.
"""

from __future__ import annotations

from bisect import bisect_left

from dreamfleet.agents.api import Agent, Arrays, Carry, Mode, pad_rows, take_rows
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
    results = agent.policy(pad_rows(carry, missing), pad_rows(obs, missing), mode)
    carry, actions, outs = (take_rows(result, slice(rows)) for result in results)
    return carry, actions, outs
