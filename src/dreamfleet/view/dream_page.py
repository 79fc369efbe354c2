"""Play what a world model imagines, beside the real environment."""

from __future__ import annotations

import asyncio
import base64
import re
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from nicegui import app, run, ui
from nicegui.events import KeyEventArguments

from dreamfleet.dream.host import DreamClosedError, DreamHost
from dreamfleet.errors import DreamfleetError
from dreamfleet.view import charts
from dreamfleet.view.frame import RunPage, card, draw, with_hint
from dreamfleet.view.records_page import checkpoint_rows
from dreamfleet.view.runs import Run

FRESH = -1
"""The start from a fresh episode of the environment."""
_MAX_CONTROLS, _MAX_CHOICES = 32, 64
_DRAW_SECONDS = 0.2
"""Between two drawings of the curves while the dream plays; all frames are shown."""
_LOADING = "Loading the world model…"
_LETTERS = "123456789qwertyuiopasdfghjklzxcvbnm"
_ARROWS = {
    "ArrowLeft": ("left", "west"),
    "ArrowRight": ("right", "east"),
    "ArrowUp": ("up", "forward", "north"),
    "ArrowDown": ("down", "back", "south", "stay", "noop", "rest"),
}
_SIGNS = {"ArrowLeft": "←", "ArrowRight": "→", "ArrowUp": "↑", "ArrowDown": "↓"}
_WHO = {"you": "You", "policy": "Policy", "recorded": "Recorded"}
_SPEEDS = {2: "2 /s", 5: "5 /s", 10: "10 /s", 20: "20 /s", 60: "fastest"}
_COLORS = {"dream": charts.COLORS[0], "reality": charts.COLORS[2], "error": charts.COLORS[0]}
_BLUR = "() => document.activeElement?.blur()"  # keys go to the game
_NO_SCROLLING = """<script>addEventListener("keydown", e => {
  if ([" ", "ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Backspace"].includes(e.key) &&
      e.target === document.body) e.preventDefault();
});</script>"""

_host = DreamHost()
app.on_shutdown(_host.stop)


def checkpoints(run: Run) -> dict[str, str]:
    """Checkpoints of a run and their titles, the newest first."""
    found = [row for row in checkpoint_rows(run) if "step" in row]
    scores = ["" if row["score"] is None else f", score {row['score']:.4g}" for row in found]
    return {r["name"]: f"step {r['step']:,}{text}" for r, text in zip(found, scores, strict=True)}


def keys_of(names: Sequence[str], count: int) -> dict[str, int]:
    """The key of each choice of a discrete action."""
    keys = {letter: choice for choice, letter in zip(range(count), _LETTERS, strict=False)}
    parts = [re.split(r"\W|_", name) for name in names]
    for arrow, words in _ARROWS.items():
        fits = [  # the first word wins, and left wins over turn_left
            (rank, len(each), choice)
            for choice, each in enumerate(parts)
            for rank, word in enumerate(words)
            if word in each
        ]
        if fits:
            keys[arrow] = min(fits)[2]
    if not names and count <= 3:
        keys |= {"ArrowLeft": 0, "ArrowRight": count - 1}
        keys |= {"ArrowDown": 1} if count == 3 else {}
    return keys


def first_start(about: dict[str, Any]) -> int | None:
    """The default start: a fresh episode, or else the newest complete one that is stored."""
    if about["real"]:
        return FRESH
    episodes: list[dict[str, Any]] = about["episodes"]
    complete = (n for n, each in enumerate(episodes) if each["begins"] and each["ends"])
    return next(complete, 0 if episodes else None)


