import itertools
import re
import tracemalloc
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from masked_parts import Doors

from dreamfleet import ConfigError, Space
from dreamfleet.envs import (
    EnvError,
    EpisodicEnv,
    Outcome,
    UnknownTaskError,
    make_env,
    make_visible_env,
)
from dreamfleet.envs import diagnose as diagnosing
from dreamfleet.envs.base import Arrays
from dreamfleet.envs.diagnose import Diagnosis, diagnose


class Sound(EpisodicEnv):
    """Nothing is wrong with it; subclasses have one fault each."""

    def __init__(self, seed: int) -> None:
        super().__init__(
            {"x": Space(np.float32, (4,)), "image": Space(np.uint8, (64, 64, 3))},
            {"action": Space(np.int32, (), 0, 3)},
        )
        self.rng = np.random.default_rng(seed)
        self.taken = 0

    def _begin(self) -> Arrays:
        self.taken = 0
        return self.see()

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        self.taken += 1
        return Outcome(self.see(), 1.0, self.taken >= 20)

    def see(self) -> Arrays:
        return {
            "x": self.rng.normal(size=4).astype(np.float32),
            "image": self.rng.integers(0, 256, (64, 64, 3), np.uint8),
        }


def change(**keys: Callable[[Arrays, Sound], Any]) -> type[Sound]:
    class Changed(Sound):
        def step(self, action: Mapping[str, Any]) -> Arrays:
            obs = super().step(action)
            return {**obs, **{key: np.asarray(make(obs, self)) for key, make in keys.items()}}

    return Changed


class Overwriting(Sound):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.buffer = np.zeros((64, 64, 3), np.uint8)

    def see(self) -> Arrays:
        self.buffer[:] = self.rng.integers(0, 256, self.buffer.shape, np.uint8)
        return {**super().see(), "image": self.buffer}


class Chancy(Sound):
    def __init__(self, seed: int) -> None:
        super().__init__(np.random.SeedSequence().entropy % 2**31)


class Seedless(Sound):
    def __init__(self, seed: int) -> None:
        super().__init__(0)


class Raising(Sound):
    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        if self.taken == 7:
            raise ZeroDivisionError("in the physics")
        return super()._advance(action)


class Endless(Sound):
    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        return Outcome(self.see(), 0.0)


PROBLEMS = {
    "overwritten": (Overwriting, "'image' was overwritten.*Return a copy"),
    "raises": (Raising, "raised ZeroDivisionError: in the physics"),
    "terminal": (
        change(is_terminal=lambda obs, env: env.taken == 5),
        "is_terminal without is_last",
    ),
    "never first": (change(is_first=lambda obs, env: False), "not is_first"),
    "first again": (change(is_first=lambda obs, env: env.taken in (0, 5)), "had ended"),
    "over at once": (change(is_last=lambda obs, env: True), "ended with its first observation"),
    "first reward": (change(reward=lambda obs, env: np.float32(1)), "has a reward.*Return 0"),
}
HINTS = {
    "chance": (Chancy, "same seed gives different episodes: '(x|image)' differs at step 0"),
    "seedless": (Seedless, "Another seed gives the same episodes"),
    "endless": (Endless, "No episode ended within 100 steps.*time_limit"),
    "no reward": (Endless, "earned no reward"),
    "constant": (change(x=lambda obs, env: np.zeros(4, np.float32)), "'x' never changed"),
}


def said(findings: list) -> str:
    return "\n".join(f"{finding.what} {finding.fix}" for finding in findings)


def look(kind: type[Sound], steps: int = 100) -> Diagnosis:
    return diagnose(kind, steps=steps, seed=3)


@pytest.mark.parametrize(("each", "once", "slow"), [(0.011, 0.0, True), (0.0005, 5.0, False)])
def test_slow_steps_are_a_hint_and_a_single_slow_one_is_not(
    monkeypatch: pytest.MonkeyPatch, each: float, once: float, slow: bool
) -> None:
    now = 0.0

    class Timed(Sound):
        def _advance(self, action: Mapping[str, Any]) -> Outcome:
            nonlocal now
            now += once if self.taken == 7 else each
            return super()._advance(action)

    monkeypatch.setattr(diagnosing, "time", SimpleNamespace(perf_counter=lambda: now))
    assert ("steps a second" in said(look(Timed).hints)) == slow


def test_nothing_is_found_where_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) / 1000)
    monkeypatch.setattr(diagnosing, "time", clock)
    result = look(Sound)
    assert result.problems == []
    assert result.hints == []
    assert (result.episodes, result.score, result.length) == (5, 20, 20)
    assert result.steps == 100, "resets are not counted"
    assert len(result.frames) == 20
    assert result.steps_per_second == pytest.approx(1000)
    assert result.slowest_reset == pytest.approx(0.001)


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems_are_found(name: str) -> None:
    kind, words = PROBLEMS[name]
    found = said(look(kind).problems)
    assert re.search(words, found), found


@pytest.mark.parametrize("name", HINTS)
def test_hints_are_given(name: str) -> None:
    kind, words = HINTS[name]
    result = look(kind)
    assert result.problems == []
    assert re.search(words, said(result.hints)), said(result.hints)


class Exiting(Raising):
    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        raise SystemExit(3)


