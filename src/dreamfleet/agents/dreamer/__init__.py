"""DreamerV3. Importable without JAX: what the runtime asks before an agent is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dreamfleet.agents.dreamer.config import DreamerConfig
from dreamfleet.agents.dreamer.cpu.allocator import allocator_environment
from dreamfleet.agents.dreamer.fit import check_spaces, stored_space
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
        check_spaces(obs_space, act_space, config.model)

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

    def anywhere(self, config: DreamerConfig) -> DreamerConfig:
        execution = replace(
            config.execution, train_platform="", policy_platform="", shard_parameters=False
        )
        return replace(config, execution=execution)

    def process_environment(
        self,
        config: DreamerConfig,  # noqa: ARG002 - the type's
        environ: Mapping[str, str],
    ) -> dict[str, str]:
        return allocator_environment(environ)


DREAMER = DreamerType()
