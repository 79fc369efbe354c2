"""What acts in a process of its own: as the agent does, once it has the agent's parameters."""

from typing import Any

import numpy as np
import pytest
from agent_worlds import ACTIONS, VECTOR, config, observations

from dreamfleet.agents import Dreamer, RandomAgent, StateMismatchError, find_agent
from dreamfleet.agents.api import load_policy, policy_state
from dreamfleet.agents.dreamer.runtime.player import DreamerPlayer
from dreamfleet.agents.random import RandomConfig
from dreamfleet.roles.scaling.parameters import packed, unpacked
from dreamfleet.transport.codec import decode, encode


def sent(state: Any) -> Any:
    """A state as another process receives it."""
    encoded = encode(packed(state))
    return unpacked(decode(encoded.schema, encoded.plain, encoded.blob, encoded.frames))


def played(agent: Any, mode: str, steps: int = 4) -> list[Any]:
    carry, found = agent.init_policy(3), []
    for step in range(steps):
        obs = observations(VECTOR, 3, seed=step) | {"is_first": np.full(3, step == 0)}
        carry, actions, stored = agent.policy(carry, obs, mode)
        found.append((carry, actions, stored))
    return found


@pytest.mark.parametrize("execution", [{}, {"compute_dtype": "bfloat16"}])
def test_a_player_acts_as_the_agent_whose_parameters_it_has(execution: dict[str, Any]) -> None:
    settings = config(**execution)
    agent = Dreamer(VECTOR, ACTIONS, settings, seed=3)
    player = find_agent("dreamer").make_player(VECTOR, ACTIONS, settings, seed=3)
    assert isinstance(player, DreamerPlayer)
    # As after training: not those that both were made with.
    agent.load(Dreamer(VECTOR, ACTIONS, settings, seed=8).save(), "nets/")
    others = [repr(each) for each in played(player, "greedy")]
    load_policy(player, sent(policy_state(agent)))
    player._actions = agent._actions
    for mode in ("greedy", "eval"):
        mine, theirs = played(agent, mode), played(player, mode)
        assert [repr(each) for each in theirs] == [repr(each) for each in mine]
        assert [repr(each) for each in theirs] != others
    # Nothing but what acting needs: neither critic nor decoder, and no optimizer.
    assert {name.split("/")[0] for name in policy_state(agent)} == {"encoder", "dynamics", "actor"}
    dtypes = {np.asarray(value).dtype.name for value in policy_state(agent).values()}
    assert settings.execution.compute_dtype in dtypes
    assert not hasattr(player, "_state")


def test_a_state_of_other_networks_is_refused() -> None:
    player = find_agent("dreamer").make_player(VECTOR, ACTIONS, config(), seed=0)
    state = dict(policy_state(player))
    name = next(iter(state))
    with pytest.raises(StateMismatchError, match=f"missing: {name}"):
        load_policy(player, {key: value for key, value in state.items() if key != name})
    with pytest.raises(StateMismatchError, match="shape of"):
        load_policy(player, {**state, name: np.zeros((1, 2, 3), np.float32)})


def test_random_players_have_numbers_of_their_own() -> None:
    random = find_agent("random")
    agent = RandomAgent(VECTOR, ACTIONS, seed=1)
    same, other = (
        random.make_player(VECTOR, ACTIONS, RandomConfig(), seed=seed) for seed in (1, 2)
    )
    for player in (same, other):
        agent.policy({}, observations(VECTOR, 3))
        load_policy(player, sent(policy_state(agent)))
    agent = RandomAgent(VECTOR, ACTIONS, seed=1)
    mine, equal, unlike = (repr(played(each, "eval")) for each in (agent, same, other))
    assert mine == equal != unlike


def test_an_agent_that_says_nothing_about_acting_sends_all_of_its_state() -> None:
    class Plain:
        number = 0

        def save(self) -> Any:
            return {"number": self.number, "table": np.arange(3)}

        def load(self, state: Any, regex: str | None = None) -> None:
            self.number = int(state["number"])

    trained, player = Plain(), Plain()
    trained.number = 7
    load_policy(player, sent(policy_state(trained)))  # type: ignore[arg-type]
    assert player.number == 7
