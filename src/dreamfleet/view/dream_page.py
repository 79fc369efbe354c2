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
from nicegui import app, ui
from nicegui import run as threads
from nicegui.events import KeyEventArguments

from dreamfleet.dream.session import FRESH
from dreamfleet.errors import DreamfleetError
from dreamfleet.view.charts import COLORS, Chart
from dreamfleet.view.dream_host import DreamClosedError, DreamHost
from dreamfleet.view.frame import Refresh, card, draw, with_hint
from dreamfleet.view.records_page import checkpoint_rows
from dreamfleet.view.runs import Run

_MAX_CONTROLS, _MAX_CHOICES = 32, 64
_DRAW_SECONDS = 0.2
"""Between two drawings of the curves while the dream plays; all frames are shown."""
_LETTERS = "123456789qwertyuiopasdfghjklzxcvbnm"
_ARROWS = {
    "ArrowLeft": ("left", "west"),
    "ArrowRight": ("right", "east"),
    "ArrowUp": ("up", "forward", "north"),
    "ArrowDown": ("down", "back", "south", "stay", "noop", "rest"),
}
_SIGNS = {"ArrowLeft": "←", "ArrowRight": "→", "ArrowUp": "↑", "ArrowDown": "↓"}
_SPEEDS = {2: "2 /s", 5: "5 /s", 10: "10 /s", 20: "20 /s", 60: "fastest"}
_COLORS = {"dream": COLORS[0], "reality": COLORS[2], "error": COLORS[0]}
_KEYS_GO_TO_THE_GAME = """<script>
addEventListener("click", e => e.target.closest("button") && document.activeElement?.blur());
addEventListener("keydown", e => {
  if ([" ", "ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Backspace"].includes(e.key) &&
      e.target === document.body) e.preventDefault();
});</script>"""

_host = DreamHost()
app.on_shutdown(_host.stop)


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


def build_dream(run: Run) -> Refresh:
    """What a world model imagines, one action at a time, beside the real environment."""
    return DreamPage(run).offer_checkpoints


