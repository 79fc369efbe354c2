"""The environment role: an environment that fails costs its own episode, and nobody else's."""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_parts import dummy_with_its_id, small_run

from dreamfleet.config import PROGRESS_STEPS, RunConfig
from dreamfleet.envs.base import EnvCrashedError, UnknownTaskError
from dreamfleet.envs.wrappers import AgentEnv
from dreamfleet.fleet.factories import environment
from dreamfleet.replay import Replay
from dreamfleet.roles import env as role
from dreamfleet.roles import runtime
from dreamfleet.roles.env import Lane, RestartedEnv, Watchdog, _step_all
from dreamfleet.roles.health import Health, health_path, read_health
from dreamfleet.roles.policy_batches import policy_sizes
from dreamfleet.transport import Client, Disconnected, RemoteError, resolve

LENGTH = 25
"""Steps of an episode of the dummy, after its first observation."""


class Failing:
    """A dummy that fails at some of its steps, counted over all that were made of its id."""

    def __init__(self, trouble: Mapping[int, Callable[[Any], Any]], made: list[int], envid: int):
        self._env = dummy_with_its_id(envid)
        self.obs_space, self.act_space = self._env.obs_space, self._env.act_space
        self._trouble, self._steps = trouble, made
        self.closed = False

    def step(self, action: Mapping[str, Any]) -> Any:
        self._steps[0] += 1
        obs = self._env.step(action)
        trouble = self._trouble.get(self._steps[0])
        return trouble(obs) if trouble else obs

    def close(self) -> None:
        self.closed = True
        raise OSError("the port is busy")


def explode(obs: Any) -> Any:
    raise RuntimeError("the pole\nis broken")


def nan_reward(obs: Any) -> Any:
    return {**obs, "reward": np.array(np.nan, np.float32)}


def minus_infinity(obs: Any) -> Any:
    return {**obs, "reward": np.array(-np.inf, np.float32)}


def nan_vector(obs: Any) -> Any:
    return {**obs, "vector": np.full_like(obs["vector"], np.nan)}


class Reply:
    """An answer that is here from the moment at which its agent says so."""

    def __init__(self, last: Any, error: Exception | None = None) -> None:
        self._last, self._error = last, error
        self.here = False

    def done(self) -> bool:
        return self.here

    def result(self) -> dict[str, Any]:
        assert self.here
        if self._error is not None:
            raise self._error
        return {"action": np.zeros(len(self._last), np.int32), "reset": self._last}


class Agent:
    """A client whose actor resets after last steps, and keeps what it was sent. It answers one call
    at a time, the oldest, and some with an error."""

    def __init__(
        self, steps: int, stop: threading.Event, errors: Mapping[int, Exception] | None = None
    ) -> None:
        self.blocks: list[dict[str, Any]] = []
        self.outstanding: list[Reply] = []
        self.waits: list[int] = []
        """How many answers were waited for, each time."""
        self._steps, self._stop, self._errors = steps, stop, errors or {}

    def memory(self, size: int) -> None:
        """There is none to share."""

    def call_block(self, method: str, obs: Mapping[str, Any]) -> Reply:
        assert method == "act"
        self.blocks.append({key: value.copy() for key, value in obs.items()})
        if len(self.blocks) == self._steps:
            self._stop.set()
        reply = Reply(self.blocks[-1]["is_last"], self._errors.get(len(self.blocks)))
        self.outstanding.append(reply)
        return reply

    def wait_any(self, replies: list[Reply], timeout: float | None) -> bool:
        assert replies == self.outstanding or set(replies) == set(self.outstanding)
        self.waits.append(len(replies))
        self.outstanding.pop(0).here = True
        return True

    def rows(self, envid: int, key: str) -> list[Any]:
        return [
            value for block in self.blocks for value in block[key][block["envid"] == envid].tolist()
        ]


