"""Configuration, presets, the random agent, carries: the parts that come without JAX."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_worlds import ACTIONS, VECTOR, observations

import dreamfleet.agents
from dreamfleet import ConfigError, Space
from dreamfleet.agents import (
    Agent,
    DreamerConfig,
    ExecutionConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    RandomAgent,
    StateMismatchError,
    find_agent,
    pad_rows,
    put_rows,
    size_preset,
    take_rows,
)
from dreamfleet.agents.dreamer.config import SIZES
from dreamfleet.agents.dreamer.runtime import entry
from dreamfleet.config import RunConfig
from dreamfleet.fleet import factories

SOURCE = Path(dreamfleet.agents.dreamer.__file__).parent


@pytest.mark.parametrize(
    ("size", "vector", "image"),
    [("1m", 640_867, 687_875), ("12m", 9_738_019, 10_498_259), ("25m", 21_782_947, 23_495_475)],
)
def test_published_sizes_have_the_published_parameters(size: str, vector: int, image: int) -> None:
    import jax

    from dreamfleet.agents.dreamer.networks import Networks

    flags = {k: VECTOR[k] for k in ("reward", "is_first", "is_last", "is_terminal")}
    for count, obs, action in (
        (vector, {"vector": Space(np.float32, (24,))}, Space(np.float32, (6,))),
        (image, {"image": Space(np.uint8, (64, 64, 3))}, Space(np.int32, (), 0, 17)),
    ):
        nets = Networks.init(
            np.random.default_rng(0),
            DreamerConfig(model=size_preset(size)),
            obs | flags,
            {"action": action},
        )
        assert sum(leaf.size for leaf in jax.tree.leaves(nets)) == count


def test_every_size_exists_and_unknown_ones_are_refused() -> None:
    assert {"1m", "12m", "25m", "50m", "100m", "200m", "400m"} <= set(SIZES)
    for name in SIZES:
        assert size_preset(name).deter > 0
    with pytest.raises(ConfigError, match="400m"):
        size_preset("3m")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ModelConfig(deter=100, blocks=8), "multiple of model.blocks"),
        (lambda: ModelConfig(kernel=4), "odd"),
        (lambda: ModelConfig(min_std=2.0), "min_std"),
        (lambda: LossConfig(imag_last=1), "replay value loss"),
        (lambda: LossConfig(reconstruction_scale=0.0), "representation=barlow"),
        (lambda: LossConfig(representation="none"), "representation"),  # type: ignore[arg-type]
        (lambda: OptimizerConfig(decay=-2), "decay"),
        (lambda: LossConfig(horizon=1.0), "horizon"),
        (lambda: OptimizerConfig(learning_rate=0.0), "learning_rate"),
        (lambda: OptimizerConfig(clip=1e-9), "use 0 for no clipping"),
        (lambda: OptimizerConfig(clip_floor=0.0), "clip_floor"),
        (lambda: OptimizerConfig(eps=0.0), "eps"),
        (lambda: OptimizerConfig(beta1=1.0), "beta1"),
        (lambda: OptimizerConfig(beta2=0.99999999), "beta2"),
        (lambda: LossConfig(return_limit=0.0), "return_limit"),
        (lambda: ModelConfig(min_std=1e-30), "min_std"),
        (lambda: ExecutionConfig(policy_devices=(0, 1)), "only one acts"),
        (lambda: ExecutionConfig(train_devices=(0, 0)), "names a device twice"),
        (lambda: ExecutionConfig(replay_context=0), "replay_context"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


GROUPS = [ModelConfig, LossConfig, OptimizerConfig, ExecutionConfig, DreamerConfig]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_every_setting_is_documented_and_read(group: type) -> None:
    config = (SOURCE / "config.py").read_text()
    rest = "".join(path.read_text() for path in SOURCE.rglob("*.py") if path.name != "config.py")
    for field in dataclasses.fields(group):
        assert re.search(rf'    {field.name}: [^\n]*\n    """', config), (
            f"{field.name} says nothing"
        )
        # The table of losses names the settings that weigh them.
        assert re.search(rf"[.\"]{field.name}\b", rest), f"nothing reads {field.name}"


