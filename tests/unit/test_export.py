"""An exported policy computes what the policy does, and its contract says how it is run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import agent_worlds as worlds
import jax
import numpy as np
import pytest

from dreamfleet import ConfigError, Policy, Space
from dreamfleet.agents import Dreamer, RandomAgent
from dreamfleet.agents.dreamer.acting import ActingNetworks
from dreamfleet.agents.dreamer.rssm import RSSM
from dreamfleet.agents.dreamer.runtime.exporting import policy_graph
from dreamfleet.agents.dreamer.runtime.player import DreamerPlayer
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.cli import main
from dreamfleet.config import RunConfig
from dreamfleet.envs import EpisodicEnv, make_env
from dreamfleet.errors import MissingExtraError
from dreamfleet.export import ExportError, compare, export
from dreamfleet.policy import BLUEPRINT, Blueprint

ROOT = Path(__file__).parents[2]
KEYS = Space(np.int32, (2,), 0, [2, 4])
WORLDS: dict[str, tuple[Mapping[str, Space], Mapping[str, Space]]] = {
    "vectors": (worlds.VECTOR, {"move": worlds.ACTIONS["move"]}),
    "images": (worlds.IMAGE, {"button": worlds.ACTIONS["button"]}),
    "mixed": (worlds.MIXED, worlds.ACTIONS),
    "masks": ({**worlds.VECTOR, "action_mask": Space(np.int8, (6,), 0, 2)}, {"keys": KEYS}),
}
LOW, HIGH = np.array([-3.0, 0.0], np.float32), np.array([1.0, 10.0], np.float32)


def needs(name: str) -> None:
    if name == "onnx":
        reason = "ONNX is not installed: pip install 'dreamfleet[export]'"
        for package in ("jax2onnx", "onnxruntime"):
            pytest.importorskip(package, reason=reason)


def sharpened(agent: Any) -> Any:
    """The agent with decided policies: fresh ones choose everything with the same probability."""
    state = agent.policy_state()
    rng = np.random.default_rng(0)
    kernels = [name for name in state if "actor/outputs" in name and "kernel" in name]
    assert kernels
    drawn = {name: rng.standard_normal(np.shape(state[name])) for name in kernels}
    agent.load_policy({**state, **{name: x.astype(np.float32) for name, x in drawn.items()}})
    return agent


def graph_of(world: str, **how: Any) -> Any:
    obs, act = WORLDS[world]
    agent = sharpened(DreamerPlayer(obs, act, worlds.config(), seed=3))
    how = {"latent": "sample", "actions": "sample"} | how
    return agent.policy_graph({"move": (LOW, HIGH)}, **how), agent


def seen(agent: Any) -> dict[str, Space]:
    return {key: space for key, space in agent.obs_space.items() if key not in worlds.FLAGS}


@pytest.mark.parametrize("world", ["mixed", "masks"])
@pytest.mark.parametrize("form", ["onnx", "stablehlo"])
def test_the_graph_computes_what_the_policy_does(world: str, form: Any, tmp_path: Path) -> None:
    needs(form)
    graph, agent = graph_of(world)
    contract = export(graph, seen(agent), tmp_path, format=form)
    assert [each["batch"] for each in contract["parity"]["batches"]] == [1, 8, 64]
    assert all(each["steps"] == 200 for each in contract["parity"]["batches"])
    assert max(each["free_run"] for each in contract["parity"]["batches"]) < 1e-4
    assert contract == json.loads((tmp_path / "policy.json").read_text())
    assert (tmp_path / contract["file"]).stat().st_size > 1000
    layouts = {each["name"]: each.get("layout") for each in contract["inputs"]}
    assert (layouts.get("obs.image") == "BHWC") == (world == "mixed")


@pytest.mark.parametrize("form", ["onnx", "stablehlo"])
def test_a_graph_of_modes_needs_no_noise(form: Any, tmp_path: Path) -> None:
    needs(form)
    graph, agent = graph_of("mixed", latent="mode", actions="mode")
    assert not any(name.startswith("noise") for name in graph.inputs)
    contract = export(graph, seen(agent), tmp_path, format=form, steps=20)
    assert max(each["free_run"] for each in contract["parity"]["batches"]) < 1e-4


def feed_of(graph: Any, agent: Any, batch: int, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    feed = {f"obs.{key}": space.sample(rng, batch) for key, space in seen(agent).items()}
    for name, (dtype, shape) in graph.inputs.items():
        if name.startswith("noise."):
            feed[name] = rng.random((batch, *shape), np.float32)
        elif not name.startswith("obs."):
            feed[name] = np.zeros((batch, *shape), dtype)
    return feed | changes


def run_of(graph: Any) -> Any:
    function = jax.jit(graph.function)
    return lambda feed: dict(
        zip(graph.outputs, function(*(feed[name] for name in graph.inputs)), strict=True)
    )


def test_the_reset_is_inside_the_graph() -> None:
    graph, agent = graph_of("mixed")
    run, first = run_of(graph), np.ones(3, bool)
    states = [name for name in graph.inputs if name.startswith("state.")]
    used = {name: np.ones((3, *graph.inputs[name][1]), np.float32) for name in states}
    fresh = run(feed_of(graph, agent, 3, is_first=first))
    after = run(feed_of(graph, agent, 3, is_first=first, **used))
    other = run(feed_of(graph, agent, 3, **used))
    for name in graph.outputs:
        np.testing.assert_array_equal(fresh[name], after[name])
    assert np.any(np.asarray(fresh["state_out.deter"]) != np.asarray(other["state_out.deter"]))


def test_masks_are_obeyed() -> None:
    graph, agent = graph_of("masks")
    mask = np.tile(np.array([0, 1, 0, 0, 1, 0], np.int8), (64, 1))
    noise = {"noise.action.keys": np.random.default_rng(1).random((64, 2), np.float32)}
    chosen = run_of(graph)(feed_of(graph, agent, 64, **{"obs.action_mask": mask}, **noise))
    assert (np.asarray(chosen["action.keys"]) == [1, 2]).all()


class Arm(EpisodicEnv):
    """An environment with units of its own."""

    dt = 0.05

    def __init__(self) -> None:
        super().__init__(
            {"vector": worlds.VECTOR["vector"], "token": worlds.VECTOR["token"]},
            {"move": Space(np.float32, (2,), LOW, HIGH)},
        )

    def _begin(self) -> Any:
        spaces = {key: self.obs_space[key] for key in ("vector", "token")}
        return {key: np.zeros(space.shape, space.dtype) for key, space in spaces.items()}

    def _advance(self, action: Any) -> Any:
        raise NotImplementedError


def test_actions_are_in_the_units_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_env(Arm)
    given: list[Any] = []
    step = env.env.step
    monkeypatch.setattr(env.env, "step", lambda action: given.append(action) or step(action))
    graph, agent = graph_of("vectors")
    raw = feed_of(graph, agent, 64)
    native = graph.reference(raw)["action.move"]
    following = graph.reference(raw)["state_out.previous.move"]
    assert np.abs(following).max() > 1  # some were clipped
    for action, expected in zip(following, native, strict=True):
        env.step({"move": action, "reset": True})
        np.testing.assert_allclose(expected, given[-1]["move"], rtol=1e-6, atol=1e-6)
    assert (native >= LOW).all()
    assert (native <= HIGH).all()


def saved(logdir: Path, agent: Any, config: RunConfig) -> Path:
    parts = {"agent": agent.save(), BLUEPRINT: Blueprint.of(agent, config).save()}
    Checkpoint(logdir / "ckpt" / "agent").save(parts, step=70)
    return logdir


def test_a_policy_says_its_units_and_its_time(tmp_path: Path) -> None:
    agent = Dreamer(*WORLDS["vectors"], worlds.config())
    config = RunConfig(agent_config=worlds.config(), env_options={"repeat": 2})
    policy = Policy.load(saved(tmp_path / "run", agent, config), greedy=True)
    contract = policy.export(tmp_path / "out", format="stablehlo", env=Arm)
    (action,) = (each for each in contract["outputs"] if each["name"] == "action.move")
    assert action["low"] == [-3.0, 0.0]
    assert action["high"] == [1.0, 10.0]
    assert contract["action_repeat"] == 2
    assert contract["control_rate_hz"] == pytest.approx(
        10.0
    )  # of the policy: each action is repeated
    assert contract["sampling"] == {"latent": "sample", "actions": "mode"}
    assert contract["trained_steps"] == 70


def test_a_graph_that_is_off_is_not_written(tmp_path: Path, monkeypatch: Any) -> None:
    graph, agent = graph_of("vectors")
    right = graph.reference

    def off(feed: Any) -> dict[str, Any]:
        return {name: value + np.float32(0.001) for name, value in right(feed).items()}

    graph = replace(graph, reference=off)

    with pytest.raises(
        ExportError, match=r"differs from the policy by 0\.\d+.*nothing was written"
    ):
        export(graph, seen(agent), tmp_path, format="stablehlo", steps=3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["onnx", "stablehlo"])
def test_networks_that_no_format_has_are_refused(form: Any, tmp_path: Path) -> None:
    needs(form)
    graph, agent = graph_of("vectors")
    untraceable = replace(graph, function=lambda *inputs: (np.asarray(inputs[0]),))
    with pytest.raises(ExportError, match=f"cannot be written as {form} .*use the other format"):
        export(untraceable, seen(agent), tmp_path, format=form, steps=3)
    assert list(tmp_path.iterdir()) == []


def test_other_draws_are_found() -> None:
    graph, agent = graph_of("images")

    def other(feed: Any) -> Any:
        return graph.reference({**feed, "noise.latent": 1 - feed["noise.latent"]})

    assert compare(graph, other, seen(agent), 8, 5)["draws_differ"] > 20


def test_other_precisions_and_networks() -> None:
    obs, act = WORLDS["vectors"]
    agent = DreamerPlayer(obs, act, worlds.config(compute_dtype="bfloat16"))
    graph = agent.policy_graph({"move": (LOW, HIGH)}, latent="sample", actions="sample")
    assert compare(graph, run_of(graph), seen(agent), 2, 3)["one_step"] < 1e-5


class OwnDynamics(RSSM):
    """Dynamics of a user's own."""


