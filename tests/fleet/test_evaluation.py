"""Evaluations: in processes of their own, bounded, and without losing what was played."""

from __future__ import annotations

import errno
import os
import signal as signals
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_parts import (
    EVERY_STEP,
    Awaiting,
    Paced,
    left_behind,
    parts,
    processes_by_title,
    rows,
    small_run,
)

from dreamfleet.agents import RandomAgent
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.cli import main
from dreamfleet.config import RunConfig
from dreamfleet.envs import make_env
from dreamfleet.envs.wrappers import TimeLimit
from dreamfleet.errors import ConfigError
from dreamfleet.evaluation import EvaluationError, evaluate
from dreamfleet.fleet.launchers import Worker
from dreamfleet.fleet.launchers.local import STOPPED
from dreamfleet.fleet.launchers.serial import SerialLauncher
from dreamfleet.fleet.record import read_record
from dreamfleet.fleet.supervisor import silent
from dreamfleet.parallel import combined
from dreamfleet.policy import BLUEPRINT, Blueprint, Policy
from dreamfleet.roles.env import parallel_env
from dreamfleet.roles.episodes import EpisodeServer
from dreamfleet.training import StopTraining, final_evaluation, train
from dreamfleet.trust import CodeRef

ENVS = """
import os
import signal
from pathlib import Path

import gymnasium
import numpy as np

FOLDER = Path(__file__).parent


class Endless(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        with (FOLDER / "made").open("a") as file:
            file.write(f"{os.getpid()}\\n")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        print("a line of the environment", flush=True)
        self.steps += 1
        return np.zeros(1, np.float32), 1.0, False, False, {}


class Once(Endless):
    "Raises in the middle of its second episode, once."

    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        if (FOLDER / "second").exists() and not (FOLDER / "raised").exists():
            (FOLDER / "raised").touch()
            raise RuntimeError("the pole is broken")
        if self.steps == 3:
            (FOLDER / "second").touch()
        return obs, reward, self.steps == 3, False, info


class Looking(Endless):
    "Episodes of one step, at which it looks at the run in whose evaluation it is."

    def step(self, action):
        from dreamfleet.errors import ConfigError
        from dreamfleet.fleet.claim import claim_directory
        from dreamfleet.fleet.status import Watcher

        status = Watcher(FOLDER / "run").look(0.0)
        (FOLDER / "claimed").unlink(missing_ok=True)
        try:
            with claim_directory(FOLDER / "run"):
                (FOLDER / "claimed").touch()
        except ConfigError:
            pass
        (FOLDER / "seen").write_text(f"{status.state} {status.running}: {status.message}")
        return np.zeros(1, np.float32), 1.0, True, False, {}


class Interrupted(Endless):
    "Episodes of three steps; the program is ended in the second one."

    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        if (FOLDER / "second").exists():
            os.kill(os.getpid(), signal.SIGTERM if (FOLDER / "term").exists() else signal.SIGINT)
        if self.steps == 3:
            (FOLDER / "second").touch()
        return obs, reward, self.steps == 3, False, info


class Unborn(Endless):
    def reset(self, *, seed=None, options=None):
        raise RuntimeError("there is no pole.")


class Broken(Endless):
    def step(self, action):
        raise RuntimeError("the pole is broken")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / f"envs_{tmp_path.name}.py").write_text(ENVS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def trained(folder: Path, name: str, **settings: Any) -> Path:
    """The directory of a run that has saved its agent."""
    task = f"envs_{folder.name}:{name}"
    config = RunConfig(task=task, agent="random", **settings)
    env = make_env(task)
    agent = RandomAgent(env.obs_space, env.act_space)
    parts = {"agent": agent.save(), BLUEPRINT: Blueprint.of(agent, config).save()}
    Checkpoint(folder / "run" / "ckpt" / "agent").save(parts, step=7)
    (folder / "made").unlink()
    return folder / "run"


def test_one_environment_in_a_process_with_its_output_in_the_logs(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its episodes never end, it writes a line a step, and there is but one of it."""
    run = trained(folder, "Endless", envs_per_process=8)
    command = ["eval", str(run), "--episodes", "3", "--envs", "1", "--max-steps", "20"]
    command.append("--trust")
    assert main(command) == 0
    said = capfd.readouterr()
    assert "returns        20  20  20" in said.out
    assert "3 of 3 episodes did not end within 20 steps" in said.out
    assert "a line of the environment" not in said.out + said.err
    assert (run / "logs" / "eval-0.log").read_text().count("a line of the environment") == 60
    (pid,) = (folder / "made").read_text().splitlines()
    assert int(pid) != os.getpid()
    assert left_behind() == []


