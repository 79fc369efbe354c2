"""What each metric means: the page `docs/metrics.md`, which the wheel holds as well."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

_PLACES = (Path(__file__).with_name("glossary.md"), Path(__file__).parents[3] / "docs/metrics.md")
"""In the wheel, and in a checkout."""


class Entry(NamedTuple):
    """A row of the page."""

    section: str
    pattern: re.Pattern[str]
    sentence: str


@cache
def entries() -> tuple[Entry, ...]:
    """All entries, in order; nothing if the page is missing."""
    path = next((place for place in _PLACES if place.is_file()), None)
    if path is None:
        return ()
    found = []
    for section in path.read_text().split("\n## ")[1:]:
        title = section.partition("\n")[0]
        for name, sentence in re.findall(r"^- `([^`]+)`: (.*)$", section, re.MULTILINE):
            pattern = re.sub(r"[A-Z]+", ".+", re.escape(name))
            if title == "The agent":
                pattern = f"(train|report|eval)/{pattern}"
            elif title == "The replay":
                pattern = f"(eval_)?{pattern}"
            found.append(Entry(title, re.compile(pattern), sentence))
    return tuple(found)


@lru_cache(4096)
def explain(key: str) -> Entry | None:
    """The entry about a metric; None for one that a user's agent or environment logs."""
    # An entry that names the metric exactly says more than one that stands for many.
    fitting = [entry for entry in entries() if entry.pattern.fullmatch(key)]
    return min(fitting, key=lambda entry: entry.pattern.pattern.count(".+"), default=None)
