"""Play what a world model dreams, with the real environment beside it."""

from __future__ import annotations

import asyncio
import base64
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from nicegui import app, run, ui
from nicegui.events import KeyEventArguments

from dreamfleet.checkpoint import Checkpoint, CheckpointError, describe
from dreamfleet.dream.host import CLOSED, DreamHost
from dreamfleet.errors import DreamfleetError
from dreamfleet.plotting import COLORS
from dreamfleet.view import charts
from dreamfleet.view.frame import card, find_run, frame, with_hint
from dreamfleet.view.runs import Run, Runs

_FRESH = -1
_MOST_CONTROLS = 32
_DRAW_SECONDS = 0.2
"""Between two drawings of the curves while the dream plays; frames are all shown."""
_RENEW_SECONDS = 5.0
_LETTERS = "123456789qwertyuiopasdfghjklzxcvbnm"
_ARROWS = {
    "ArrowLeft": ("left", "west"),
    "ArrowRight": ("right", "east"),
    "ArrowUp": ("up", "forward", "north"),
    "ArrowDown": ("down", "back", "south", "stay", "noop", "rest"),
}
_SIGNS = {"ArrowLeft": "←", "ArrowRight": "→", "ArrowUp": "↑", "ArrowDown": "↓"}
_TO_THE_GAME = "document.activeElement?.blur()"
"""What was chosen is done with: the keys are for the game now."""
# The page would scroll.
_KEEP_STILL = """<script>addEventListener("keydown", e => {
  if ([" ", "ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Backspace"].includes(e.key) &&
      e.target === document.body) e.preventDefault();
});</script>"""


def add(runs: Runs) -> None:
    """Add the page."""
    host = DreamHost()
    app.on_shutdown(host.stop)

    @ui.page("/dream")
    def page(run: str = "") -> None:
        found = find_run(runs, run)
        if found is not None:
            _Page(runs, found, host)


def checkpoints(run: Run) -> dict[str, str]:
    """The checkpoints of a run, the newest first, with what a person calls them."""
    found = {}
    for path in Checkpoint(run.path / "ckpt" / "agent").all():
        with suppress(CheckpointError):
            about = describe(path)
            score = "" if about.score is None else f", score {about.score:.4g}"
            found[path.name] = f"step {about.step:,}{score}"
    return found