def test_an_environment_that_fails_costs_its_episode(folder: Path) -> None:
    run = trained(folder, "Once", launcher="serial")
    lines: list[str] = []
    result = evaluate(run, 4, envs=1, trust=True, say=lines.append)
    assert result.returns == [3.0, 3.0, 3.0]
    assert result.notes() == ["1 of 4 episodes failed: RuntimeError: the pole is broken"]
    assert (result.failed, result.cut_short) == (1, 0)
    assert len((folder / "made").read_text().splitlines()) == 2
    assert "4 episodes in 1 environment" in lines[0]


def test_when_all_fail_the_traceback_of_the_environment_is_shown(folder: Path) -> None:
    run = trained(folder, "Broken", launcher="serial", envs_per_process=2)
    with pytest.raises(EvaluationError, match="All 3 episodes failed") as caught:
        evaluate(run, 3, envs=2, trust=True)
    header, first = str(caught.value).splitlines()[1:3]
    assert header.startswith("Traceback")
    assert f"envs_{folder.name}.py" in first, "no frames of this package above the user's own"
    assert str(caught.value).endswith("RuntimeError: the pole is broken")


def test_advice_of_an_evaluation_fits_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its environment never begins an episode; a run's setting would not help."""
    run = trained(folder, "Unborn", launcher="serial")
    with pytest.raises(EvaluationError) as caught:
        evaluate(run, 1, trust=True)
    first = str(caught.value).splitlines()[2]
    assert f"envs_{folder.name}.py" in first
    assert str(caught.value).endswith("RuntimeError: there is no pole.")
    assert "the last time it was RuntimeError: there is no pole. Fix it.\n" in caplog.text
    assert "max_restarts" not in caplog.text


def test_a_process_that_cannot_be_started_is_no_silence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> Any:
        raise OSError("cannot allocate memory")

    run = trained(folder, "Endless", launcher="serial")
    monkeypatch.setattr(SerialLauncher, "start", full)
    with pytest.raises(EvaluationError, match="OSError: cannot allocate memory"):
        evaluate(run, 2, envs=1, trust=True)


class Kept:
    """An output that is given as a class."""

    def __init__(self, logdir: Path) -> None:
        self._path = logdir / "kept"

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(f"{step} {metrics['eval/score']}\n")


def over(folder: Path, name: str, **settings: Any) -> RunConfig:
    """A run that has made its steps, and is only evaluated."""
    settings = {"launcher": "serial", "steps": 7, "outputs": ("jsonl",), **settings}
    run = trained(folder, name, **settings)
    config = RunConfig(task=f"envs_{folder.name}:{name}", logdir=run, agent="random", **settings)
    (run / "config.json").write_text(config.to_json())
    return config


def test_the_evaluation_at_the_end_is_a_part_of_the_run(folder: Path) -> None:
    """The status shows it, no second run may begin meanwhile, and all outputs get its result."""
    config = over(folder, "Looking", eval_episodes=1)
    logged: list[Any] = []

    def on_log(step: int, metrics: Mapping[str, Any]) -> None:
        logged.append((step, metrics["eval/score"]))
        raise StopTraining

    train(config, display=None, say=silent, outputs=["jsonl", Kept], on_log=on_log)
    seen = (folder / "seen").read_text()  # at its last step; the first was before the start
    assert seen == "evaluating True: Training is over, and the agent is being evaluated."
    assert not (folder / "claimed").exists()
    record = read_record(config.logdir)
    assert record.state == "ended"
    assert logged == [(7, 1.0)]
    assert (config.logdir / "kept").read_text() == "7 1.0\n"


def test_an_environment_without_an_end_does_not_outlast_its_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of 7 steps: its evaluation of 3 episodes would be 81,000 long. It says its steps."""
    monkeypatch.setattr("dreamfleet.evaluation._SAY_SECONDS", 1e-9)
    said: list[str] = []
    result = train(over(folder, "Endless", eval_episodes=3), display=None, say=said.append)
    assert result.lengths == [7, 7, 7]
    assert "3 of 3 episodes did not end within 7 steps (eval_max_steps, or what the" in str(said)
    assert "0 of 3 episodes, 3 steps" in said


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT is Ctrl-C, also where the tests run in the background and ignore it."""
    before = signals.signal(signals.SIGINT, signals.default_int_handler)
    yield
    signals.signal(signals.SIGINT, before)