class Failing(Sound):
    """As a simulator that fails now and then: after 50 steps, whatever the episode."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.total = 0

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        self.total += 1
        if self.total > 50:
            self.lose_connection()
        return super()._advance(action)

    def lose_connection(self) -> None:
        raise ConnectionError("the simulator is gone")


class Unbuilt(Sound):
    def __init__(self, seed: int) -> None:
        raise OSError("no such device")


@pytest.mark.parametrize(
    ("kind", "words", "survives"),
    [
        (Failing, "Step 51 of 100 raised ConnectionError: the simulator is gone.", True),
        (Raising, "Step 8 of 100 raised ZeroDivisionError: in the physics.", False),
        (Exiting, "Step 1 of 100 raised SystemExit: 3.", False),
        (Unbuilt, "The constructor raised OSError: no such device.", False),
    ],
)
def test_what_it_raises_is_shown_and_what_training_would_do(
    kind: type[Sound], words: str, survives: bool
) -> None:
    result = look(kind)
    (problem,) = result.problems
    assert problem.what == words
    assert ("a run would" in problem.fix) == survives, problem.fix
    assert "test_diagnose.py" in problem.trace
    assert words.partition("raised ")[2].rstrip(".") in problem.trace
    assert 'diagnose.py", line' not in problem.trace.replace("test_diagnose.py", "")
    if kind is Failing:
        assert "in lose_connection" in problem.trace
        assert (result.steps, result.episodes) == (50, 2), "what it did before is told"


def test_the_call_of_a_later_environment_is_named() -> None:
    made: list[int] = []

    class Third(Sound):
        def _advance(self, action: Any) -> Outcome:
            if len(made) == 3:
                raise ValueError("worn out")
            return super()._advance(action)

    def make(seed: int) -> Any:
        made.append(seed)
        return Third(seed)

    assert "Step 1 of 50 raised ValueError" in said(diagnose(make, steps=50).problems)


def test_every_call_is_told_before_it_is_made() -> None:
    calls: list[tuple[str, int]] = []

    class Telling(Sound):
        def _begin(self) -> Arrays:
            assert calls[-1][0] == "reset"
            return super()._begin()

        def _advance(self, action: Mapping[str, Any]) -> Outcome:
            assert calls[-1][0] == "step"
            return super()._advance(action)

    result = diagnose(Telling, steps=100, tell=lambda call, done, _: calls.append((call, done)))
    assert result.problems == []
    assert [done for call, done in calls if call == "step"][:100] == list(range(100))
    assert calls[0] == ("constructor", 0)
    assert {call for call, _ in calls} == {"constructor", "reset", "step", "render", "close"}


def test_a_refused_observation_is_a_problem_and_no_crash() -> None:
    def make(seed: int):
        env = make_env("bundled:pointmass", seed=seed)
        env.env._observe = lambda: {"position": np.zeros(2)}
        return env

    assert "lacks 'goal'" in said(diagnose(make, steps=10).problems)


def test_frames_are_rendered_where_no_observation_is_an_image() -> None:
    result = diagnose(lambda seed: make_env("bundled:pointmass", seed=seed), steps=40)
    assert len(result.frames) == 20
    assert result.frames[0].shape == (64, 64, 3)


def test_an_environment_with_the_option_render_is_rendered() -> None:
    def make(seed: int) -> Any:
        return make_env("gym:CartPole-v1", seed=seed)

    def visible(seed: int) -> Any:
        return make_visible_env("gym:CartPole-v1", seed=seed)

    def blind(seed: int) -> Any:
        raise EnvError("There is no screen.")

    assert diagnose(make, steps=40).frames == []
    result = diagnose(make, steps=40, make_visible=visible)
    assert len(result.frames) == 20
    assert result.frames[0].shape == (400, 600, 3)
    result = diagnose(make, steps=40, make_visible=blind)
    assert result.problems == []
    assert "cannot be rendered: There is no screen. Training needs no" in said(result.hints)


def test_a_wrong_task_or_option_is_no_problem_of_the_environment() -> None:
    for task, options, error in (
        ("gym:CartPol-v1", {}, UnknownTaskError),
        ("gym:CartPole-v1", {"hats": 3}, ConfigError),
    ):
        with pytest.raises(error):
            diagnose(lambda seed, t=task, o=options: make_env(t, seed=seed, **o), steps=5)


def test_long_runs_with_large_images_stay_small() -> None:
    def make(seed: int):
        return make_env("bundled:dummy", seed=seed, size=(300, 300))

    diagnose(make, steps=5)
    tracemalloc.start()
    diagnose(make, steps=300)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300 * 300 * 300 * 3 / 3, "the frames themselves would be three times this"


class Dead(Doors):
    """A room without a way out, in the midst of an episode."""

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        outcome = super()._advance(action)
        if self._rooms == 3:
            outcome.obs["action_mask"] = np.zeros(5, np.int8)
        return outcome


def test_a_masked_environment_is_played_with_allowed_actions_only() -> None:
    result = diagnose(Doors, steps=300)
    assert result.problems == []
    assert result.episodes > 30


def test_a_mask_that_forbids_every_action_is_a_problem() -> None:
    result = diagnose(Dead, steps=3)
    assert [finding.what for finding in result.problems] == [
        "'action_mask' forbids every action at step 3."
    ]


def test_a_mask_that_does_not_fit_is_a_problem() -> None:
    class Wide(Sound):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.obs_space["action_mask"] = Space(bool, (4,))

    (finding,) = diagnose(Wide, steps=3).problems
    assert "has shape (4,), and action 'action' has 3 choices" in finding.what
