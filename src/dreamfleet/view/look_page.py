"""Videos of a run: episodes, evaluations and predictions, over training time."""

from __future__ import annotations

import re
from urllib.parse import quote

import msgspec
import numpy as np
from fastapi import HTTPException, Request, Response
from nicegui import app, ui

from dreamfleet.view.acts import ASKED, PREDICTIONS, add_jobs, start_prediction
from dreamfleet.view.charts import prediction_chart
from dreamfleet.view.frame import RunPage, card, link_to
from dreamfleet.view.predict import Prediction
from dreamfleet.view.reading import list_inside, open_inside
from dreamfleet.view.runs import Run, Runs

_MOST_BYTES = 1 << 20
_MEANING = (
    ("openloop", "truth, prediction and error; green frames were observed, red ones predicted"),
    ("episode-video", "an episode of training"),
    ("evaluation", "the first episode of an evaluation"),
    (ASKED, "an episode that was asked for"),
    (
        PREDICTIONS,
        "an episode of the replay: grey what happened, blue what was predicted from the "
        "actions alone, after the line",
    ),
)


class LookPage(RunPage):
    """A player for each kind of video, and predictions as curves."""

    path, seconds = "look", 3.0

    def build(self) -> None:
        self._players: dict[str, _Player] = {}
        with card("Look", "videos, and what the world model predicts of numbers"):
            self._predict = ui.button("Predict an episode", on_click=self._start)
            self._predict.props("outline dense no-caps").classes("act")
            add_jobs(self._run)
        self._none = ui.label(
            "There are no videos yet. Evaluations leave one at their end; image tasks leave "
            "episodes and predictions while they train."
        ).classes("muted")
        self._grid = ui.element("div").classes("grid")

    def refresh(self) -> None:
        found = videos(self._run)
        self._none.set_visibility(not found)
        for key, files in found.items():
            if key not in self._players:
                make = _Curves if key == PREDICTIONS else _Player
                with self._grid:
                    self._players[key] = make(self._run, key)
            self._players[key].show(files)

    def _start(self) -> None:
        ui.notify(start_prediction(self._run) or "A stored episode is predicted.")


class _Player:
    """The files of one key, with a slider over training time that stays at the newest one until a
    person moves it."""

    def __init__(self, run: Run, key: str) -> None:
        self._run, self._key = run, key
        self._files: list[tuple[int, str]] = []
        self._following = True
        self._at = ""
        note = next((words for start, words in _MEANING if start in key), "")
        with card(key, note) as box:
            self._place = ui.element("div").classes("player")
            box.classes("wide" if key == PREDICTIONS else "")
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
        self._place.clear()
        with self._place:
            self._put(name)

    def _put(self, name: str) -> None:
        """Show a file."""
        link = f"{link_to('media', self._run)}&key={quote(self._key, safe='')}&name={quote(name)}"
        if name.endswith(".mp4"):
            ui.video(link, autoplay=True, muted=True, loop=True)
        else:
            ui.element("img").props["src"] = link


class _Curves(_Player):
    """Predictions of numbers: truth and prediction of each value as curves."""

    def _put(self, name: str) -> None:
        try:
            with open_inside(self._run.path, "media", self._key, name) as file:
                found = msgspec.json.decode(file.read(_MOST_BYTES), type=Prediction)
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            ui.label(f"{name} cannot be read: {error}").classes("muted")
            return
        with ui.element("div").classes("grid small-charts"):
            for key, rows in found.truth.items():
                truth, predicted = np.array(rows), np.array(found.predicted.get(key, []))
                for value in range(truth.shape[1] if truth.ndim == 2 else 0):
                    if predicted.ndim == 2 and value < predicted.shape[1]:
                        options = prediction_chart(
                            f"{key} {value}", truth[:, value], predicted[:, value], found.observed
                        )
                        ui.echart(options).classes("chart low")


_KINDS = {
    "mp4": "video/mp4",
    "gif": "image/gif",
    "png": "image/png",
    "json": "application/json",
}
_NAME = re.compile(r"(\d{1,15})\.(mp4|gif|png|json)")


def add_media(runs: Runs) -> None:
    """Add the address of videos and images."""

    @app.get("/media")
    def file(request: Request, run: str, key: str, name: str) -> Response:
        found = runs.find(run)
        match = _NAME.fullmatch(name)
        if found is None or match is None:
            raise HTTPException(404)
        try:
            with open_inside(found.path, "media", key, name) as opened:
                content = opened.read()
        except OSError:
            raise HTTPException(404) from None
        return _part(request, content, _KINDS[match[2]])


def _part(request: Request, content: bytes, kind: str) -> Response:
    """The content, or the part of it that a player asks for."""
    headers = {"accept-ranges": "bytes", "cache-control": "private, max-age=3600"}
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
    if asked is None or int(asked[1]) >= len(content):
        return Response(content, media_type=kind, headers=headers)
    start = int(asked[1])
    end = min(int(asked[2]) if asked[2] else len(content) - 1, len(content) - 1)
    headers["content-range"] = f"bytes {start}-{end}/{len(content)}"
    return Response(content[start : end + 1], 206, media_type=kind, headers=headers)


def videos(run: Run) -> dict[str, list[tuple[int, str]]]:
    """Steps and names of the files of each key, in order."""
    found = {}
    for folder in list_inside(run.path, "media"):
        names = [entry.name for entry in list_inside(run.path, "media", folder.name)]
        files = [(int(match[1]), name) for name in names if (match := _NAME.fullmatch(name))]
        if files:
            found[folder.name] = sorted(files)
    return found
