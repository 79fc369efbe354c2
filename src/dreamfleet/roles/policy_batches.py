"""Batches of policy calls: a carry for each environment, and the sizes that are compiled."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Arrays, Carry, Mode, Player, pad_rows, put_rows, take_rows
from dreamfleet.config import RunConfig
from dreamfleet.metrics.episodes import SlotTable


class Carries:
    """The policy's carry of every environment, as rows of arrays. There is room for `size`
    environments at first, and the table grows."""

    def __init__(self, agent: Player, size: int) -> None:
        self._agent = agent
        self._rows = agent.init_policy(size)
        self._initial = agent.init_policy(1)
        self.table = SlotTable(size, grow=self._grow)
        """The environments that have a carry."""

    def take(
        self, envids: NDArray[Any], is_first: NDArray[np.bool_]
    ) -> tuple[Carry, NDArray[np.intp], NDArray[np.bool_]]:
        """The carries of these environments, initial where an episode begins; their slots; and in
        which of them the start of the episode was missed."""
        ids = envids.tolist()
        missed = np.array([envid not in self.table for envid in ids], bool) & ~is_first
        slots = self.table.slots(ids)
        # The last owner of a slot must not leak into an episode whose start was missed.
        fresh = is_first | missed
        if fresh.any():
            put_rows(self._rows, slots[fresh], self._initial)
        return take_rows(self._rows, slots), slots, missed

    def put(self, slots: NDArray[np.intp], carry: Carry) -> None:
        put_rows(self._rows, slots, carry)

    def _grow(self, size: int) -> None:
        grown = self._agent.init_policy(size)
        put_rows(grown, slice(self.table.size), self._rows)
        self._rows = grown


def policy_sizes(args: RunConfig, actor: int = 0) -> tuple[int, ...]:
    """The sizes of an actor's policy batches: powers of two, a full batch, and a whole lane.

    A compiled policy is compiled for each size it meets, and a batch that was closed by the waiting
    time may have any. So batches are padded to the next of these sizes.
    """
    lane = -(-args.envs_per_process // args.env_lanes)
    # Processes of machines that join have as many as those of the run, at most.
    most = lane if args.bind else min(lane, len(args.envs_of(actor)))
    usual = {args.policy_batch_of(actor), most}
    powers = {2**power for power in range(max(usual).bit_length())}
    return tuple(sorted(size for size in usual | powers if size <= max(usual)))


def padded_policy(
    agent: Player, sizes: tuple[int, ...], carry: Carry, obs: Arrays, mode: Mode
) -> tuple[Carry, Arrays, Arrays]:
    """`agent.policy` with a batch of one of these sizes; a larger one stays as it is."""
    rows = len(obs["is_first"])
    index = bisect_left(sizes, rows)
    if index == len(sizes) or sizes[index] == rows:
        return agent.policy(carry, obs, mode)
    # Copies of a row are as valid as any other input.
    missing = sizes[index] - rows
    results = agent.policy(pad_rows(carry, missing), pad_rows(obs, missing), mode)
    carry, actions, outs = (take_rows(result, slice(rows)) for result in results)
    return carry, actions, outs
