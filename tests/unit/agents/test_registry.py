"""From an agent's name to its type, and what a type answers before an agent is made."""

import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
from agent_worlds import ACTIONS, VECTOR, config

from dreamfleet import ConfigError, Space
from dreamfleet.agents import Agent, AgentBase, AgentType, RandomAgent, SpaceError, find_agent

OWN = """
from dataclasses import dataclass
from dreamfleet.agents import AgentBase, AgentType

@dataclass(frozen=True)
class Settings:
    rate: float = 0.1

class Own(AgentType):
    name = "own"
    config = Settings
    def make(self, obs_space, act_space, config, *, seed):
        return AgentBase(obs_space, act_space)

OWN = Own()
NOT_AN_AGENT = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_agent.py").write_text(OWN)
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_there")
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("own_agent", None)
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]


def test_the_built_in_agents_are_found_by_name() -> None:
    random = find_agent("random")
    agent = random.make(VECTOR, ACTIONS, random.config(), seed=1)
    assert isinstance(agent, RandomAgent)
    assert isinstance(agent, Agent)
    assert find_agent("dreamer").name == "dreamer"


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("name", ["own_agent:OWN", "own_agent:Own"])
def test_an_own_agent_is_found_in_the_current_directory(name: str) -> None:
    found = find_agent(name)
    assert found.name == "own"
    assert found.config().rate == 0.1
    made = found.make(VECTOR, ACTIONS, found.config(), seed=0)
    assert set(made.act_space) == {"move", "button", "keys"}


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dreamr", "Did you mean 'dreamer'"),
        ("something", "package.module:name"),
        ("nowhere.to_be:found", "no module 'nowhere.to_be'"),
        ("own_agent:OWM", "did you mean 'OWN'"),
        ("own_agent:NOT_AN_AGENT", "subclass of dreamfleet.agents.AgentType"),
        ("needs_more:X", "a_package_that_is_not_there"),
        ("own_agent:", "write package.module:name"),
    ],
)
def test_a_wrong_name_is_answered_with_the_fix(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_agent(name)


def test_what_dreamer_answers_before_it_is_made() -> None:
    dreamer, settings = find_agent("dreamer"), config(replay_context=2)
    stored = dreamer.stored_space(VECTOR, ACTIONS, settings)
    assert stored["dyn/deter"] == Space(np.float32, (16,))
    assert stored["dyn/stoch"] == Space(np.float32, (4, 4))
    assert dreamer.context(settings) == 2
    there = replace(settings.execution, train_platform="tpu", policy_platform="cpu")
    here = dreamer.anywhere(replace(settings, execution=there)).execution
    assert (here.train_platform, here.policy_platform) == ("", "")
    assert "GLIBC_TUNABLES" in dreamer.process_environment(settings, {"JAX_PLATFORMS": "cpu"})
    dreamer.check(VECTOR, ACTIONS, settings)
    with pytest.raises(SpaceError, match="odd"):
        dreamer.check(VECTOR | {"odd": Space(np.float32, (2, 3, 4))}, ACTIONS, settings)


def test_a_type_needs_no_more_than_a_constructor() -> None:
    @dataclass(frozen=True)
    class Settings:
        pass

    class Least(AgentType[Settings]):
        name, config = "least", Settings

        def make(self, obs_space, act_space, config, *, seed):
            return AgentBase(obs_space, act_space)

    least, settings = Least(), Settings()
    least.check(VECTOR, ACTIONS, settings)
    assert least.stored_space(VECTOR, ACTIONS, settings) == {}
    assert least.context(settings) == 0
    assert not least.sends_priority(settings)
    assert least.anywhere(settings) is settings
    assert least.process_environment(settings, {}) == {}