@pytest.mark.parametrize("signal", ["int", "term"])
@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupted_evaluation_keeps_what_was_played(
    folder: Path, capsys: pytest.CaptureFixture[str], signal: str
) -> None:
    config = over(folder, "Interrupted", eval_episodes=5, envs=1)
    (folder / signal).touch()
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        train(config, display=None, say=said.append)
    assert "The evaluation was interrupted after 1 of 5 episodes: mean score 3" in said
    assert said[-1] == f"dreamfleet resume {config.logdir} evaluates again."
    (kept,) = rows(config.logdir / "evaluations.jsonl")
    assert (kept["kind"], kept["partial"], kept["returns"]) == ("final", True, [3.0])
    assert not (config.logdir / "metrics.jsonl").exists()
    record = read_record(config.logdir)
    assert record.state == "ended"
    if signal == "int":
        (folder / "second").unlink()
        command = ["eval", str(config.logdir), "--trust", "--episodes", "2"]
        assert main(command) == 130
        assert "Interrupted after 1 of 2 episodes\nreturns        3\n" in capsys.readouterr().out


def test_a_full_disk_does_not_take_the_result_along(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = over(folder, "Endless", eval_episodes=1, eval_every=5, eval_max_steps=4)
    monkeypatch.setattr("dreamfleet.evaluation.append_evaluation", full)
    monkeypatch.setattr("dreamfleet.training.logger", full)
    monkeypatch.setattr(Checkpoint, "rate", full)
    said: list[str] = []
    assert final_evaluation(config, 0.0, said.append, config.task).mean == 4
    assert "Evaluation: mean score 4, lowest 4, highest 4" in said
    assert [line for line in said if "could not be written" in line] == [
        f"{what} could not be written: No space left on device."
        for what in ("The result", "The score of the checkpoint", "The metrics")
    ]


def test_a_policy_in_memory_plays_in_an_environment_of_ones_own(folder: Path) -> None:
    policy = Policy.load(trained(folder, "Endless", launcher="serial", eval_max_steps=5))
    assert evaluate(policy, 2, trust=True).lengths == [5, 5]

    def factory(seed: int) -> Any:
        return TimeLimit(make_env(f"envs_{folder.name}:Endless", seed=seed), 2)

    result = evaluate(policy, 4, envs=4, env=factory)
    assert result.lengths == [2, 2, 2, 2]
    result = evaluate(policy, np.int64(2), envs=1.0, env=factory, video=str(folder / "play.mp4"))  # type: ignore[arg-type]
    assert result.lengths == [2, 2]
    assert "renders no frames" in result.video_error
    with pytest.raises(ConfigError, match="seed"):
        evaluate(policy, 1, env=factory, seed=-1)


class Counted:
    """A dummy that notes how many steps it has made, and logs a key of its own."""

    def __init__(self, envid: int) -> None:
        self._env, self._key = make_env("bundled:dummy", seed=envid, **EVERY_STEP), f"log/{envid}"
        self.obs_space, self.act_space = self._env.obs_space, self._env.act_space
        self.steps = 0

    def step(self, action: Mapping[str, Any]) -> Any:
        self.steps += 1
        return {**self._env.step(action), self._key: np.float32(self.steps)}


def test_between_two_rounds_environments_wait(tmp_path: Path) -> None:
    made: list[Counted] = []

    def make(envid: int) -> Counted:
        made.append(Counted(envid))
        return made[-1]

    groups = [(5,), (6,)]
    with EpisodeServer("ipc://{auto}", groups, max_steps=10, why=lambda group: "") as server:
        config = small_run(tmp_path, actor_addr=server.address)
        with SerialLauncher(tmp_path) as launcher:
            workers = [
                launcher.start(Worker(f"env-{n}", "env", partial(parallel_env, make, n, config)))
                for n in (5, 6)
            ]
            spaces = make_env("bundled:dummy", **EVERY_STEP)
            seen: list[list[int]] = []

            class Watching(RandomAgent):
                def policy(self, *arguments: Any) -> Any:
                    seen.append([env.steps for env in made])
                    return super().policy(*arguments)

            agent = Watching(spaces.obs_space, spaces.act_space)
            counts = []
            for _ in range(2):
                played = server.play(agent, "eval", 3)
                assert [each.episode and each.episode.length for each in played] == [10, 10, 10]
                assert all(each.cut_short for each in played)
                counts.append([env.steps for env in made])
            # The first round: two episodes of one environment, each with its reset. The other one
            # has played its share and goes on until then. The second round begins with resets.
            assert counts == [[22, 22], [44, 44]]
            assert seen[22] == [22, 22]  # when the second round began
            for worker in workers:
                worker.terminate()
            assert [worker.wait(60) for worker in workers] == [STOPPED, STOPPED]


def test_rounds_trust_the_networks_that_the_run_itself_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RunConfig, "named_code", property(lambda _: ["nets:Own"]))
    own = [CodeRef("random.encoder", "nets:Own")]
    monkeypatch.setattr("dreamfleet.policy.code_in", lambda _: own)
    config = small_run(
        tmp_path, launcher="serial", steps=0, target_score=1.0, eval_every=20, eval_episodes=1
    )
    assert train(config, display=None, say=silent) is not None
    assert "nets:Own" not in caplog.text
    kinds = [each["kind"] for each in rows(tmp_path / "evaluations.jsonl")]
    assert {*kinds} == {"round", "final"}
    with pytest.raises(ConfigError, match="names nets:Own, which"):
        Policy.load(tmp_path, agent="random")