def steps_to_observe(length: int) -> int:
    """Of a stored episode: enough to see what moves, with most of it left to play."""
    return max(1, min(5, length // 4))


class DreamPage(RunPage):
    """One viewer's page, with a dream of its own."""

    path, seconds = "dream", 5.0

    def build(self) -> None:
        self._viewer = uuid.uuid4().hex
        self._about: dict[str, Any] = {}
        self._scene: dict[str, Any] = {}
        self._opened = ""
        self._action: dict[str, list[float]] = {}
        self._keys: dict[str, int] = {}
        self._buttons: list[ui.element] = []
        self._sliders: list[ui.slider] = []
        self._charts: dict[str, ui.echart] = {}
        self._lock = asyncio.Lock()
        self._drawn = 0.0
        ui.context.client.on_delete(lambda: run.io_bound(_host.close, self._viewer))
        ui.add_body_html(_NO_SCROLLING)
        with card("Dream", "what the world model imagines, one action at a time"):
            self._add_start()
        with ui.element("div").classes("stack") as self._stage:
            self._add_stage()
        self._stage.visible = False
        ui.keyboard(self._on_key)
        self._timer = ui.timer(0.1, self._tick, active=False)
        ui.timer(0, self._open, once=True)
        ui.timer(60.0, lambda: run.io_bound(_host.close_idle))

    def refresh(self) -> None:
        """Offer the checkpoints that are stored now, and the one in memory."""
        names = checkpoints(self._run)
        offered: dict[str, str] = dict(self._checkpoint.options)
        if self._opened in offered:
            names.setdefault(self._opened, offered[self._opened])
        if names and names != offered:
            chosen = self._checkpoint.value
            value = chosen if chosen in names else next(iter(names))
            self._checkpoint.set_options(names, value=value)

    def _add_start(self) -> None:
        with ui.element("div").classes("row-of"):
            names = checkpoints(self._run)
            first = next(iter(names), None)
            self._checkpoint = ui.select(
                names, label="checkpoint", value=first, on_change=self._open
            )
            self._episode = ui.select({}, label="start from", on_change=self._choose_start)
            for choice in (self._checkpoint, self._episode):
                choice.props("outlined dense options-dense").classes("medium")
            self._observe = ui.number("steps to observe", value=1, min=1, precision=0)
            self._seed = ui.number("seed", value=0, min=0, precision=0)
            for field in (self._observe, self._seed):
                field.props("outlined dense").classes("narrow")
            with _button(self._start).classes("chosen"):
                ui.label("Start")
        self._said = ui.label(_LOADING).classes("muted small")

    def _add_stage(self) -> None:
        with ui.element("div").classes("stage"):
            with card("Dream"):
                self._frame = ui.element("img").classes("screen").props('alt="imagined frame"')
                self._line = ui.label().classes("small")
            with card("Reality"):
                self._real = ui.element("img").classes("screen").props('alt="real frame"')
                self._real_line = ui.label().classes("small")
        with card():
            with ui.element("div").classes("row-of"):
                self._who = ui.toggle(_WHO, value="you")
                _tool("first_page", "to the start", partial(self._move, "reset"))
                _tool("fast_rewind", "10 steps back", partial(self._rewind, 10))
                _tool("chevron_left", "one step back (backspace)", partial(self._rewind, 1))
                self._play = _tool("play_arrow", "play or pause (space)", self._toggle)
                _tool("chevron_right", "one step (enter)", self._step)
                self._predict = _button(partial(self._move, "predict"))
                with self._predict.props('title="predict the rest from the recorded actions"'):
                    ui.label("Predict")
                self._speed = ui.select(_SPEEDS, value=10, on_change=self._change_speed)
                self._speed.props("outlined dense options-dense")
                self._branch = ui.toggle({}, on_change=self._change_branch)
                for toggle in (self._who, self._branch):
                    toggle.props("dense no-caps unelevated").on("click", js_handler=_BLUR)
            self._place = ui.slider(min=0, max=1, value=0).props('label aria-label="moment"')
            self._place.on("change", lambda: self._move("go", int(self._place.value or 0)))
            self._acts = ui.element("div").classes("play-acts")
            ui.label(
                "Keys: arrows or the keys on the buttons act, space plays, enter takes one step, "
                "backspace goes back."
            ).classes("muted small")
        self._grid = ui.element("div").classes("grid small-charts")

    def _add_actions(self) -> None:
        """Buttons and sliders for the actions of the task."""
        self._acts.clear()
        self._buttons, self._sliders, self._keys = [], [], {}
        spaces: list[dict[str, Any]] = self._about["actions"]
        single = len(spaces) == 1 and spaces[0]["discrete"] and not spaces[0]["shape"]
        names: list[str] = self._scene["names"] if single else []
        self._action = {
            each["name"]: [max(0.0, low) if each["discrete"] else 0.0 for low in each["low"]]
            for each in spaces
        }
        with self._acts:
            for space in spaces:
                for index in range(min(space["size"], _MAX_CONTROLS)):
                    self._add_action(space, index, names)

    def _add_action(self, space: dict[str, Any], index: int, names: Sequence[str]) -> None:
        key, low = space["name"], space["low"][index]
        label = key if space["size"] == 1 else f"{key} {index}"
        if not space["discrete"]:
            with ui.element("div").classes("act-slider"):
                ui.label(label).classes("muted small")
                high = min(space["high"][index], 1e6)
                slider = ui.slider(min=max(low, -1e6), max=high, step=0.01, value=0).props("label")
                slider.on_value_change(lambda event: self._set(key, index, float(event.value)))
                self._sliders.append(slider)
            return
        count = space["choices"][index]
        has_keys = not self._keys  # the first action
        self._keys = self._keys or keys_of(names, count)
        shown = {choice: _SIGNS.get(name, name) for name, choice in self._keys.items()}
        with ui.element("div").classes("act-choices"):
            if len(self._action) > 1 or space["size"] > 1:
                ui.label(label).classes("muted small")
            for choice in range(min(count, _MAX_CHOICES)):
                with _button(partial(self._choose, key, index, choice + low)) as button:
                    ui.label(names[choice] if choice < len(names) else str(choice))
                    ui.label(shown.get(choice, "") if has_keys else "").classes("muted small")
                if has_keys:
                    self._buttons.append(button)

    # --- starting --------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Load the chosen checkpoint, and start."""
        wanted = self._checkpoint.value
        if wanted is None:
            self._said.text = "The run has no checkpoint yet."
        elif wanted not in checkpoints(self._run):
            self.refresh()  # the run has removed it
        elif wanted != self._opened:
            self._pause()
            self._opened, self._said.text = wanted, _LOADING
            path = self._run.path / "ckpt" / "agent" / wanted
            about = await self._ask(lambda: _host.open(self._viewer, path, trust=self._run.trust))
            if about is None:
                self._opened = ""
                return
            self._offer(about)
            self._say(about["note"])
            if self._episode.value is None:
                self._said.text += " The run has no replay to start from."
            else:
                await self._start()

    def _offer(self, about: dict[str, Any]) -> None:
        """Offer the episodes that are stored now."""
        self._about = about
        options = {number: _episode_text(each) for number, each in enumerate(about["episodes"])}
        fresh = {FRESH: "a fresh episode"} if about["real"] else {}
        self._episode.set_options(fresh | options, value=first_start(about))

    def _say(self, note: str) -> None:
        task, step = self._about["task"], self._about["step"]
        self._said.text = f"{task}, trained for {step:,} steps. {with_hint(note)}"

    def _choose_start(self) -> None:
        chosen = self._episode.value
        self._observe.enabled = chosen != FRESH
        if chosen is not None and chosen != FRESH:
            self._observe.value = steps_to_observe(self._about["episodes"][chosen]["length"])

    async def _start(self) -> None:
        if not self._opened:
            await self._open()
            return
        self._pause()
        ui.run_javascript(f"({_BLUR})()")
        chosen = self._episode.value
        if chosen is None:
            return
        length = self._about["episodes"][chosen]["length"] if chosen >= 0 else 1
        observe = min(max(int(self._observe.value or 1), 1), length)
        self._said.text = "The dream starts…"
        episode = None if chosen == FRESH else int(chosen)
        scene = await self._call("start", episode, observe, int(self._seed.value or 0))
        if scene is None:
            why = self._said.text
            if self._opened and (about := await self._call("describe")):  # the replay has changed
                self._offer(about)
                self._said.text = why
            return
        self._say(scene["note"])
        before, self._scene = self._scene.get("names"), scene
        if before != scene["names"] or not self._action:
            self._add_actions()
        self._show(scene, draw=True)

    # --- playing ---------------------------------------------------------------------------------

    async def _step(self) -> None:
        await self._do("step", self._who.value, self._action)

    async def _move(self, method: str, *args: Any) -> None:
        self._pause()
        await self._do(method, *args)

    async def _rewind(self, steps: int) -> None:
        await self._move("go", max(0, self._scene.get("number", 0) - steps))

    async def _change_branch(self) -> None:
        if self._branch.value not in (None, self._scene["branch"]):
            await self._move("go", 1 << 30, self._branch.value)

    async def _do(self, method: str, *args: Any) -> None:
        if self._scene and (scene := await self._call(method, *args)) is not None:
            self._show(scene, draw=method != "step" or not self._timer.active)

    async def _choose(self, key: str, index: int, value: float) -> None:
        """Choose an action; a paused dream takes one step."""
        self._set(key, index, value)
        self._who.value = "you"
        if not self._timer.active:
            await self._step()

    def _set(self, key: str, index: int, value: float) -> None:
        self._action[key] = [*self._action[key][:index], value, *self._action[key][index + 1 :]]
        self._mark_actions()

    def _change_speed(self) -> None:
        ui.run_javascript(f"({_BLUR})()")
        self._timer.interval = 1 / int(self._speed.value or 10)

    def _toggle(self) -> None:
        if self._timer.active or not self._scene:
            self._pause()
            return
        self._timer.activate()
        self._play.name = "pause"

    def _pause(self) -> None:
        if self._timer.active:
            self._timer.deactivate()
            self._play.name = "play_arrow"
            self._draw(self._scene["curves"])

    async def _tick(self) -> None:
        recorded = self._who.value == "recorded"
        if self._scene["over"] or (recorded and not self._scene["recorded"]):
            self._pause()
            return
        await self._step()

    async def _on_key(self, event: KeyEventArguments) -> None:
        key, modifiers = event.key.name, event.modifiers
        if not self._scene or modifiers.ctrl or modifiers.alt or modifiers.meta:
            return
        if event.action.repeat and self._lock.locked():
            return  # a held key does not queue up
        if self._sliders and key in _SIGNS:
            await self._push(key, pressed=event.action.keydown)
        elif not event.action.keydown:
            return
        elif key == " " and not event.action.repeat:
            self._toggle()
        elif key == "Enter":
            await self._step()
        elif key == "Backspace":
            await self._rewind(1)
        elif key in self._keys:
            space = next(each for each in self._about["actions"] if each["discrete"])
            await self._choose(space["name"], 0, self._keys[key] + space["low"][0])

    async def _push(self, key: str, *, pressed: bool) -> None:
        """Move a slider to its end while an arrow is held: left and right the first slider, up and
        down the second."""
        vertical = key in ("ArrowUp", "ArrowDown")
        slider = self._sliders[min(int(vertical), len(self._sliders) - 1)]
        ends = (slider.props["max"], slider.props["min"])
        slider.value = ends[key in ("ArrowLeft", "ArrowDown")] if pressed else 0.0
        self._who.value = "you"
        if pressed and not self._timer.active:
            await self._step()

    # --- showing ---------------------------------------------------------------------------------

    def _show(self, scene: dict[str, Any], *, draw: bool) -> None:
        """Show a moment; its curves if `draw`, or if they are old."""
        self._scene = scene
        truth = scene["truth"]
        self._stage.visible = True
        self._predict.visible = bool(scene["recorded"])
        _set_frame(self._frame, scene["frame"])
        _set_frame(self._real, truth["frame"] if truth else b"")
        self._line.text = (
            f"step {scene['number']} · reward {scene['reward']:.3g} · continues "
            f"{scene['continuation']:.0%} · value {scene['value']:.4g}"
            f"{' · the dream is over' if scene['over'] else ''}"
            f"{'' if scene['frame'] else ' · see its numbers below'}"
        )
        self._real_line.text = _truth_text(truth, scene["note"])
        self._place.props(f"max={max(scene['length'], 1)}")
        self._place.value = scene["number"]
        branches = {n: f"branch {n + 1}" for n in range(scene["branches"])}
        self._branch.visible = len(branches) > 1
        self._branch.set_options(branches, value=scene["branch"])
        self._mark_actions()
        if draw or time.monotonic() - self._drawn > _DRAW_SECONDS:
            self._draw(scene["curves"])

    def _mark_actions(self) -> None:
        """Mark the chosen action, and those that the world model predicts to be masked."""
        if not self._buttons:
            return
        space = next(each for each in self._about["actions"] if each["discrete"])
        chosen = int(self._action[space["name"]][0] - space["low"][0])
        allowed = self._scene.get("allowed") or [True] * len(self._buttons)
        for number, button in enumerate(self._buttons):
            _mark(button, "chosen", number == chosen)
            _mark(button, "forbidden", not allowed[number])

    def _draw(self, curves: dict[str, Any]) -> None:
        self._drawn = time.monotonic()
        x = np.asarray(curves["at"], float)
        for title, lines in curves["lines"].items():
            options = charts.base(tools=False)
            options["grid"] |= {"top": 28, "bottom": 2}
            options["xAxis"] |= {"min": x[0], "max": max(x[0] + 20, x[-1])}
            options["series"] = [
                charts.line(name, x, np.asarray(values, float), _COLORS[name])
                for name, values in lines.items()
            ]
            options["legend"]["data"] = list(lines) if len(lines) > 1 else []
            draw(self._charts, title, options, card(title, within=self._grid), "chart low")
        for title, chart in self._charts.items():
            chart.parent_slot.parent.visible = title in curves["lines"]  # type: ignore[union-attr]

    # --- the worker ------------------------------------------------------------------------------

    async def _call(self, method: str, *args: Any) -> dict[str, Any] | None:
        return await self._ask(lambda: _host.call(self._viewer, method, *args))

    async def _ask(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """The result of a call; on failure None, with the reason on the page."""
        async with self._lock:
            try:
                return await run.io_bound(call)
            except DreamfleetError as error:
                self._pause()
                self._said.text = with_hint(str(error))
                if isinstance(error, DreamClosedError):  # Start opens it again
                    self._opened = ""
                return None


def _button(act: Callable[[], Any]) -> ui.element:
    """A button that does not take the focus: keys stay with the game."""
    button = ui.element("button").classes("plain").props("type=button")
    button.on("mousedown", js_handler="e => e.preventDefault()")
    return button.on("click", act, args=[])


def _tool(icon: str, title: str, act: Callable[[], Any]) -> ui.icon:
    with _button(act).classes("tool").props(f'aria-label="{title}" title="{title}"'):
        return ui.icon(icon)


def _mark(element: ui.element, name: str, on: bool) -> None:
    element.classes(add=name if on else "", remove="" if on else name)


def _set_frame(image: ui.element, png: bytes) -> None:
    image.visible = bool(png)
    if png:
        image.props["src"] = f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _episode_text(each: dict[str, Any]) -> str:
    rest = "" if each["begins"] and each["ends"] else ", a part" if each["ends"] else ", not over"
    return (
        f"{each['length']:,} steps, score {each['score']:.4g}{rest} · environment {each['stream']}"
    )


def _truth_text(truth: dict[str, Any] | None, note: str) -> str:
    if truth is None:
        return note
    over = " · the episode is over" if truth["last"] else ""
    source = "environment" if truth["source"] == "environment" else "as recorded"
    error = truth["difference"]
    return f"{source} · reward {truth['reward']:.3g} · error of the dream {error:.3g}{over}"