def keys_of(names: Sequence[str], count: int) -> dict[str, int]:
    """Which key stands for which choice of a discrete action."""
    keys = {letter: choice for choice, letter in zip(range(count), _LETTERS, strict=False)}
    parts = [re.split(r"\W|_", name) for name in names]
    for arrow, words in _ARROWS.items():
        # By the first of the words that is there; left before turn_left.
        fits = [
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
    """What a dream starts from at first: a fresh episode, of which all is left to play, or else the
    newest stored one that is complete."""
    if about["real"]:
        return _FRESH
    episodes: list[dict[str, Any]] = about["episodes"]
    whole = (n for n, each in enumerate(episodes) if each["begins"] and each["ends"])
    return next(whole, 0 if episodes else None)


def steps_to_observe(length: int) -> int:
    """Of a stored episode: enough to know what moves, and most of it is left to play."""
    return max(1, min(5, length // 4))


class _Page:
    """One viewer's page, with a dream of its own."""

    def __init__(self, runs: Runs, found: Run, host: DreamHost) -> None:
        self._run, self._host = found, host
        self._name = uuid.uuid4().hex
        self._about: dict[str, Any] = {}
        self._scene: dict[str, Any] = {}
        self._opened = ""
        self._action: dict[str, list[float]] = {}
        self._keys: dict[str, int] = {}
        self._buttons: list[ui.element] = []
        self._sliders: list[ui.slider] = []
        self._lock = asyncio.Lock()
        self._drawn = 0.0
        runs.attend("live", found.name)
        ui.context.client.on_delete(self._leave)
        ui.add_body_html(_KEEP_STILL)
        with frame(runs, found, "dream"):
            names = checkpoints(found)
            if not names:
                with card("Play the dream"):
                    ui.label("The run has saved no checkpoint yet.").classes("muted")
                return
            self._build_start(names)
            self._build_stage()
            self._build_curves()
        ui.keyboard(self._on_key)
        self._timer = ui.timer(0.1, self._tick, active=False)

    # --- what is on the page ---------------------------------------------------------------------

    def _build_start(self, names: dict[str, str]) -> None:
        with card("Play the dream", "what the world model imagines, one action at a time"):
            with ui.element("div").classes("row-of"):
                first = next(iter(names))
                self._checkpoint = ui.select(
                    names, label="checkpoint", value=first, on_change=self._open
                )
                self._checkpoint.props("outlined dense options-dense").classes("medium")
                self._episode = ui.select({}, label="start from", on_change=self._choose_start)
                self._episode.props("outlined dense options-dense").classes("medium")
                self._observe = ui.number("steps to observe", value=1, min=1, precision=0)
                self._seed = ui.number("seed", value=0, min=0, precision=0)
                for field in (self._observe, self._seed):
                    field.props("outlined dense").classes("narrow")
                with _button(self._start).classes("chosen"):
                    ui.label("Start")
            self._said = ui.label("The world model is loaded…").classes("muted small")
        ui.timer(0, self._open, once=True)
        ui.timer(_RENEW_SECONDS, self._renew, immediate=False)

    def _build_stage(self) -> None:
        with ui.element("div").classes("stage"):
            with card("Dream") as self._dream_box:
                self._frame = ui.element("img").classes("screen").props('alt="imagined frame"')
                self._line = ui.label().classes("small")
            with card("Reality") as self._real_box:
                self._real = ui.element("img").classes("screen").props('alt="real frame"')
                self._real_line = ui.label().classes("small")
        with card() as self._controls:
            with ui.element("div").classes("row-of"):
                self._who = _Choice({"you": "You", "policy": "Policy", "recorded": "Recorded"})
                _tool("first_page", "to the start", self._reset)
                _tool("fast_rewind", "10 steps back", lambda: self._rewind(10))
                _tool("chevron_left", "one step back (backspace)", lambda: self._rewind(1))
                self._play = _tool("play_arrow", "play or pause (space)", self._toggle)
                _tool("chevron_right", "one step (enter)", self._step)
                self._speed = ui.select(
                    {2: "2 /s", 5: "5 /s", 10: "10 /s", 20: "20 /s", 60: "fastest"},
                    value=10,
                    on_change=self._change_speed,
                ).props("outlined dense options-dense")
                self._branch = _Choice({}, self._change_branch)
            self._place = ui.slider(min=0, max=1, value=0).props("label")
            self._place.on("change", self._seek)
            self._acts = ui.element("div").classes("play-acts")
            self._hint = ui.label().classes("muted small")
        for each in (self._dream_box, self._real_box, self._controls):
            each.visible = False

    def _build_curves(self) -> None:
        with ui.element("div").classes("grid small-charts") as self._curves:
            self._charts = {
                name: self._chart(title)
                for name, title in (
                    ("reward", "Reward"),
                    ("continuation", "Continuation"),
                    ("value", "Value"),
                    ("difference", "How far the dream is off"),
                )
            }
        with ui.element("div").classes("grid small-charts") as self._numbers:
            pass
        self._number_charts: list[ui.echart] = []
        self._curves.visible = self._numbers.visible = False

    def _chart(self, title: str) -> ui.echart:
        with card(title):
            options = charts.base(tools=False)
            options["grid"] |= {"top": 28, "bottom": 2}
            return ui.echart(options).classes("chart low")

    def _build_actions(self) -> None:
        """Buttons and sliders for the actions that the task has."""
        self._acts.clear()
        self._buttons, self._sliders, self._keys = [], [], {}
        names: list[str] = self._scene["names"]
        spaces: list[dict[str, Any]] = self._about["actions"]
        single = len(spaces) == 1 and spaces[0]["discrete"] and not spaces[0]["shape"]
        self._action = {
            each["name"]: [max(0.0, low) if each["discrete"] else 0.0 for low in each["low"]]
            for each in spaces
        }
        with self._acts:
            for space in spaces:
                for index in range(min(space["size"], _MOST_CONTROLS)):
                    self._build_action(space, index, names if single else [])
        arrows = "arrow keys or the keys on the buttons" if self._keys else "arrow keys"
        self._hint.text = (
            f"Keys: {arrows} to act, space to play, enter for one step, backspace to go back."
        )

    def _build_action(self, space: dict[str, Any], index: int, names: Sequence[str]) -> None:
        key = space["name"]
        label = key if space["size"] == 1 else f"{key} {index}"
        low = space["low"][index]
        if not space["discrete"]:
            with ui.element("div").classes("act-slider"):
                ui.label(label).classes("muted small")
                high = space["high"][index]
                slider = ui.slider(min=max(low, -1e6), max=min(high, 1e6), step=0.01, value=0)
                slider.props("label").on_value_change(
                    lambda event: self._set(key, index, float(event.value))
                )
                self._sliders.append(slider)
            return
        count = space["choices"][index]
        keys = keys_of(names, count)
        shown = {choice: name for name, choice in keys.items()}
        if not self._keys:
            self._keys = keys
        with ui.element("div").classes("act-choices"):
            if len(self._action) > 1 or space["size"] > 1:
                ui.label(label).classes("muted small")
            for choice in range(min(count, 64)):
                name = names[choice] if choice < len(names) else str(choice)
                sign = _SIGNS.get(shown.get(choice, ""), shown.get(choice, ""))
                sign = sign if keys is self._keys else ""
                with _button(partial(self._choose, key, index, choice + low)) as button:
                    ui.label(name)
                    ui.label(sign).classes("muted small")
                if keys is self._keys:
                    self._buttons.append(button)

    # --- what a person does ----------------------------------------------------------------------

    async def _open(self) -> None:
        """Load the chosen checkpoint."""
        wanted = str(self._checkpoint.value)
        if wanted == self._opened:
            return
        if wanted not in checkpoints(self._run):  # the run has removed it meanwhile
            self._renew()
            return
        self._pause()
        self._opened = wanted
        self._said.text = "The world model is loaded…"
        path = self._run.path / "ckpt" / "agent" / wanted
        about = await self._ask(lambda: self._reopen(path))
        if about is None:
            self._opened = ""
            return
        self._offer(about)
        self._say(about["note"])
        if self._episode.value is None:
            self._said.text += " There is nothing to start from: the run has no replay."
        else:
            await self._start()

    def _offer(self, about: dict[str, Any]) -> None:
        """Let a person choose from the episodes that there are now."""
        self._about = about
        options = {number: _episode_text(each) for number, each in enumerate(about["episodes"])}
        if about["real"]:
            options = {_FRESH: "a fresh episode", **options}
        self._episode.set_options(options, value=first_start(about))

    def _renew(self) -> None:
        """Offer the checkpoints that there are now; one that is played can be played on."""
        if self._opened and not self._lock.locked() and not self._host.holds(self._name):
            self._pause()
            self._opened, self._said.text = "", CLOSED
        names = checkpoints(self._run)
        offered: dict[str, str] = dict(self._checkpoint.options)
        if self._opened in offered:
            names.setdefault(self._opened, offered[self._opened])
        if names and names != offered:
            chosen = self._checkpoint.value
            value = chosen if chosen in names else next(iter(names))
            self._checkpoint.set_options(names, value=value)

    def _say(self, note: str) -> None:
        """What is dreamed of, and what a person should know about it."""
        about = self._about
        said = f"{about['task']}, trained for {about['step']:,} steps. {with_hint(note)}"
        self._said.text = said

    def _reopen(self, path: Path) -> dict[str, Any]:
        self._host.close(self._name)
        return self._host.open(self._name, path, trust=self._run.trust)

    def _choose_start(self) -> None:
        chosen = self._episode.value
        self._observe.enabled = chosen != _FRESH
        if chosen is not None and chosen != _FRESH:
            length = self._about["episodes"][chosen]["length"]
            self._observe.value = steps_to_observe(length)

    async def _start(self) -> None:
        if not self._opened:  # it was idle for too long
            await self._open()
            return
        self._pause()
        ui.run_javascript(_TO_THE_GAME)
        chosen = self._episode.value
        if chosen is None:
            return
        length = self._about["episodes"][chosen]["length"] if chosen >= 0 else 1
        observe = min(max(int(self._observe.value or 1), 1), length)
        self._said.text = "The dream starts…"
        episode = None if chosen == _FRESH else int(chosen)
        before = self._scene.get("names")
        scene = await self._call("start", episode, observe, int(self._seed.value or 0))
        if scene is None:
            why = self._said.text
            if about := await self._call("describe"):  # a run that trains has others meanwhile
                self._offer(about)
                self._said.text = why
            return
        self._say(scene["note"])
        self._scene = scene
        if before != scene["names"] or not self._action:
            self._build_actions()
        self._show(scene, whole=True)

    async def _step(self) -> None:
        await self._do("step", self._who.value, self._action)

    async def _choose(self, key: str, index: int, value: float) -> None:
        """Choose one of the choices; a paused dream goes one step."""
        self._set(key, index, value)
        self._who.value = "you"
        if not self._timer.active:
            await self._step()

    def _set(self, key: str, index: int, value: float) -> None:
        self._action[key] = [
            value if n == index else each for n, each in enumerate(self._action[key])
        ]
        self._mark()

    async def _rewind(self, steps: int) -> None:
        self._pause()
        await self._do("go", max(0, self._scene.get("number", 0) - steps))

    async def _reset(self) -> None:
        self._pause()
        await self._do("reset")

    async def _seek(self) -> None:
        self._pause()
        await self._do("go", int(self._place.value or 0))

    async def _change_branch(self) -> None:
        self._pause()
        await self._do("go", 1 << 30, int(self._branch.value))

    async def _do(self, method: str, *args: Any) -> None:
        if self._scene and (scene := await self._call(method, *args)) is not None:
            self._show(scene, whole=method != "step" or not self._timer.active)

    def _change_speed(self) -> None:
        ui.run_javascript(_TO_THE_GAME)
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
            if self._scene:
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
        """An arrow moves a slider to its end, and lets it go: left and right the first one, up and
        down the second one."""
        upright = key in ("ArrowUp", "ArrowDown")
        slider = self._sliders[min(int(upright), len(self._sliders) - 1)]
        ends = (slider._props["max"], slider._props["min"])
        slider.value = ends[key in ("ArrowLeft", "ArrowDown")] if pressed else 0.0
        self._who.value = "you"
        if pressed and not self._timer.active:
            await self._step()

    # --- what is shown ---------------------------------------------------------------------------

    def _show(self, scene: dict[str, Any], *, whole: bool) -> None:
        """A moment; the curves not every time, unless it is asked for."""
        self._scene = scene
        truth = scene["truth"]
        for box in (self._dream_box, self._controls, self._curves):
            box.visible = True
        self._real_box.visible = True
        _set_frame(self._frame, scene["frame"])
        _set_frame(self._real, truth["frame"] if truth else b"")
        now = time.monotonic()
        self._line.text = (
            f"step {scene['number']} · reward {scene['reward']:.3g} · goes on "
            f"{scene['continuation']:.0%} · value {scene['value']:.4g}"
            f"{' · the dream is over' if scene['over'] else ''}"
            f"{'' if scene['frame'] else ' · its numbers are drawn below'}"
        )
        self._real_line.text = _truth_text(truth, scene["note"])
        self._place.props(f"max={max(scene['length'], 1)}")
        self._place.value = scene["number"]
        branches = {n: f"branch {n + 1}" for n in range(scene["branches"])}
        self._branch.show(branches if len(branches) > 1 else {}, scene["branch"])
        self._mark()
        if whole or now - self._drawn > _DRAW_SECONDS:
            self._drawn = now
            self._draw(scene["curves"])

    def _mark(self) -> None:
        """Show which choice is chosen, and which ones the world model believes are forbidden."""
        if not self._buttons:
            return
        space = next(each for each in self._about["actions"] if each["discrete"])
        chosen = int(self._action[space["name"]][0] - space["low"][0])
        allowed = self._scene.get("allowed") or [True] * len(self._buttons)
        for number, button in enumerate(self._buttons):
            _mark(button, "chosen", number == chosen)
            _mark(button, "forbidden", not allowed[number])

    def _draw(self, curves: dict[str, Any]) -> None:
        at = np.asarray(curves["number"], float)
        known = bool(np.isfinite(curves["difference"]).any())
        for name, chart in self._charts.items():
            lines = [charts.line("dream", at, np.asarray(curves[name], float), COLORS[0])]
            if name == "reward" and known:
                true = np.asarray(curves["true_reward"], float)
                lines.append(charts.line("reality", at, true, COLORS[2]))
            _set_lines(chart, at, lines)
        self._charts["difference"].parent_slot.parent.visible = known  # type: ignore[union-attr]
        names: list[str] = self._scene["numbers"]
        if len(names) != len(self._number_charts):
            self._numbers.clear()
            with self._numbers:
                self._number_charts = [self._chart(name) for name in names]
            self._numbers.visible = bool(names)
        for number, chart in enumerate(self._number_charts):
            series = [("dream", curves["numbers"], COLORS[0])]
            series += [("reality", curves["true_numbers"], COLORS[2])] if known else []
            lines = [
                charts.line(name, at, np.asarray(values[:, number], float), color)
                for name, values, color in series
            ]
            _set_lines(chart, at, lines)

    # --- the process that computes ---------------------------------------------------------------

    async def _call(self, method: str, *args: Any) -> dict[str, Any] | None:
        return await self._ask(lambda: self._host.call(self._name, method, *args))

    async def _ask(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """What a call returns; None, and the reason on the page, if it fails."""
        async with self._lock:
            try:
                return await run.io_bound(call)
            except DreamfleetError as error:
                self._pause()
                self._said.text = with_hint(str(error))
                return None

    async def _leave(self) -> None:
        """The page is closed: its dream is forgotten."""
        await run.io_bound(self._host.close, self._name)


class _Choice:
    """Buttons of which one is chosen."""

    def __init__(self, options: dict[Any, str], act: Callable[[], Any] | None = None) -> None:
        self._act = act
        self._buttons: dict[Any, ui.element] = {}
        self._row = ui.element("div").classes("act-choices")
        self._value: Any = None
        self.show(options, next(iter(options), None))

    @property
    def value(self) -> Any:
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._value = value
        for option, button in self._buttons.items():
            _mark(button, "chosen", option == value)

    def show(self, options: dict[Any, str], value: Any) -> None:
        """Other options, if they are others."""
        if list(options) != list(self._buttons):
            self._row.clear()
            self._buttons = {}
            with self._row:
                for option, text in options.items():
                    with _button(partial(self._choose, option)) as button:
                        ui.label(text)
                    self._buttons[option] = button
        self.value = value

    async def _choose(self, option: Any) -> None:
        self.value = option
        if self._act is not None:
            await self._act()


def _button(act: Callable[[], Any]) -> ui.element:
    """A button that takes no focus when it is clicked: keys stay with the game."""
    button = ui.element("button").classes("plain").props("type=button")
    button.on("mousedown", js_handler="e => e.preventDefault()")
    return button.on("click", act, args=[])


def _tool(icon: str, title: str, act: Callable[[], Any]) -> ui.icon:
    with _button(act).classes("tool").props(f'aria-label="{title}" title="{title}"'):
        return ui.icon(icon)


def _mark(element: ui.element, name: str, on: bool) -> None:
    element.classes(add=name if on else "", remove="" if on else name)


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
    off = truth["difference"]
    return f"{source} · reward {truth['reward']:.3g} · the dream is off by {off:.3g}{over}"


def _set_frame(image: ui.element, png: bytes) -> None:
    image.visible = bool(png)
    if png:
        image._props["src"] = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        image.update()


def _set_lines(chart: ui.echart, at: Any, lines: list[dict[str, Any]]) -> None:
    first, last = float(at[0]), float(at[-1])
    chart.options["xAxis"] |= {"min": first, "max": max(first + 20, last)}
    chart.options["series"] = lines
    chart.options["legend"]["data"] = [each["name"] for each in lines] if len(lines) > 1 else []
    chart.update()
