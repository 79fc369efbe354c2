"""The pictures of `docs/view.md` and `docs/dream.md`, and the strip of README.md, in Chromium.

    dreamfleet train --seed 3 --logdir FOLDER/cartpole-3
    python docs/view_images.py FOLDER cartpole-3 docs/images

FOLDER may hold more runs, such as those of `results/`; the named one has a checkpoint. With
`docs/images` as the only argument, the strip alone is made from the pictures that are there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright


def main(folder: str, run: str, out: Path) -> None:
    """Draw all pictures."""
    command = [sys.executable, "-m", "dreamfleet.cli", "view", folder, "--port", "0"]
    with (
        subprocess.Popen([*command, "--no-browser"], stdout=subprocess.PIPE, text=True) as server,
        sync_playwright() as playwright,
    ):
        assert server.stdout is not None
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(120_000)
        page.goto(server.stdout.readline().strip())
        page.locator(".chart.tall canvas").first.wait_for()
        save(page, out / "view-runs.png", height=1060)
        site = page.url.partition("/?")[0].rstrip("/")
        page.goto(f"{site}/run?run={run}")
        page.locator(".chart canvas").nth(4).wait_for()
        save(page, out / "view-run.png", height=1270)
        page.goto(f"{site}/dream?run={run}")
        page.wait_for_selector("text=/step 0 ·/")
        page.get_by_role("button", name="Policy").click()
        page.keyboard.press("Space")
        page.wait_for_selector("text=/step (2[5-9]|3\\d) ·/")
        page.keyboard.press("Space")
        save(page, out / "view-dream.png", height=1180)
        browser.close()
        server.terminate()
    strip(out)


_STRIP = """
<style>
  body { margin: 12px; background: #fff; display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
  img { width: 100%; object-fit: cover; object-position: top; display: block; }
  .terminal { grid-column: 1 / 3; }
  .page { height: 520px; border: 1px solid #ccc; border-radius: 8px; box-sizing: border-box; }
</style>
<img class="terminal" src="status.svg">
<img class="page" src="view-run.png">
<img class="page" src="view-dream.png">
"""


def strip(out: Path) -> None:
    """Put terminal, page and dream into one picture, `look.png`."""
    source = out / "look.html"
    source.write_text(_STRIP)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(source.resolve().as_uri())
        page.screenshot(path=out / "look.png", full_page=True)
        browser.close()
    source.unlink()
    with Image.open(out / "look.png") as picture:
        picture.convert("RGB").quantize(256).save(out / "look.png", optimize=True)


def save(page: Any, path: Path, height: int) -> None:
    """Save the top of a page, once its charts are drawn."""
    page.set_viewport_size({"width": 1280, "height": height})
    page.mouse.move(1, 1)
    page.wait_for_timeout(2500)
    page.screenshot(path=path)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        strip(Path(sys.argv[1]))
    else:
        main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