def test_rounds_while_training_survive_restarts_and_decide_the_best_checkpoint(
    tmp_path: Path,
) -> None:
    """All processes that take part in rounds are killed, one after the other, the evaluator also in
    the middle of a round; then scores rise, and the run ends at its target, which rounds decide
    where there are any."""
    config = small_run(
        tmp_path,
        steps=0,
        target_score=20.0,
        envs=2,
        eval_every=50,
        eval_episodes=3,
        on_failure="restart",
        outputs=("jsonl", "tensorboard"),
    )
    victims = ["evaluator", "eval-2", "agent"]
    rounds = 0

    def witness(line: str) -> None:
        nonlocal rounds
        found = len(rows(tmp_path / "evaluations.jsonl"))
        if (tmp_path / "playing").exists() and not (tmp_path / "killed").exists():
            assert found == 0, "the first round is under way"
            processes_by_title()["evaluator"].kill()
            (tmp_path / "killed").touch()
        elif found > rounds and victims and victims[0] in processes_by_title():
            rounds = found
            processes_by_title()[victims.pop(0)].kill()
        elif found > rounds and not victims:
            (tmp_path / "go").touch()

    paced, awaiting = partial(Paced, tmp_path), partial(Awaiting, tmp_path)
    made = parts(config, make_env_train=paced, make_env_eval=awaiting)
    combined(**made, args=config, progress=witness)
    found = rows(tmp_path / "evaluations.jsonl")
    assert not victims
    assert len(found) >= 4
    assert {each["kind"] for each in found} == {"round"}
    assert found[0]["mean"] == 0
    assert found[-1]["mean"] >= 20
    steps = [each["step"] for each in found]
    assert sorted(steps) == steps
    assert all(b // 50 > a // 50 for a, b in pairwise(steps)), "none is recorded twice"
    logged = [row for row in rows(tmp_path / "metrics.jsonl") if "eval/step" in row]
    assert {row["eval/step"]: row["eval/score"] for row in logged} == {
        each["step"]: each["mean"] for each in found
    }
    # A round stands in the file where it ended.
    assert all(row["step"] >= row["eval/step"] for row in logged)
    best = Policy.load(tmp_path, "best")
    assert best.step == max(found, key=lambda each: (each["mean"], each["step"]))["step"]
    assert left_behind() == []
    # The end plays a round that it has interrupted, and adds the last point, in all outputs.
    checkpoints = Checkpoint(tmp_path / "ckpt" / "agent")
    newest = checkpoints.load()
    checkpoints.save(newest.parts, step=newest.step + 10, pending=True)
    checkpoints.save(newest.parts, step=newest.step + 20)
    final = final_evaluation(replace(config, launcher="serial"), 0.0)
    interrupted, last = rows(tmp_path / "evaluations.jsonl")[-2:]
    assert (interrupted["kind"], interrupted["step"]) == ("round", newest.step + 10)
    assert checkpoints.pending() is None
    assert (last["kind"], last["mean"]) == ("final", final.mean)
    assert rows(tmp_path / "metrics.jsonl")[-1]["eval/score"] == pytest.approx(final.mean)
    rated = checkpoints.load(parts=[])
    assert (rated.step, rated.score) == (newest.step + 20, final.mean)