class DreamPage:
    """One viewer's page, with a dream of its own."""

    def __init__(self, run: Run) -> None:
        self._run, self._viewer = run, uuid.uuid4().hex
        self._about: dict[str, Any] = {}
        self._scene: dict[str, Any] = {}
        self._opened = ""
        self._values: list[float] = []  # your action, a number for each control
        self._keyed, self._lowest = 0, 0.0  # the first control with choices, and its first choice
        self._keys: dict[str, int] = {}
        self._buttons: list[ui.button] = []
        self._sliders: list[ui.slider] = []
        self._charts: dict[str, ui.echart] = {}
        self._lock = asyncio.Lock()
        self._drawn = 0.0
        ui.context.client.on_delete(lambda: threads.io_bound(_host.close, self._viewer))
        ui.add_body_html(_KEYS_GO_TO_THE_GAME)
        with card("Dream", "what the world model imagines, one action at a time"):
            with ui.element("div").classes("row-of"):
                self._checkpoint = ui.select({}, label="checkpoint", on_change=self._open)
                self._start_from = ui.select({}, label="start from", on_change=self._choose_start)
                self._observe = ui.number("steps to observe", value=1, min=1, precision=0)
                self._seed = ui.number("seed", value=0, min=0, precision=0)
                for field in (self._checkpoint, self._start_from, self._observe, self._seed):
                    kind = "medium" if isinstance(field, ui.select) else "narrow"
                    field.props("outlined dense options-dense").classes(kind)
                _button("Start", self._start).classes("chosen")
            self._said = ui.label("The run has no checkpoint yet.").classes("said muted small")
        with ui.element("div").classes("stack") as self._stage:
            self._add_stage()
        self._stage.visible = False
        ui.keyboard(self._on_key)
        self._timer = ui.timer(0.1, self._tick, active=False)
        icons = {True: "pause", False: "play_arrow"}
        self._play.bind_icon_from(self._timer, "active", lambda plays: icons[plays])
        ui.timer(60.0, lambda: threads.io_bound(_host.close_idle))

    def offer_checkpoints(self) -> None:
        """Offer the checkpoints that are stored now, the newest first, and the one in memory."""
        names = {
            row["name"]: f"step {row['step']:,}"
            + ("" if row["score"] is None else f", score {row['score']:.4g}")
            for row in checkpoint_rows(self._run)
            if "step" in row
        }
        offered, chosen = dict(self._checkpoint.options), self._checkpoint.value
        names |= {key: offered[key] for key in {self._opened} & offered.keys() - names.keys()}
        if names and names != offered:
            chosen = chosen if chosen in names else next(iter(names))
            self._checkpoint.set_options(names, value=chosen)

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
                self._who = ui.toggle(
                    {"you": "You", "policy": "Policy", "recorded": "Recorded"}, value="you"
                )
                _tool("first_page", "to the start", partial(self._move, "go", 0))
                _tool("fast_rewind", "10 steps back", partial(self._rewind, 10))
                _tool("chevron_left", "one step back (backspace)", partial(self._rewind, 1))
                self._play = _tool("play_arrow", "play or pause (space)", self._toggle)
                _tool("chevron_right", "one step (enter)", self._step)
                self._predict = _button("Predict", partial(self._move, "predict"))
                self._predict.props('title="predict the rest from the recorded actions"')
                self._speed = ui.toggle(_SPEEDS, value=10, on_change=self._change_speed)
                self._branch = ui.toggle({}, on_change=self._change_branch)
                for toggle in (self._who, self._speed, self._branch):
                    toggle.props("dense no-caps unelevated")
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
        controls: list[dict[str, Any]] = self._about["controls"]
        self._values = [max(0.0, each["low"]) if each["choices"] else 0.0 for each in controls]
        with self._acts:
            for number, control in enumerate(controls[:_MAX_CONTROLS]):
                with ui.element("div").classes(
                    "act-choices" if control["choices"] else "act-slider"
                ):
                    if len(controls) > 1 or not control["choices"]:
                        ui.label(control["name"]).classes("muted small")
                    self._add_control(number, **control)

    def _add_control(self, number: int, name: str, low: float, high: float, choices: int) -> None:
        del name
        if not choices:
            slider = ui.slider(min=max(low, -1e6), max=min(high, 1e6), step=0.01, value=0)
            slider.props("label").on_value_change(lambda event: self._set(number, event.value))
            self._sliders.append(slider)
            return
        names = self._scene["names"] if len(self._values) == 1 else []
        buttons, keys = [], keys_of(names, choices) if not self._keys else {}
        shown = {choice: _SIGNS.get(key, key) for key, choice in keys.items()}
        for choice in range(min(choices, _MAX_CHOICES)):
            text = names[choice] if choice < len(names) else str(choice)
            with _button(text, partial(self._choose, number, choice + low)) as button:
                ui.label(shown.get(choice, "")).classes("muted small")
            buttons.append(button)
        if keys:
            self._keys, self._buttons, self._keyed, self._lowest = keys, buttons, number, low

    # --- starting --------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Load the chosen checkpoint, and start."""
        wanted = self._checkpoint.value
        if wanted in (None, self._opened):
            return
        self._pause()
        self._opened, self._said.text = wanted, "Loading the world model…"
        path = self._run.path / "ckpt" / "agent" / wanted
        about = await self._ask(lambda: _host.open(self._viewer, path, trust=self._run.trust))
        if about is None:
            self._opened = ""
            return
        self._offer(about)
        self._say(about["note"])
        if self._start_from.value is None:
            self._said.text += " The run has no replay to start from."
        else:
            await self._start()

    def _offer(self, about: dict[str, Any]) -> None:
        """Offer the episodes that are stored now."""
        self._about = about
        options = {number: title for number, title, _ in about["starts"]}
        self._start_from.set_options(options, value=next(iter(options), None))

    def _say(self, note: str) -> None:
        task, step = self._about["task"], self._about["step"]
        self._said.text = f"{task}, trained for {step:,} steps. {with_hint(note)}"

    def _choose_start(self) -> None:
        chosen = self._start_from.value
        self._observe.enabled = chosen != FRESH
        observe = {number: steps for number, _, steps in self._about["starts"]}
        self._observe.value = observe.get(chosen, 1)

    async def _start(self) -> None:
        if not self._opened:
            await self._open()
            return
        self._pause()
        ui.run_javascript("document.activeElement?.blur()")
        if (chosen := self._start_from.value) is None:
            return
        self._said.text = "The dream starts…"
        observe, seed = int(self._observe.value or 1), int(self._seed.value or 0)
        scene = await self._call("start", int(chosen), observe, seed)
        if scene is None:
            why = self._said.text
            if self._opened and (about := await self._call("describe")):  # the replay has changed
                self._offer(about)
                self._said.text = why
            return
        self._say(scene["note"])
        before, self._scene = self._scene.get("names"), scene
        if before != scene["names"] or not self._values:
            self._add_actions()
        self._show(scene, draw=True)

    # --- playing ---------------------------------------------------------------------------------

    async def _step(self) -> None:
        await self._do("step", self._who.value, self._values)

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

    async def _choose(self, number: int, value: float) -> None:
        """Choose an action; a paused dream takes one step."""
        self._set(number, value)
        self._who.value = "you"
        if not self._timer.active:
            await self._step()

    def _set(self, number: int, value: float) -> None:
        self._values[number] = float(value)
        self._mark_actions()

    def _change_speed(self) -> None:
        self._timer.interval = 1 / self._speed.value

    def _toggle(self) -> None:
        if self._timer.active or not self._scene:
            self._pause()
        else:
            self._timer.activate()

    def _pause(self) -> None:
        if self._timer.active:
            self._timer.deactivate()
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
            await self._choose(self._keyed, self._keys[key] + self._lowest)

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
        self._real_line.text = _truth_text(truth) if truth else scene["note"]
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
        allowed = self._scene.get("allowed") or [True] * len(self._buttons)
        for number, button in enumerate(self._buttons):
            chosen = number == self._values[self._keyed] - self._lowest
            marks = {"chosen": chosen, "forbidden": not allowed[number]}
            add, remove = (" ".join(m for m in marks if marks[m] == on) for on in (True, False))
            button.classes(add, remove=remove)

    def _draw(self, curves: dict[str, Any]) -> None:
        self._drawn = time.monotonic()
        x = np.asarray(curves["at"], float)
        for title, lines in curves["lines"].items():
            chart = Chart(tools=False)
            chart.options["grid"] |= {"top": 28, "bottom": 2}
            chart.options["xAxis"] |= {"min": x[0], "max": max(x[0] + 20, x[-1])}
            chart.options["legend"]["show"] = len(lines) > 1
            for name, values in lines.items():
                chart.line(name, x, np.asarray(values, float), _COLORS[name])
            draw(self._charts, title, chart.options, card(title, within=self._grid), "chart low")
        for title, shown in self._charts.items():
            shown.parent_slot.parent.visible = title in curves["lines"]  # type: ignore[union-attr]

    # --- the worker ------------------------------------------------------------------------------

    async def _call(self, method: str, *args: Any) -> dict[str, Any] | None:
        return await self._ask(lambda: _host.call(self._viewer, method, *args))

    async def _ask(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """The result of a call; on failure None, with the reason on the page."""
        async with self._lock:
            try:
                return await threads.io_bound(call)
            except DreamfleetError as error:
                self._pause()
                self._said.text = with_hint(str(error))
                if isinstance(error, DreamClosedError):  # Start opens it again
                    self._opened = ""
                return None


def _button(text: str, act: Callable[[], Any], icon: str | None = None) -> ui.button:
    button = ui.button(text, on_click=act, icon=icon, color=None)
    return button.props("flat dense no-caps").classes("plain")


def _tool(icon: str, title: str, act: Callable[[], Any]) -> ui.button:
    return _button("", act, icon).classes("tool").props(f'aria-label="{title}" title="{title}"')


def _set_frame(image: ui.element, png: bytes) -> None:
    image.visible = bool(png)
    if png:
        image.props["src"] = f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _truth_text(truth: dict[str, Any]) -> str:
    over = " · the episode is over" if truth["last"] else ""
    source = "environment" if truth["source"] == "environment" else "as recorded"
    error = truth["difference"]
    return f"{source} · reward {truth['reward']:.3g} · error of the dream {error:.3g}{over}"
