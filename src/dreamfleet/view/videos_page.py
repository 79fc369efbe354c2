"""Videos of a run: episodes, evaluations and predictions, over training time."""

from __future__ import annotations

import re
from collections.abc import Callable

from fastapi import HTTPException
from fastapi.responses import FileResponse
from nicegui import app, ui

from dreamfleet.view.actions import VIDEO_FOLDER
from dreamfleet.view.frame import Refresh, card, link_to
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
_Files = list[tuple[int, str]]
"""Steps and names."""


def build_videos(run: Run) -> Refresh:
    """A player for each kind of video."""
    players: dict[str, Callable[[_Files], None]] = {}
    with card("Videos") as none:
        ui.label(
            "There are none yet. Evaluations record one; image tasks record episodes and "
            "predictions while they train."
        ).classes("muted")
    grid = ui.element("div").classes("grid")

    def refresh() -> None:
        for kind in list_inside(run.path, "media"):
            names = list_inside(run.path, "media", kind)
            if files := sorted((int(m[1]), name) for name in names if (m := _NAME.fullmatch(name))):
                if kind not in players:
                    with grid:
                        players[kind] = _add_player(run, kind)
                players[kind](files)
        none.set_visibility(not players)

    return refresh


def _add_player(run: Run, kind: str) -> Callable[[_Files], None]:
    """A player with a slider over training time, which follows the newest video until a viewer
    moves it. Returns what shows files."""
    shown: _Files = []
    playing = ""
    with card(kind, next((text for part, text in _MEANINGS.items() if part in kind), "")):
        place = ui.element("div").classes("player")
        about = ui.label().classes("small muted")
        slider = ui.slider(min=0, max=0, step=1, value=0)
        slider.props('dense snap markers aria-label="training time"')

    def play() -> None:
        nonlocal playing
        index = min(int(slider.value), len(shown) - 1)
        step, name = shown[index]
        about.text = f"step {step:,} · {index + 1} of {len(shown)}"
        if name == playing:
            return
        playing = name
        link = link_to("media", run, kind=kind, name=name)
        place.clear()
        with place:
            if name.endswith(".mp4"):
                ui.video(link, autoplay=True, muted=True, loop=True)
            else:
                ui.element("img").props["src"] = link

    def show(files: _Files) -> None:
        follows = slider.value >= len(shown) - 1
        shown[:] = files
        slider.props["max"] = len(files) - 1
        slider.set_visibility(len(files) > 1)
        if follows:
            slider.value = len(files) - 1
        play()

    slider.on_value_change(play)
    return show


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
