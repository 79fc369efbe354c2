"""The server of pages: as a process beside a run, and its files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from nicegui import app
from view_parts import made_up_run

from dreamfleet.cli.commands import page_beside
from dreamfleet.view.runs import Runs
from dreamfleet.view.videos_page import add_media


def test_the_page_beside_a_run_ends_with_it_and_without_a_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with page_beside(made_up_run(tmp_path / "a")):
        assert "Page: http://127.0.0.1:" in capfd.readouterr().out
    assert capfd.readouterr().err == ""


def test_a_browser_gets_parts_of_videos_and_nothing_through_a_link(tmp_path: Path) -> None:
    folder = made_up_run(tmp_path / "a") / "media" / "evaluation"
    folder.mkdir(parents=True)
    (folder / "000000000007.mp4").write_bytes(b"0123456789")
    (folder / "000000000008.mp4").symlink_to("/etc/passwd")

    async def ask(name: str, **headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            query = {"run": "a", "kind": "evaluation", "name": name}
            return await client.get("/media", params=query, headers=headers)

    add_media(Runs(tmp_path))
    part = asyncio.run(ask("000000000007.mp4", range="bytes=2-4"))
    assert (part.status_code, part.content) == (206, b"234")
    assert part.headers["content-type"] == "video/mp4"
    assert asyncio.run(ask("000000000007.mp4")).content == b"0123456789"
    for name in ("000000000008.mp4", "000000000009.mp4", "../../config.json"):
        assert asyncio.run(ask(name)).status_code == 404
