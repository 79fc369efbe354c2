"""DreamerV3 in the registry of agents: what the fleet asks before an agent is made, without JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from platform import libc_ver
from typing import TYPE_CHECKING

from dreamfleet.agents.dreamer.config import (
    DreamerConfig,
    ExecutionConfig,
    LossConfig,
    OptimizerConfig,
    size_preset,
)
from dreamfleet.agents.dreamer.features import check_spaces
from dreamfleet.agents.dreamer.interfaces import check_networks, stored_space
from dreamfleet.agents.registry import AgentType, Gather
from dreamfleet.spaces import Space

if TYPE_CHECKING:
    from dreamfleet.agents.dreamer.runtime.agent import Dreamer
    from dreamfleet.agents.dreamer.runtime.player import DreamerPlayer


class DreamerType(AgentType[DreamerConfig]):
    """DreamerV3 in the registry."""

    name = "dreamer"
    config = DreamerConfig

    def default(self) -> DreamerConfig:
        """Small enough for two CPU cores. `DreamerConfig()` has the published values."""
        return DreamerConfig(
            model=size_preset("cpu-tiny"),
            loss=LossConfig(
                # Imagining from the last steps only makes an update several times cheaper.
                imag_last=8,
                # Squared errors of small numbers weigh next to nothing against the KL. Weighed with
                # 1, the model saw the cart 0.07 to 0.2 off its place and the pole, which falls at
                # 0.2, off by 0.02; with 10 it was no better in every second run, and policies
                # drifted off the track without noticing. With 100 it is 0.01 and 0.005, and 1,200
                # to 2,900 updates do.
                float_scale=100.0,
                # With the published 333 steps, values are near 300 and differ by little between a
                # good and a bad place: policies that had held 500 drifted off the track again.
                horizon=100.0,
                # A small model settles on one action early with the published 3e-4.
                entropy_scale=3e-3,
            ),
            # A rate that high finds a policy soon and then walks past it: it falls to a tenth by
            # the last update.
            optimizer=OptimizerConfig(learning_rate=1e-3, warmup=100, decay=-1),
        )

    def for_run(self, config: DreamerConfig, updates: int) -> DreamerConfig:
        if config.optimizer.decay >= 0:
            return config
        return replace(config, optimizer=replace(config.optimizer, decay=updates))

    def make(
        self,
        obs_space: Mapping[str, Space],
        act_space: Mapping[str, Space],
        config: DreamerConfig,
        *,
        seed: int,
    ) -> Dreamer:
        from dreamfleet.agents.dreamer.runtime.agent import Dreamer

        return Dreamer(obs_space, act_space, config, seed=seed)

    def make_player(
        self,
        obs_space: Mapping[str, Space],
        act_space: Mapping[str, Space],
        config: DreamerConfig,
        *,
        seed: int,
    ) -> DreamerPlayer:
        from dreamfleet.agents.dreamer.runtime.player import DreamerPlayer

        return DreamerPlayer(obs_space, act_space, config, seed=seed)

    def for_actor(self, config: DreamerConfig) -> DreamerConfig:
        execution = replace(
            config.execution,
            train_platform="cpu", train_devices=(), policy_platform="cpu", policy_devices=(),
            shard_parameters=False, shard_over=0,
        )  # fmt: skip
        return replace(config, execution=execution)

    many_hosts = True

    def join_hosts(self, index: int, count: int, gather: Gather, address: str) -> None:
        from dreamfleet.agents.dreamer.runtime.devices import join_hosts

        join_hosts(index, count, gather, address)

    def check(
        self,
        obs_space: Mapping[str, Space],
        act_space: Mapping[str, Space],
        config: DreamerConfig,
    ) -> None:
        check_spaces(obs_space, act_space)
        check_networks(obs_space, config.model)

    def stored_space(
        self,
        obs_space: Mapping[str, Space],  # noqa: ARG002 - the type's
        act_space: Mapping[str, Space],  # noqa: ARG002 - the type's
        config: DreamerConfig,
    ) -> dict[str, Space]:
        return stored_space(config.model)

    def context(self, config: DreamerConfig) -> int:
        return config.execution.replay_context

    def can_load(self, config: DreamerConfig, saved: DreamerConfig) -> bool:
        return config.model == saved.model

    def sends_priority(self, config: DreamerConfig) -> bool:
        return config.execution.send_priority

    priority_setting = "execution.send_priority"

    def anywhere(self, config: DreamerConfig) -> DreamerConfig:
        # Only what the parameters are used with. Folders and devices are those of this machine: a
        # received file must not choose where programs are loaded from.
        trained = config.execution
        execution = ExecutionConfig(
            compute_dtype=trained.compute_dtype,
            replay_context=trained.replay_context,
        )
        return replace(config, execution=execution)

    def process_environment(
        self,
        config: DreamerConfig,
        environ: Mapping[str, str],
    ) -> dict[str, str]:
        """Settings of the C library's memory allocator for training on a CPU.

        A training step allocates and frees hundreds of megabytes. By default the C library returns
        them to the system each time, and every step pays again for pages filled with zeros; with
        these settings it keeps them, in large pages. Nothing is added where an accelerator trains,
        whose memory is not the C library's, where the environment has settings of its own, or
        where the C library is another one than glibc.
        """
        platform = config.execution.train_platform or environ.get("JAX_PLATFORMS", "")
        on_cpu = platform.split(",")[0] == "cpu" if platform else not _has_accelerator()
        if not on_cpu or "GLIBC_TUNABLES" in environ or libc_ver()[0] != "glibc":
            return {}
        settings = ("hugetlb=1", "mmap_max=0", "trim_threshold=100000000000")
        return {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{each}" for each in settings)}


def _has_accelerator() -> bool:
    """Whether JAX would find one: its plugin is installed, and a device is there."""
    files = ("nvidia[0-9]*", "kfd", "accel*")
    if not any(any(Path("/dev").glob(name)) for name in files):
        return False
    from importlib.metadata import entry_points  # rarely needed, and slow to import

    return any(entry_points(group="jax_plugins")) or find_spec("libtpu") is not None


DREAMER = DreamerType()
