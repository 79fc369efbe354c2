"""Videos of a run: episodes, evaluations and predictions, over training time."""

from __future__ import annotations

from urllib.parse import quote

from nicegui import ui

from dreamfleet.view.frame import card, find_run, frame, keep_fresh, link_to
from dreamfleet.view.media import videos
from dreamfleet.view.runs import Run, Runs

_REFRESH_SECONDS = 3.0
_MEANING = (
    ("openloop", "truth, prediction and error; green frames were observed, red ones predicted"),
    ("episode-video", "an episode of training"),
    ("evaluation", "the first episode of an evaluation"),
    ("on-demand", "an episode that was asked for"),
)


def add(runs: Runs) -> None:
    """Add the page."""

    @ui.page("/look")
    def page(run: str = "") -> None:
        found = find_run(runs, run)
        if found is not None:
            _Look(runs, found)


class _Look:
    def __init__(self, runs: Runs, run: Run) -> None:
        self._runs, self._run = runs, run
        self._players: dict[str, _Player] = {}
        runs.attend(run.name)
        with frame(runs, run, "look"):
            self._none = ui.label(
                "There are no videos yet. Evaluations leave one at their end; image tasks leave "
                "episodes and predictions while they train."
            ).classes("muted")
            self._grid = ui.element("div").classes("grid")
        keep_fresh(self.refresh, _REFRESH_SECONDS)

    def refresh(self) -> None:
        """Show what has changed."""
        self._runs.attend(self._run.name)
        found = videos(self._run)
        self._none.set_visibility(not found)
        for key, files in found.items():
            if key not in self._players:
                with self._grid:
                    self._players[key] = _Player(self._run, key)
            self._players[key].show(files)


class _Player:
    """The files of one key, with a slider over training time that stays at the newest one until a
    person moves it."""

    def __init__(self, run: Run, key: str) -> None:
        self._run, self._key = run, key
        self._files: list[tuple[int, str]] = []
        self._following = True
        self._at = ""
        note = next((words for start, words in _MEANING if start in key), "")
        with card(key, note):
            self._place = ui.element("div").classes("player")
            self._step = ui.label().classes("small muted")
            self._slider = ui.slider(min=0, max=0, step=1, value=0)
            self._slider.props('dense snap markers aria-label="training time"')
            self._slider.on("update:model-value", self._moved)

    def show(self, files: list[tuple[int, str]]) -> None:
        """Take in the files that there are now."""
        if files == self._files:
            return
        self._files = files
        last = len(files) - 1
        self._slider.props["max"] = last
        self._slider.set_visibility(last > 0)
        if self._following:
            self._slider.value = last
        self._play(int(self._slider.value))

    def _moved(self) -> None:
        index = int(self._slider.value)
        self._following = index >= len(self._files) - 1
        self._play(index)

    def _play(self, index: int) -> None:
        step, name = self._files[min(index, len(self._files) - 1)]
        if name == self._at:
            return
        self._at = name
        self._step.text = f"step {step:,} · {index + 1} of {len(self._files)}"
        link = f"{link_to('media', self._run)}&key={quote(self._key, safe='')}&name={quote(name)}"
        self._place.clear()
        with self._place:
            if name.endswith(".mp4"):
                ui.video(link, autoplay=True, muted=True, loop=True)
            else:
                ui.element("img").props["src"] = link