@pytest.mark.parametrize(
    ("run", "updates"),
    [
        ({"steps": 10_000, "train_ratio": 32.0, "batch_size": 16, "batch_length": 32}, 625),
        ({"steps": 0, "train_ratio": 32.0}, 0),
        ({"steps": 10_000, "train_ratio": -1.0}, 0),
        ({"steps": 700, "offline": ("runs/a",)}, 700),
    ],
)
def test_the_learning_rate_falls_until_the_last_update_of_a_run(run: dict, updates: int) -> None:
    """Without an end it stays as it is; a setting stays as it is, too."""
    dreamer = find_agent("dreamer")
    config = RunConfig(**run)
    assert config.updates == updates
    settings = dreamer.default()
    assert settings.optimizer.decay == -1
    assert dreamer.for_run(settings, config.updates).optimizer.decay == updates
    stated = dataclasses.replace(settings, optimizer=OptimizerConfig(decay=7))
    assert dreamer.for_run(stated, config.updates) == stated
    assert DreamerConfig().optimizer.decay == 0, "as in the paper"


def test_a_runs_agent_has_the_settings_of_the_run() -> None:
    config = RunConfig(task="bundled:dummy", steps=6400, train_ratio=16.0).changed(
        {"batch_size": 8, "batch_length": 16, "dreamer.model": "debug"}
    )
    made: Any = factories.agent(config)
    assert made.config.optimizer.decay == config.updates == 800


def test_random_agent_acts_inside_its_space_and_can_be_saved() -> None:
    one, two = (RandomAgent(VECTOR, ACTIONS, seed=3) for _ in range(2))
    assert isinstance(one, Agent)
    for _ in range(3):
        _, actions, _ = one.policy(one.init_policy(4), observations(VECTOR, 4))
    assert set(actions) == {"move", "button", "keys"}
    assert all(ACTIONS[key].contains(row) for key in actions for row in actions[key])
    two.load(one.save())
    _, left, _ = one.policy({}, observations(VECTOR, 4), "greedy")
    _, right, _ = two.policy({}, observations(VECTOR, 4))
    np.testing.assert_array_equal(left["move"], right["move"])
    with pytest.raises(StateMismatchError, match="another agent"):
        two.load({"nets/x": np.zeros(1)})


def test_rows_of_a_carry() -> None:
    carry = {"deter": np.arange(8.0).reshape(4, 2), "previous": {"move": np.arange(4)}}
    rows = np.array([3, 1])
    part = take_rows(carry, rows)
    np.testing.assert_array_equal(part["deter"], [[6, 7], [2, 3]])
    put_rows(carry, np.array([0, 2]), part)
    np.testing.assert_array_equal(carry["deter"], [[6, 7], [2, 3], [2, 3], [6, 7]])
    np.testing.assert_array_equal(carry["previous"]["move"], [3, 1, 1, 3])
    padded = pad_rows((carry, [np.arange(2)]), 2)
    assert isinstance(padded, tuple)
    np.testing.assert_array_equal(padded[0]["deter"][4:], [[6, 7], [6, 7]])
    np.testing.assert_array_equal(padded[1][0], [0, 1, 0, 0])
    np.testing.assert_array_equal(take_rows(padded, slice(2))[1][0], [0, 1])


def test_allocator_settings_leave_the_users_own_alone() -> None:
    dreamer, settings = find_agent("dreamer"), DreamerConfig()
    added = dreamer.process_environment(settings, {"JAX_PLATFORMS": "cpu"})
    assert added["GLIBC_TUNABLES"].startswith("glibc.malloc.hugetlb=1:")
    assert dreamer.process_environment(settings, added) == {}


def test_allocator_settings_are_for_training_on_a_cpu_with_glibc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dreamer = find_agent("dreamer")

    def added(platform: str, environ: dict[str, str], *, device: bool) -> bool:
        monkeypatch.setattr(entry, "_has_accelerator", lambda: device)
        settings = DreamerConfig(execution=ExecutionConfig(train_platform=platform))
        return bool(dreamer.process_environment(settings, environ))

    assert added("", {}, device=False)
    assert not added("", {}, device=True)
    assert added("cpu", {}, device=True)
    assert not added("gpu", {}, device=False)
    assert added("", {"JAX_PLATFORMS": "cpu"}, device=True)
    assert not added("", {"JAX_PLATFORMS": "cuda,cpu"}, device=True)
    monkeypatch.setattr(entry, "libc_ver", lambda: ("", ""))
    assert not added("cpu", {}, device=False)
