"""Parts of runs that have no environments, which other processes import."""

from __future__ import annotations

from typing import Any

from dreamfleet.agents import RandomAgent


def no_environment(envid: int) -> Any:
    raise AssertionError("an environment was made")


class Pretrained(RandomAgent):
    """Acts after 20 updates only."""

    def policy(self, carry: Any, obs: Any, mode: str = "train") -> Any:
        assert self._updates >= 20, f"it acted after {self._updates} updates"
        return super().policy(carry, obs, mode)


class Watching(RandomAgent):
    """Learns nothing, and tells what it is shown."""

    def train(self, carry: Any, batch: Any) -> Any:
        known = {key for key in (*self.obs_space, *self.act_space) if not key.startswith("log/")}
        assert known <= set(batch), sorted(known - set(batch))
        return carry, {"replay": {"stepid": batch["stepid"]}}, {"seen": batch["reward"].size}