def run(
    args: RunConfig,
    makes: list[Callable[..., Any]],
    steps: int = 60,
    errors: Mapping[int, Exception] | None = None,
) -> tuple[Agent, list[RestartedEnv]]:
    stop, health, watchdog = threading.Event(), Health(health_path(args, "env-0")), Watchdog(0)
    envs = [RestartedEnv(make, envid, args, health, watchdog) for envid, make in enumerate(makes)]
    for env in envs:
        env.build()
    agent = Agent(steps, stop, errors)
    count = min(args.env_lanes, len(envs))
    bounds = pairwise([len(envs) * part // count for part in range(count + 1)])
    lanes = [Lane(envs[a:b], range(a, b), False) for a, b in bounds]
    _step_all(lanes, agent, stop, watchdog, health)  # type: ignore[arg-type]
    return agent, envs


@pytest.fixture
def args(tmp_path: Path) -> RunConfig:
    return small_run(tmp_path, on_failure="restart", env_timeout=0.0)


@pytest.fixture
def laned(args: RunConfig) -> RunConfig:
    """With more lanes than the environments of these tests need."""
    return replace(args, env_lanes=3)


def flaky(trouble: Mapping[int, Callable[[Any], Any]]) -> Callable[..., Any]:
    made = [0]
    return lambda envid: AgentEnv(Failing(trouble, made, envid))  # type: ignore[arg-type]


def test_an_exception_costs_its_own_episode_and_the_others_never_notice(
    args: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    healthy = lambda envid: AgentEnv(dummy_with_its_id(envid))  # noqa: E731
    agent, envs = run(args, [healthy, flaky({11: explode})])
    step = agent.rows(1, "vector")
    assert [int(row[2]) for row in step][:14] == [*range(10), 0, 1, 2, 3]
    assert agent.rows(1, "is_first")[:12] == [True, *[False] * 9, True, False]
    other = [int(row[1] * (LENGTH + 1) + row[2]) for row in agent.rows(0, "vector")]
    assert other == list(range(60)), "the other one lost a step"
    assert envs[1].failures == 1
    health = read_health(health_path(args, "env-0"))
    assert health.failures == 1
    assert health.error == "environment 1: RuntimeError: the pole is broken"
    assert "Traceback" in caplog.text
    assert "OSError('the port is busy')" in caplog.text, "an error in close is logged, and no more"


def test_the_replay_knows_that_the_episode_was_cut_short(args: RunConfig, tmp_path: Path) -> None:
    agent, _ = run(args, [flaky({11: explode})], steps=20)
    for together in (False, True):  # a batch a step, and all steps in one batch
        path = tmp_path / f"replay-{together}"
        with Replay(1, 100, path, chunk=64, mark_cut_short=True) as replay:
            columns = [{k: v for k, v in block.items() if k != "envid"} for block in agent.blocks]
            if together:
                joined = {k: np.concatenate([c[k] for c in columns]) for k in columns[0]}
                columns = [joined]
            for column in columns:
                replay.add_batch(column, [0] * len(column["is_first"]))
            replay.follow_episodes()
            assert replay.finished()[1] == [], "only what arrives with is_last has a score"
            assert replay._table is not None
            stored = replay._table.store.columns
            slot = int(replay._table.head_slot[0])
            sampled = replay.sample(1000, "report")
            places = sampled["stepid"][:, 0, 16:].copy().view(">u4")[:, 0]
            assert set(places.tolist()) == set(range(len(replay)))
            assert np.array_equal(sampled["is_last"][:, 0], places == 9)
            assert not stored["is_terminal"][slot, :20].any()
            assert np.array_equal(
                stored["reward"][slot, :20], [row for c in agent.blocks for row in c["reward"]]
            ), "no reward is invented"


@pytest.mark.parametrize("trouble", [nan_reward, minus_infinity, nan_vector])
def test_nan_ends_its_episode_before_it_is_stored(
    args: RunConfig, trouble: Callable[[Any], Any]
) -> None:
    made: list[Any] = []
    inner = flaky({11: trouble, 26: trouble})

    def make(envid: int) -> Any:
        made.append(envid)
        return inner(envid)

    agent, envs = run(args, [make], steps=30)
    assert np.isfinite(agent.rows(0, "reward")).all()
    assert np.isfinite(agent.rows(0, "vector")).all()
    # Fourteen steps later the next one, then an episode that is under way.
    lengths = np.diff(np.flatnonzero([*agent.rows(0, "is_first"), True])).tolist()
    assert lengths == [10, 14, 6]
    assert envs[0].failures == 2
    assert made == [0], "a reset is enough"


def test_nan_in_a_reset_builds_the_environment_again(args: RunConfig) -> None:
    agent, envs = run(args, [flaky({1: nan_vector})], steps=5)
    assert agent.rows(0, "is_first") == [True, False, False, False, False]
    assert envs[0].failures == 1


def test_nan_stops_the_run_with_environment_key_and_step_if_that_is_wished(tmp_path: Path) -> None:
    args = small_run(tmp_path, on_failure="restart", on_nan="stop")
    words = r"^'reward' holds NaN or infinity at step 10 of an episode of environment 0\. .*on_nan"
    with pytest.raises(EnvCrashedError, match=words):
        run(args, [flaky({11: nan_reward})])
    health = read_health(health_path(args, "env-0"))
    assert health.final
    assert health.not_finite


def test_failures_without_progress_end_it_and_those_with_progress_never_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dreamfleet.roles.runtime.FIRST_DELAY", 0.0)
    args = small_run(tmp_path, on_failure="restart", max_restarts=2, env_timeout=0.0)
    apart = {n * (PROGRESS_STEPS + 1): explode for n in range(1, 21)}
    _, envs = run(args, [flaky(apart)], steps=20 * PROGRESS_STEPS + 5)
    assert envs[0].failures == 20
    assert caplog.text.count("Traceback") == 3, "the first three are enough"
    assert not read_health(health_path(args, "env-0")).final
    words = "failed 3 times and neither finished an episode nor made 20 steps .* max_restarts"
    with pytest.raises(EnvCrashedError, match=words):
        run(args, [flaky({3: explode, 6: explode, 9: explode})])
    assert read_health(health_path(args, "env-0")).final


def test_a_constructor_that_fails_is_tried_again_with_another_seed(
    args: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dreamfleet.roles.runtime.FIRST_DELAY", 0.0)
    attempts: list[int] = []

    def make(envid: int, attempt: int = 0) -> Any:
        attempts.append(attempt)
        if len(attempts) < 4:
            raise OSError("no licence is free")
        return dummy_with_its_id(envid)

    agent, envs = run(args, [dummy_with_its_id, make], steps=10)
    assert attempts == [0, 1, 2, 3]
    assert envs[1].failures == 3
    assert len(agent.rows(0, "reward")) == 10, "the other one did not wait"
    assert len(agent.rows(1, "reward")) == 7


def test_a_machine_without_the_package_of_the_task_says_so_at_once(args: RunConfig) -> None:
    make = partial(environment, replace(args, task="no_such_package:Env", env_options={}), None)
    with pytest.raises(UnknownTaskError, match=r"no module 'no_such_package'.*install it"):
        run(args, [make])
    assert read_health(health_path(args, "env-0")).final


def test_whoever_wants_to_stop_at_failures_gets_the_exception_itself(tmp_path: Path) -> None:
    args = small_run(tmp_path, on_failure="stop")
    with pytest.raises(RuntimeError, match="the pole"):
        run(args, [flaky({11: explode})])


def test_a_failure_waits_longer_each_time(args: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(role.time, "monotonic", lambda: now[0])
    made = partial(flaky, dict.fromkeys(range(1, 100), explode))()
    env = RestartedEnv(made, 0, args, Health(), Watchdog(0))
    delays = []
    for _ in range(9):
        env.build()
        assert env.step(None) is None
        delays.append(env.due - now[0])
    assert delays == [0.0, 0.5, 1, 2, 4, 8, 16, 30, 30]


def test_notes_tell_what_a_worker_does_and_survive_it(tmp_path: Path) -> None:
    path = tmp_path / "workers" / "env-0"
    health = Health(path)
    health.progress()
    health.failed("x" * 5000)
    health.give_up()
    health.now("stepping", 3)
    health = read_health(path)
    assert (health.progress, health.failures, health.final) == (1, 1, True)
    assert (health.doing, health.envid, health.error) == ("stepping", 3, "x" * 1000)
    Health(path)
    after = read_health(path)
    assert (after.progress, after.failures, after.final, after.doing) == (1, 1, False, "waiting")
    path.write_bytes(b"short")
    assert read_health(path) == read_health(tmp_path / "missing")
    blocked = tmp_path / "file"
    blocked.touch()
    Health(blocked / "env-0").progress()  # where no file can be, it is kept in memory


def test_the_role_says_what_it_logs_only_once_per_failure(
    args: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run(args, [flaky({11: explode})], steps=15)
    assert len([r for r in caplog.records if "cut short" in r.message]) == 1


def positions(agent: Agent, envid: int) -> list[int]:
    """Which step of the environment's life each observation was, as the dummy tells."""
    return [int(row[1] * (LENGTH + 1) + row[2]) for row in agent.rows(envid, "vector")]


def test_lanes_step_while_the_observations_of_others_are_on_their_way(laned: RunConfig) -> None:
    agent, _ = run(laned, [dummy_with_its_id] * 5, steps=90)
    assert sorted({tuple(block["envid"].tolist()) for block in agent.blocks}) == [
        (0,),
        (1, 2),
        (3, 4),
    ]
    assert set(agent.waits) == {3}, "every lane has an answer to wait for, and one only"
    for envid in range(5):
        assert positions(agent, envid) == list(range(30)), "order is kept in each environment"


def test_a_policy_call_waits_for_one_lane_of_a_process(args: RunConfig) -> None:
    """With all of them it would keep them in step, and hide no delay."""
    run = replace(args, envs=8, envs_per_process=8, actor_batch=8)
    assert [replace(run, env_lanes=lanes).policy_batch for lanes in (1, 2, 3, 16)] == [8, 4, 3, 1]
    assert policy_sizes(replace(run, env_lanes=3)) == (1, 2, 3)


def test_an_environment_that_fails_holds_up_no_other_lane(
    laned: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dreamfleet.roles.runtime.FIRST_DELAY", 3600.0
    )  # the second failure in a row waits
    healthy = dummy_with_its_id
    trouble = flaky({4: explode, 5: explode, 6: nan_reward})
    agent, envs = run(laned, [healthy, trouble, healthy], steps=60)
    assert envs[1].failures == 2
    assert len(agent.rows(1, "reward")) == 3
    for envid in (0, 2):
        assert positions(agent, envid) == list(range(len(agent.rows(envid, "reward"))))
        assert len(agent.rows(envid, "reward")) > 25
    monkeypatch.setattr("dreamfleet.roles.runtime.FIRST_DELAY", 0.0)
    agent, envs = run(laned, [healthy, flaky({4: nan_reward, 9: explode}), healthy], steps=60)
    assert envs[1].failures == 2
    lengths = np.diff(np.flatnonzero(agent.rows(1, "is_first"))).tolist()
    assert lengths == [3, 4]


def test_only_lanes_whose_observations_were_on_their_way_lose_their_episodes(
    laned: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(role, "_PAUSE", 0.0)
    errors = {11: Disconnected("gone"), 23: RemoteError("broken", "ActorFailed", "")}
    agent, _ = run(laned, [dummy_with_its_id] * 3, steps=60, errors=errors)
    assert "environments 1 are reset: gone" in caplog.text
    starts = [np.flatnonzero(agent.rows(envid, "is_first")).tolist() for envid in range(3)]
    assert starts[0] == [0]
    assert starts[1][:3] == [0, 4, 8]
    assert starts[2] == [0]
    with pytest.raises(RemoteError, match="odd"):
        run(laned, [dummy_with_its_id] * 3, errors={5: RemoteError("odd", "ValueError", "")})


def test_an_agent_that_is_not_there_is_waited_for_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runtime, "_SAY_SECONDS", 0.2)
    monkeypatch.setattr(runtime, "_FIRST_TIMEOUT", 0.7)
    with (
        Client(resolve("tcp://127.0.0.1:{auto}"), "env-0") as client,
        pytest.raises(Disconnected, match=r"found no server at tcp.*: start the agent first"),
    ):
        runtime.await_server(client.connect, "the agent")
    assert "no server listens there). Still waiting for the agent." in caplog.text


class Timer:
    """Stands for faulthandler's timer and for the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.end = 100.0, float("inf")
        monkeypatch.setattr(faulthandler, "dump_traceback_later", self.set)
        monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: self.set(1e9))
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def set(self, seconds: float, **_: Any) -> None:
        self.end = self.now + seconds

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Slow:
    """A dummy whose steps take so many seconds each; it notes how much of its time was left."""

    def __init__(self, timer: Timer, seconds: float, left: list[float], envid: int) -> None:
        self._env = dummy_with_its_id(envid)
        self.obs_space, self.act_space = self._env.obs_space, self._env.act_space
        self._timer, self._seconds, self._left = timer, seconds, left

    def step(self, action: Mapping[str, Any]) -> Any:
        self._timer.sleep(self._seconds)
        self._left.append(self._timer.end - self._timer.now)
        return self._env.step(action)


def test_the_timeout_is_that_of_each_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight that take 40 s each share a process, which is not ended after 300 s."""
    timer, left = Timer(monkeypatch), list[float]()
    args, health, watchdog = small_run(tmp_path), Health(), Watchdog(300.0)
    make = partial(Slow, timer, 40.0, left)
    envs = [RestartedEnv(make, envid, args, health, watchdog) for envid in range(8)]
    for env in envs:
        env.build()
    stop = threading.Event()
    _step_all([Lane(envs, range(8), False)], Agent(3, stop), stop, watchdog, health)  # type: ignore[arg-type]
    assert len(left) == 24
    assert all(300 - 40 <= each <= 1.1 * 300 - 40 for each in left)


def test_an_environment_that_is_asked_to_stop_tells_where_it_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the watchdog of its steps does after that."""
    timer, watchdog = Timer(monkeypatch), Watchdog(300.0)
    monkeypatch.setattr(runtime, "_says_where", False)
    watchdog.reset(now=True)
    runtime._say_where()
    told = timer.end
    assert told < timer.now + 20.0, "before the supervisor kills it"
    watchdog.reset(now=True)
    watchdog.pause()
    assert timer.end == told
