"""From the name of an agent to its type: settings, constructor, and what the runtime asks first.

A type is light: the processes that only ask what an agent stores with a step do not load the
libraries that the agent computes with.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from dreamfleet.agents.api import Agent, Player
from dreamfleet.errors import ConfigError
from dreamfleet.settings import load_object
from dreamfleet.spaces import Space

Config = TypeVar("Config")
Gather = Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
Spaces = Mapping[str, Space]

BUILT_IN: Mapping[str, str] = {
    "dreamer": "dreamfleet.agents.dreamer.runtime.entry:DREAMER",
    "random": "dreamfleet.agents.random:RANDOM",
}
"""The agents of this package; all others are named as `package.module:name`."""


class AgentType(ABC, Generic[Config]):
    """One kind of agent. A subclass sets `name` and `config` and makes the agent."""

    name: str
    """Prefix of its settings in flags and in JSON."""
    config: type[Config]
    """A frozen dataclass that holds its settings; all of them have defaults. One that names code is
    marked as `dreamfleet.settings.Code`, a folder of a machine as `Local`: no file chooses them."""

    def default(self) -> Config:
        """The settings of a run that states none."""
        return self.config()

    @abstractmethod
    def make(self, obs_space: Spaces, act_space: Spaces, config: Config, *, seed: int) -> Agent:
        """A fresh agent."""

    def for_run(self, config: Config, updates: int) -> Config:  # noqa: ARG002 - for who overrides it
        """The settings for a run of so many updates; 0 for any number."""
        return config

    def make_player(
        self, obs_space: Spaces, act_space: Spaces, config: Config, *, seed: int
    ) -> Player:
        """What acts without learning: the agent itself, unless something smaller will do. It takes
        the parameters that an agent sends (`policy_state`, `load_policy`), or saved (`load`)."""
        return self.make(obs_space, act_space, config, seed=seed)

    def for_actor(self, config: Config) -> Config:
        """The settings of a further actor, which leaves accelerators to the agent."""
        return config

    def check(self, obs_space: Spaces, act_space: Spaces, config: Config) -> None:
        """Refuse spaces that no agent with these settings can be made for.

        Raises:
            SpaceError: The message names the key, and the fix.
        """

    def stored_space(
        self,
        obs_space: Spaces,  # noqa: ARG002 - for who overrides it
        act_space: Spaces,  # noqa: ARG002 - for who overrides it
        config: Config,  # noqa: ARG002 - for who overrides it
    ) -> dict[str, Space]:
        """What the agent stores with each step in addition to observations and actions."""
        return {}

    def context(self, config: Config) -> int:  # noqa: ARG002 - for who overrides it
        """Steps that the agent needs before those that it trains on."""
        return 0

    def sends_priority(self, config: Config) -> bool:  # noqa: ARG002 - for who overrides it
        """Whether `outs["replay"]` of `train` holds a `priority` for each step."""
        return False

    def can_load(self, config: Config, saved: Config) -> bool:  # noqa: ARG002 - for who overrides it
        """Whether an agent with the settings `config` can load a state saved with `saved`."""
        return True

    priority_setting: str = ""
    """The setting that makes it send priorities, for messages."""

    def anywhere(self, config: Config) -> Config:
        """The settings without the devices and folders of the machine that trained."""
        return config

    many_hosts: bool = False
    """Whether agents of several hosts learn together."""

    def join_hosts(self, index: int, count: int, gather: Gather, address: str) -> None:
        """Called before the agent is made, in a process that learns together with those of other
        hosts: `train`, `report`, `save` and `load` of all are called alike, each with its own rows
        of a batch, and `save` may leave out what another host saves.

        Args:
            index: Which host this is, from 0.
            count: How many there are.
            gather: Takes a dict, and returns those of all hosts when all have called it.
            address: Of host 0, as the others reach it.
        """

    def process_environment(
        self,
        config: Config,  # noqa: ARG002 - for who overrides it
        environ: Mapping[str, str],  # noqa: ARG002 - for who overrides it
    ) -> dict[str, str]:
        """Variables to add to `environ` before the agent's process starts."""
        return {}


def find_agent(name: str) -> AgentType[Any]:
    """The type of an agent: `dreamer`, `random`, or your own as `package.module:name`.

    Raises:
        ConfigError: There is no such agent, or the name is not that of an `AgentType`.
    """
    if name not in BUILT_IN and ":" not in name:
        close = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"There is no agent {name!r}.{hint} Choose {' or '.join(BUILT_IN)}, or write "
            "package.module:name for your own."
        )
    found = load_object(BUILT_IN.get(name, name))
    if isinstance(found, type) and issubclass(found, AgentType):
        found = found()
    if not isinstance(found, AgentType):
        raise ConfigError(
            f"{name} is {type(found).__name__!r}, not an agent type: name a subclass of "
            "dreamfleet.agents.AgentType, or an instance of one."
        )
    return found
