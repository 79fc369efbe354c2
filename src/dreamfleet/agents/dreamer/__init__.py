"""DreamerV3. Importable without JAX: what the runtime asks before an agent is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dreamfleet.agents.dreamer.config import DreamerConfig, ExecutionConfig
from dreamfleet.agents.dreamer.features import check_spaces, stored_space
from dreamfleet.agents.dreamer.interfaces import check_networks
from dreamfleet.agents.registry import AgentType
from dreamfleet.spaces import Space

if TYPE_CHECKING:
    from dreamfleet.agents.dreamer.agent import Dreamer


class DreamerType(AgentType[DreamerConfig]):
    """DreamerV3 in the registry."""

    name = "dreamer"
    config = DreamerConfig

    def make(
        self,
        obs_space: Mapping[str, Space],
        act_space: Mapping[str, Space],
        config: DreamerConfig,
        *,
        seed: int,
    ) -> Dreamer:
        from dreamfleet.agents.dreamer.agent import Dreamer

        return Dreamer(obs_space, act_space, config, seed=seed)

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

    def named_code(self, config: DreamerConfig) -> tuple[str, ...]:
        model = config.model
        networks = (model.encoder, model.decoder, model.dynamics)
        return tuple(name for name in networks if name != "default")

    def anywhere(self, config: DreamerConfig) -> DreamerConfig:
        # Only what the parameters are used with. Folders and devices are those of this machine: a
        # file that somebody sent must not choose where programs are loaded from.
        trained = config.execution
        execution = ExecutionConfig(
            compute_dtype=trained.compute_dtype,
            policy_backend=trained.policy_backend,
            replay_context=trained.replay_context,
        )
        return replace(config, execution=execution)

    def process_environment(
        self,
        config: DreamerConfig,  # noqa: ARG002 - the type's
        environ: Mapping[str, str],
    ) -> dict[str, str]:
        """Settings of the C library's memory allocator for training on a CPU.

        A training step allocates and frees hundreds of megabytes. By default the C library returns
        them to the system each time, and every step pays again for pages filled with zeros; with
        these settings it keeps them, in large pages. Nothing is added where the environment has
        settings of its own; a C library other than glibc ignores them.
        """
        if "GLIBC_TUNABLES" in environ:
            return {}
        settings = ("hugetlb=1", "mmap_max=0", "trim_threshold=100000000000")
        return {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{each}" for each in settings)}


DREAMER = DreamerType()