def test_modes_of_other_dynamics_are_unknown() -> None:
    agent = DreamerPlayer(*WORLDS["images"], worlds.config())
    nets = agent._publisher.newest()
    own = OwnDynamics(**{each.name: getattr(nets.dynamics, each.name) for each in fields(RSSM)})
    nets = ActingNetworks(nets.encoder, own, nets.actor)
    spaces = (seen(agent), agent.act_space, agent.init_policy(1), {})
    with pytest.raises(ConfigError, match="default dynamics, not OwnDynamics"):
        policy_graph(nets, *spaces, latent="mode")
    assert policy_graph(nets, *spaces).outputs


def test_what_cannot_be_exported_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    env = make_env("bundled:catch")
    random = Policy(RandomAgent(env.obs_space, env.act_space), env.obs_space, env.act_space)
    with pytest.raises(ConfigError, match="Only DreamerV3's"):
        random.export(tmp_path)
    agent = Dreamer(*WORLDS["vectors"], worlds.config())
    policy = Policy(agent, agent.obs_space, agent.act_space)
    with pytest.raises(ConfigError, match="pass env="):
        policy.export(tmp_path)
    monkeypatch.setitem(sys.modules, "jax2onnx", None)
    with pytest.raises(MissingExtraError, match=r"dreamfleet\[export\]"):
        policy.export(tmp_path, env=Arm)


def test_the_command_and_the_program_without_this_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`examples/run_onnx.py` sees nothing but numpy and onnxruntime."""
    needs("onnx")
    env = make_env("gym:Pendulum-v1")
    config = RunConfig(task="gym:Pendulum-v1", agent_config=worlds.config())
    run = saved(tmp_path / "run", Dreamer(env.obs_space, env.act_space, worlds.config()), config)
    assert main(["export", str(run)]) == 0
    assert "policy.onnx and policy.json are in" in capsys.readouterr().out
    program = (ROOT / "examples" / "run_onnx.py").read_text()
    assert program.count("\n") < 100
    hidden = "import sys; sys.modules |= dict.fromkeys(('dreamfleet', 'jax', 'gymnasium'))\n"
    done = subprocess.run(
        [sys.executable, "-c", hidden + program, run / "export", "--steps", "5"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "5 steps" in done.stdout
