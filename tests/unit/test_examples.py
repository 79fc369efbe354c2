"""The agents and networks of `examples/` learn, with nothing changed in the package."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from dreamfleet import Dream, Policy, evaluate, make_env
from dreamfleet.agents import Agent, find_agent
from dreamfleet.envs.registry import make_lanes

ROOT = Path(__file__).parents[2]


@pytest.fixture
def in_checkout(monkeypatch: pytest.MonkeyPatch):
    before = list(sys.path)
    monkeypatch.chdir(ROOT)
    yield
    sys.path[:] = before


class Loop:
    """Environments, an agent and all steps, in one thread."""

    def __init__(self, agent: Agent, task: str, envs: int, steps: int) -> None:
        self.agent, self.scores = agent, []
        self._envs = [make_env(task, seed=seed) for seed in range(envs)]
        self._actions: list[Any] = [{**self._sample(env), "reset": True} for env in self._envs]
        self._returns, self._carry = np.zeros(envs), agent.init_policy(envs)
        spaces = {**agent.obs_space, **agent.act_space, **agent.stored_space}
        self._stored = {k: np.zeros((envs, steps, *s.shape), s.dtype) for k, s in spaces.items()}
        self._rng, self.count = np.random.default_rng(0), 0

    @staticmethod
    def _sample(env: Any) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        return {key: space.sample(rng) for key, space in env.act_space.items()}

    def step(self) -> None:
        each = [env.step(action) for env, action in zip(self._envs, self._actions, strict=True)]
        obs = {key: np.stack([one[key] for one in each]) for key in self.agent.obs_space}
        self._carry, actions, stored = self.agent.policy(self._carry, obs)
        for key, value in {**obs, **actions, **stored}.items():
            self._stored[key][:, self.count] = value
        self.count += 1
        self._returns += obs["reward"]
        self.scores += self._returns[obs["is_last"]].tolist()
        self._returns[obs["is_last"]] = 0.0
        self._actions = [
            {**{key: value[row] for key, value in actions.items()}, "reset": obs["is_last"][row]}
            for row in range(len(each))
        ]

    def batch(self, size: int, length: int, newest: int) -> dict[str, Any]:
        rows = self._rng.integers(len(self._envs), size=size)
        starts = self._rng.integers(max(0, self.count - newest), self.count - length + 1, size)
        steps = starts[:, None] + np.arange(length)
        return {key: value[rows[:, None], steps] for key, value in self._stored.items()}


@pytest.mark.usefixtures("in_checkout")
def test_the_model_free_agent_learns_cartpole() -> None:
    kind = find_agent("examples.vtrace:AGENT")
    env = make_env("gym:CartPole-v1")
    agent = kind.make(env.obs_space, env.act_space, kind.config(), seed=0)
    assert isinstance(agent, Agent)
    assert agent.stored_space == kind.stored_space(env.obs_space, env.act_space, kind.config())
    loop = Loop(agent, "gym:CartPole-v1", envs=4, steps=10_000)
    # Random actions reach 22. Most runs are above 200 here; the fleet goes on to 500.
    while loop.count < 10_000 and np.mean(loop.scores[-20:] or [0.0]) < 120:
        loop.step()
        if loop.count > 300 and loop.count % 4 == 0:
            agent.train({}, loop.batch(16, 32, newest=1000))
    assert np.mean(loop.scores[-20:]) >= 120


CACHE = os.environ["DREAMFLEET_TESTS_CACHE"]
QUICK = ("--dreamer.execution.cache-dir", CACHE, "--report-every", "0")
"""Nothing is compiled twice, or for reports."""


def run(*arguments: str, cwd: Path = ROOT) -> str:
    """A command of Dreamfleet, as a person would type it in the checkout."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "dreamfleet.cli", *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.usefixtures("in_checkout")
def test_the_model_free_agent_trains_in_a_fleet(tmp_path: Path) -> None:
    """Started, resumed, loaded and evaluated."""
    logdir = tmp_path / "run"
    train = ("train", "--agent", "examples.vtrace:AGENT", "--task", "gym:CartPole-v1", "--logdir")
    sizes = ("--envs", "2", "--batch-size", "4", "--batch-length", "8", "--eval-episodes", "0")
    updates = []
    for steps in ("600", "1200"):
        run(*train, str(logdir), *sizes, "--train-ratio", "8", "--steps", steps)
        policy = Policy.load(logdir, agent="examples.vtrace:AGENT")
        assert policy.step >= int(steps)
        updates.append(int(policy.agent.save()["['updates']"]))
    assert 0 < updates[0] < updates[1]
    action, _ = policy({"vector": np.zeros(4, np.float32)})
    assert action["action"] in (0, 1)
    assert json.loads((logdir / "config.json").read_text())["agent"] == "examples.vtrace:AGENT"
    assert "mean" in run("eval", str(logdir), "--agent", "examples.vtrace:AGENT", "--episodes", "2")


