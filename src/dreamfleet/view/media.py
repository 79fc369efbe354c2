"""Videos and images of runs, as files."""

from __future__ import annotations

import re

from fastapi import HTTPException, Request, Response
from nicegui import app

from dreamfleet.view.inside import list_inside, open_inside
from dreamfleet.view.runs import Run, Runs

_KINDS = {
    "mp4": "video/mp4",
    "gif": "image/gif",
    "png": "image/png",
    "json": "application/json",
}
_NAME = re.compile(r"(\d{1,15})\.(mp4|gif|png|json)")


def add(runs: Runs) -> None:
    """Add the address of files."""

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
