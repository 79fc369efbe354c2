"""All metrics of a run with what they mean, and one of them in large."""

from __future__ import annotations

import re
from html import escape
from urllib.parse import quote

from nicegui import ui

from dreamfleet.formatting import readable
from dreamfleet.metrics.glossary import entries, explain
from dreamfleet.view.charts import curves_chart, smoothed
from dreamfleet.view.frame import (
    RunPage,
    card,
    draw,
    find_run,
    link_to,
    search_box,
    smoothing_slider,
)
from dreamfleet.view.reading import Floats, thinned
from dreamfleet.view.runs import Run, Runs

_SPARK = (150.0, 34.0)
_SPARK_POINTS = 60
_POINTS = 1200
_OTHERS = "Others"


class MetricsPage(RunPage):
    """A tile for each metric."""

    path, seconds = "metrics", 2.0

    def build(self) -> None:
        self._shown: object = None
        self._places: dict[str, ui.html] = {}
        with ui.element("div").classes("row-of"):
            self._search = search_box("search names and meanings", self.refresh)
            self._count = ui.label().classes("muted small")
        self._body = ui.element("div").classes("stack")

    def refresh(self) -> None:
        words = (self._search.value or "").lower().split()
        shown = (self._run.metrics.rows, words)
        if shown == self._shown:
            return
        self._shown = shown
        with self._run.lock:
            columns = {key: each.points for key, each in self._run.metrics.columns.items()}
            newest = dict(self._run.metrics.newest)
            texts = dict(self._run.metrics.texts)
        sections: dict[str, list[str]] = {}
        count = 0
        for key in sorted({*columns, *texts}):
            entry = explain(key)
            sentence = entry.sentence if entry else ""
            if all(word in f"{key} {sentence}".lower() for word in words):
                count += 1
                section = entry.section if entry else _OTHERS
                tile = _tile(self._run, key, sentence, columns.get(key), newest, texts)
                sections.setdefault(section, []).append(tile)
        share = self._run.metrics.share
        reading = (
            f", {share:.0%} of the file read" if share < 1 and self._run.metrics.behind else ""
        )
        self._count.text = f"{count} metrics{reading}"
        order = [*dict.fromkeys(entry.section for entry in entries()), _OTHERS]
        for title in order:
            if title not in sections and title not in self._places:
                continue
            if title not in self._places:
                with self._body, card(title):
                    self._places[title] = ui.html()
            place = self._places[title]
            place.content = f'<div class="tiles">{"".join(sections.get(title, ()))}</div>'
            place.parent_slot.parent.set_visibility(title in sections)  # type: ignore[union-attr]


def _tile(
    run: Run,
    key: str,
    sentence: str,
    points: Floats | None,
    newest: dict[str, float | None],
    texts: dict[str, str],
) -> str:
    """A metric in small. All text is escaped here, and sanitised once more in the browser."""
    if points is None or not len(points):
        value, picture = escape(texts.get(key, "")), ""
    else:
        last = newest.get(key)
        value = "not finite" if last is None else escape(readable(float(f"{last:.4g}")))
        picture = spark(points)
    link = f"{link_to('metric', run)}&key={quote(key, safe='')}"
    return (
        f'<a class="tile" href="{escape(link)}" title="{escape(sentence)}">'
        f'<span class="key">{escape(key)}</span><span class="now">{value}</span>{picture}'
        f'<span class="means">{escape(re.sub("`", "", sentence))}</span></a>'
    )


def spark(points: Floats) -> str:
    """A curve as a small picture."""
    shown = thinned(points[:, :2], _SPARK_POINTS)
    width, height = _SPARK
    x, y = shown[:, 0], shown[:, 1]
    x = (x - x.min()) / max(float(x.max() - x.min()), 1e-12) * width
    span = float(y.max() - y.min())
    y = height - 2 - (y - y.min()) / span * (height - 4) if span > 0 else y * 0 + height / 2
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" preserveAspectRatio="none" class="spark">'
        f'<polyline points="{path}"/></svg>'
    )


class MetricPage(RunPage):
    """One metric in large."""

    path, seconds = "metrics", 2.0

    def __init__(self, runs: Runs, run: Run, key: str) -> None:
        self._key = key
        super().__init__(runs, run)

    @classmethod
    def add(cls, runs: Runs) -> None:
        @ui.page("/metric")
        def page(run: str = "", key: str = "") -> None:
            if (found := find_run(runs, run)) is not None:
                cls(runs, found, key)

    def build(self) -> None:
        self._shown: object = None
        self._charts: dict[str, ui.echart] = {}
        entry = explain(self._key)
        with card(self._key, entry.section if entry else ""):
            ui.label(re.sub("`", "", entry.sentence) if entry else "").classes("muted")
            with ui.element("div").classes("row-of wishes"):
                self._smoothing = smoothing_slider(self.refresh)
                self._log = ui.switch("log", on_change=self.refresh).props("dense")
            self._place = ui.element("div")
            self._none = ui.label("This run has not logged it.").classes("muted")

    def refresh(self) -> None:
        column = self._run.metrics.columns.get(self._key)
        weight, log = float(self._smoothing.value), bool(self._log.value)
        shown = (column.rows if column else 0, weight, log)
        self._none.set_visibility(column is None)
        if column is None or shown == self._shown:
            return
        self._shown = shown
        with self._run.lock:
            points = thinned(column.points, _POINTS).copy()
        points[:, 1] = smoothed(points[:, 1], weight)
        options = curves_chart([(self._key, points)], log=log)
        draw(self._charts, self._key, options, self._place, "chart tall")