@pytest.mark.usefixtures("in_checkout")
def test_a_sequence_model_and_losses_of_ones_own_train_in_a_fleet(tmp_path: Path) -> None:
    """Started, loaded and dreamed."""
    logdir, sizes = tmp_path / "run", ("--envs", "2", "--batch-size", "4", "--batch-length", "8")
    extra = ("examples.own_loss:InverseDynamics=0.1", "examples.own_loss:Contrast=0.01")
    parts = ("--dreamer.model.dynamics", "examples.own_dynamics:MinGRU")
    flags = (*parts, "--dreamer.loss.extra", *extra, "--dreamer.model", "debug", *QUICK)
    run(
        *("train", "--task", "bundled:catch", "--logdir", str(logdir), *flags, *sizes),
        *("--steps", "200", "--train-ratio", "4", "--eval-episodes", "0", "--log-every", "0.1"),
    )
    rows = [json.loads(line) for line in (logdir / "metrics.jsonl").read_text().splitlines()]
    assert any("train/loss/InverseDynamics" in row and "train/loss/Contrast" in row for row in rows)
    policy = Policy.load(logdir, trust=True)
    assert policy.step >= 200
    assert set(policy.reset(1).carry["state"]._fields) == {"memory", "code"}
    assert len(evaluate(policy, 1, trust=True).returns) == 1
    dream = Dream.load(logdir, trust=True)
    dream.start()
    assert dream.step(dream.act()).obs["image"].dtype == np.uint8


@pytest.mark.parametrize(
    ("module", "encoder", "options"),
    [
        ("point_cloud", "PointEncoder", ("--env-options", "image_layout=none")),
        ("text_tokens", "TextEncoder", ()),
    ],
)
def test_an_encoder_of_ones_own_trains(
    tmp_path: Path, module: str, encoder: str, options: tuple[str, ...]
) -> None:
    """Observations that the default encoder does not take, or takes in another way."""
    sizes = ("--envs", "2", "--batch-size", "4", "--batch-length", "8", "--dreamer.model", "debug")
    rates = ("--dreamer.optimizer.learning-rate", "1e-3", "--dreamer.optimizer.warmup", "2")
    said = run(
        *("train", "--task", f"examples.{module}:make", *options, *sizes, *QUICK, *rates),
        *("--dreamer.model.encoder", f"examples.{module}:{encoder}"),
        *("--launcher", "serial", "--train-ratio", "8", "--steps", "300", "--eval-episodes", "1"),
        *("--log-every", "0.1", "--logdir", str(tmp_path)),
    )
    assert "Evaluation: mean score" in said
    rows = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    losses = [row["train/opt/loss"] for row in rows if "train/opt/loss" in row]
    assert losses[-1] < 0.9 * losses[0]


class BraxState(NamedTuple):
    obs: Any
    reward: Any
    done: Any
    metrics: dict[str, Any]
    info: dict[str, Any]


class BraxCount:
    """Three lanes of Brax that count: they end after 2 and 3 steps, or are cut after 4."""

    observation_size, action_size = 1, 2

    def reset(self, key: Any) -> BraxState:
        zeros = jnp.zeros(3)
        return BraxState(zeros[:, None], zeros, zeros, {"height": zeros}, {"truncation": zeros})

    def step(self, state: BraxState, action: Any) -> BraxState:
        count = state.obs[:, 0] + 1
        ends, cut = count >= jnp.array([2, 3, 9]), count >= 4
        info = {"truncation": jnp.where(cut & ~ends, 1.0, 0.0)}
        done = jnp.where(ends | cut, 1.0, 0.0)
        return BraxState(count[:, None], action.sum(1), done, {"height": 10 * count}, info)


@pytest.mark.usefixtures("in_checkout")
def test_lanes_of_brax_keep_their_last_observations_and_metrics() -> None:
    lanes = importlib.import_module("examples.jax_lanes").JaxLanes

    def make(num_envs: int) -> Any:
        return lanes(BraxCount(), num_envs)

    env = make_lanes(make, 3, log_info="log/height")
    action = {"action": np.ones((3, 2), np.float32), "reset": np.zeros(3, bool)}
    rows = [env.step(env.reset_action), *(env.step(action) for _ in range(6))]
    seen = {key: np.stack([row[key] for row in rows], 1) for key in rows[0]}
    counts = [[0, 1, 2, 0, 1, 2, 0], [0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 0, 1]]
    assert seen["vector"][..., 0].tolist() == counts
    assert (seen["log/height"] == 10 * np.array(counts)).all()
    assert (seen["reward"] == np.where(seen["is_first"], 0, 2)).all()
    assert (seen["is_first"] == (np.array(counts) == 0)).all()
    last = np.array(counts) == np.array([[2], [3], [4]])
    assert (seen["is_last"] == last).all()
    assert (seen["is_terminal"] == last * np.array([[1], [1], [0]])).all()


@pytest.mark.usefixtures("in_checkout")
def test_only_the_agents_process_loads_jax() -> None:
    """Every process of a run reads the settings of its agent."""
    code = (
        "import sys; from dreamfleet import configure\n"
        "config = configure({'agent': 'examples.vtrace:AGENT'})\n"
        "assert config.agent_config.units == 64 and config.context == 0\n"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
