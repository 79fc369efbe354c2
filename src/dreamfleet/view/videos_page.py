"""Videos of a run: episodes, evaluations and predictions, over training time."""

from __future__ import annotations

import re

from fastapi import HTTPException
from fastapi.responses import FileResponse
from nicegui import app, ui

from dreamfleet.view.actions import VIDEO_FOLDER
from dreamfleet.view.frame import RunPage, card, link_to
from dreamfleet.view.reading import list_inside, open_inside
from dreamfleet.view.runs import Run, Runs

_MEANINGS = {
    "openloop": "truth, prediction and error; green frames were observed, red ones predicted",
    "episode-video": "an episode of training",
    "evaluation": "the first episode of an evaluation",
    VIDEO_FOLDER: "an episode recorded on demand",
}
_NAME = re.compile(r"(\d{1,15})\.(mp4|gif|png)")
_TYPES = {"mp4": "video/mp4", "gif": "image/gif", "png": "image/png"}


class VideosPage(RunPage):
    """A player for each kind of video."""

    path = "videos"

    def build(self) -> None:
        self._players: dict[str, _Player] = {}
        with card("Videos") as self._none:
            ui.label(
                "There are none yet. Evaluations record one; image tasks record episodes and "
                "predictions while they train."
            ).classes("muted")
        self._grid = ui.element("div").classes("grid")

    def refresh(self) -> None:
        for kind in list_inside(self._run.path, "media"):
            names = list_inside(self._run.path, "media", kind)
            if files := sorted((int(m[1]), name) for name in names if (m := _NAME.fullmatch(name))):
                if kind not in self._players:
                    with self._grid:
                        self._players[kind] = _Player(self._run, kind)
                self._players[kind].show(files)
        self._none.set_visibility(not self._players)


class _Player:
    """Videos of one kind, with a slider over training time that follows the newest one until a
    viewer moves it."""

    def __init__(self, run: Run, kind: str) -> None:
        self._run, self._kind = run, kind
        self._files: list[tuple[int, str]] = []
        self._shown = ""
        with card(kind, next((text for part, text in _MEANINGS.items() if part in kind), "")):
            self._place = ui.element("div").classes("player")
            self._step = ui.label().classes("small muted")
            self._slider = ui.slider(min=0, max=0, step=1, value=0)
            self._slider.props('dense snap markers aria-label="training time"')
            self._slider.on_value_change(self._play)

    def show(self, files: list[tuple[int, str]]) -> None:
        """Show the current files."""
        follows = self._slider.value >= len(self._files) - 1
        self._files = files
        self._slider.props["max"] = len(files) - 1
        self._slider.set_visibility(len(files) > 1)
        if follows:
            self._slider.value = len(files) - 1
        self._play()

    def _play(self) -> None:
        index = min(int(self._slider.value), len(self._files) - 1)
        step, name = self._files[index]
        self._step.text = f"step {step:,} · {index + 1} of {len(self._files)}"
        if name == self._shown:
            return
        self._shown = name
        self._place.clear()
        link = link_to("media", self._run, kind=self._kind, name=name)
        with self._place:
            if name.endswith(".mp4"):
                ui.video(link, autoplay=True, muted=True, loop=True)
            else:
                ui.element("img").props["src"] = link


def add_media(runs: Runs) -> None:
    """Add the address of videos and images."""

    @app.get("/media")
    def media(run: str, kind: str, name: str) -> FileResponse:
        found, match = runs.find(run), _NAME.fullmatch(name)
        if found is None or match is None:
            raise HTTPException(404)
        try:
            with open_inside(found.path, "media", kind, name):  # neither a link nor outside
                path = found.path / "media" / kind / name
        except OSError:
            raise HTTPException(404) from None
        headers = {"cache-control": "private, max-age=3600"}
        return FileResponse(path, media_type=_TYPES[match[2]], headers=headers)
