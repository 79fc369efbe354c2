"""dm_control: `dmc:walker_walk`, from its own state or from pixels."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dreamfleet.envs.base import Arrays, Env, EnvError, EpisodicEnv, Outcome
from dreamfleet.errors import import_extra
from dreamfleet.spaces import Space

# From camera 0, at the side, a quadruped hides its own legs.
_CAMERAS = {"quadruped": 2}

_NO_RENDERER = "disable"
_NO_WHEELS = (
    "it needs labmaze, which has no wheels for Python 3.13 or newer; use Python 3.11 or 3.12"
)


class DMControl(EpisodicEnv):
    """A task of the dm_control suite.

    An episode ends after 1,000 steps of the suite, so it is last but not terminal, unless the task
    itself sets the discount to 0.
    """

    def __init__(
        self,
        domain: str,
        task: str,
        *,
        seed: int = 0,
        obs: Literal["state", "pixels", "both"] = "state",
        size: tuple[int, int] = (64, 64),
        camera: int | None = None,
        render: bool = False,
    ) -> None:
        self._can_render = render or obs != "state"
        suite: Any = _suite(render=self._can_render)
        self._env = env = suite.load(domain, task, task_kwargs={"random": seed})
        self._size = size
        self._camera = _CAMERAS.get(domain, 0) if camera is None else camera
        self._state, self._pixels = obs != "pixels", obs != "state"
        specs = env.observation_spec() if self._state else {}
        # The suite declares no bounds for its observations and mixes scalars and vectors.
        obs_space = {key: Space(np.float32, spec.shape) for key, spec in specs.items()}
        if self._pixels:
            obs_space["image"] = Space(np.uint8, (*size, 3))
        action = env.action_spec()
        bounds = (action.minimum, action.maximum)
        super().__init__(obs_space, {"action": Space(np.float32, action.shape, *bounds)})

    def _begin(self) -> Arrays:
        return self._observe(self._env.reset())

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        step = self._env.step(np.asarray(action["action"], np.float64))
        terminal = step.last() and step.discount == 0
        return Outcome(self._observe(step), float(step.reward), step.last(), terminal)

    def _observe(self, step: Any) -> Arrays:
        result: Arrays = {}
        if self._state:
            result = {key: np.asarray(x, np.float32) for key, x in step.observation.items()}
        if self._pixels:
            result["image"] = self._frame()
        return result

    def _frame(self) -> NDArray[np.uint8]:
        return np.asarray(self._env.physics.render(*self._size, camera_id=self._camera))

    def render(self) -> NDArray[np.uint8] | None:
        return self._frame() if self._can_render else None

    def close(self) -> None:
        self._env.close()


def constructors() -> dict[str, Callable[..., Env]]:
    """What makes the tasks of this suite, by name."""
    known = _suite(render=False).ALL_TASKS
    return {f"{each[0]}_{each[1]}": functools.partial(DMControl, *each) for each in known}


def _suite(*, render: bool) -> ModuleType:
    """Import the suite, with a renderer only if it is needed: that costs a second and 150 MB.

    The package chooses its renderer when it is imported. MUJOCO_GL is respected if it is set.
    """
    chosen = os.environ.get("MUJOCO_GL")
    if chosen is None or (chosen == _NO_RENDERER and render):
        os.environ["MUJOCO_GL"] = pick_renderer() if render else _NO_RENDERER
    # The extra has the same limit, and installs nothing beyond it.
    hint = "" if sys.version_info < (3, 13) else _NO_WHEELS
    absl = import_extra("absl.logging", "Tasks of dmc:", "dmc", hint=hint)
    absl.set_verbosity("warning")  # or it tells which renderer it imports
    suite = import_extra("dm_control.suite", "Tasks of dmc:", "dmc", hint=hint)
    rendering = import_extra("dm_control._render", "Tasks of dmc:", "dmc", hint=hint)
    if render and chosen == _NO_RENDERER:
        # Imported earlier in this process without a renderer.
        importlib.reload(rendering)
    return suite


def pick_renderer() -> str:
    """The first renderer that works here: a window system, EGL, then OSMesa.

    dm_control itself says whether it can use one, in a process of its own: what is loaded and does
    not work would stay loaded, and a broken driver may crash.
    """
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        return "glfw"
    for name in ("egl", "osmesa"):
        words = [sys.executable, "-c", "import dm_control._render"]
        variables = {**os.environ, "MUJOCO_GL": name}
        if not subprocess.run(words, env=variables, capture_output=True, check=False).returncode:
            return name
    raise EnvError(
        "No renderer works here: install EGL (apt install libegl1) or OSMesa (apt install "
        "libosmesa6), or use obs='state'."
    )
