"""`make docs`: a site of all pages, which is whole and works from the disk."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from browser_parts import chromium
from documents import PAGES, ROOT

PACKAGES = ("", ".agents", ".dream", ".envs", ".metrics", ".replay", ".transport")


@dataclass
class Page(HTMLParser):
    """What a page refers to, and what can be referred to in it."""

    links: list[str] = field(default_factory=list)
    assets: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif "src" in given:
            self.assets.append(given["src"])
        elif tag == "link":
            self.assets.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("checkout"))


def test_the_site_is_whole(site: Path) -> None:
    pages = {path: Page() for path in site.rglob("*.html")}
    for path, page in pages.items():
        page.feed(path.read_text())
    links_lead_to_places_that_exist(pages)
    nothing_comes_from_another_host(site, pages)
    every_page_is_there_and_is_reached(site, pages)
    every_public_name_has_its_docstring(pages[site / "docs/api.html"])


def test_the_site_works_from_the_disk(site: Path) -> None:
    with chromium() as browser:
        a_person_reads_and_searches_it(browser, site, dark=False, width=1280)
        a_person_reads_and_searches_it(browser, site, dark=True, width=390)  # a phone


def made(checkout: Path) -> Path:
    """What `make docs` makes of a copy of the pages."""
    for name in ("docs", "examples", "results"):
        shutil.copytree(ROOT / name, checkout / name)
    for path in (*ROOT.glob("*.md"), ROOT / "LICENSE", ROOT / "Makefile"):
        shutil.copy(path, checkout)
    (checkout / "src").symlink_to(ROOT / "src")
    # The set-up is there: these tests run in it.
    words = ["make", "-o", "setup-dev", "docs", f"BIN={Path(sys.executable).parent}"]
    done = subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "site/index.html" in done.stdout
    return checkout / "site"


def local(base: Path, link: str) -> tuple[Path, str]:
    """The file that a link on the disk leads to, and the place in it."""
    parts = urlsplit(link)
    path = Path(os.path.normpath(base.parent / unquote(parts.path))) if parts.path else base
    return path, parts.fragment


def links_lead_to_places_that_exist(pages: dict[Path, Page]) -> None:
    checked = 0
    for path, page in pages.items():
        for link in page.links:
            if urlsplit(link).scheme:
                continue
            target, place = local(path, link)
            assert target.is_file(), f"{path.name}: {link}"
            if place:
                assert place in pages[target].anchors, f"{path.name}: {link}"
                checked += 1
    assert checked > 100


def nothing_comes_from_another_host(site: Path, pages: dict[Path, Page]) -> None:
    assets = [(path, asset) for path, page in pages.items() for asset in page.assets]
    for path in site.rglob("*.css"):
        urls = re.findall(r"url\(['\"]?([^'\")]+)", path.read_text())
        urls += re.findall(r"@import ['\"]([^'\"]+)", path.read_text())
        assets += [(path, url) for url in urls if not url.startswith("data:")]
    assert len(assets) > 100
    for path, asset in assets:
        assert local(path, asset)[0].is_file(), f"{path.name}: {asset}"


def every_page_is_there_and_is_reached(site: Path, pages: dict[Path, Page]) -> None:
    written = {page.relative_to(ROOT).with_suffix(".html") for page in PAGES}
    written |= {Path("ARCHITECTURE.html"), Path("results/README.html"), Path("CHANGELOG.html")}
    reached, new = set[Path](), {site / "index.html"}
    while new:
        reached |= new
        links = [local(path, link)[0] for path in new for link in pages[path].links]
        new = {path for path in links if path in pages} - reached
    assert {path.relative_to(site) for path in reached} >= written
    # The side bar of any page leads to every page.
    beside = {
        local(site / "docs/view.html", link)[0] for link in pages[site / "docs/view.html"].links
    }
    assert {path.relative_to(site) for path in beside if path.is_relative_to(site)} >= written


def every_public_name_has_its_docstring(page: Page) -> None:
    anchors = page.anchors
    for suffix in PACKAGES:
        package = importlib.import_module(f"dreamfleet{suffix}")
        for name in package.__all__:
            real = getattr(package, name)
            if name != "__version__":
                places = (f"dreamfleet{suffix}.{name}", f"{real.__module__}.{name}", name)
                again = (f"dreamfleet{other}.{name}" for other in PACKAGES)
                assert anchors & {*places, *again}, f"dreamfleet{suffix}.{name}"


def test_every_picture_is_in_the_gallery() -> None:
    gallery = (ROOT / "docs" / "gallery.md").read_text()
    for picture in (ROOT / "docs" / "images").iterdir():
        assert f"(images/{picture.name})" in gallery


def a_person_reads_and_searches_it(browser: Any, site: Path, *, dark: bool, width: int) -> None:
    scheme = "dark" if dark else "light"
    size = {"width": width, "height": 800}
    context = browser.new_context(color_scheme=scheme, viewport=size, offline=True)
    context.set_default_timeout(180_000.0)
    page, problems = context.new_page(), list[str]()
    page.on("console", lambda said: said.type == "error" and problems.append(said.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request",
        lambda asked: asked.url.startswith(("file:", "data:")) or problems.append(asked.url),
    )
    page.goto((site / "index.html").as_uri())
    field = page.locator("input[name=q]").first
    if field.bounding_box()["x"] < 0:  # beside what a phone shows
        page.locator("label[for=__navigation]:visible").first.click()
    field.fill("free_nats")
    field.press("Enter")
    page.click("#search-results a:has-text('Configuration')")
    # At the row that it has found, far down.
    page.wait_for_selector("article .highlighted:has-text('free_nats')")
    page.wait_for_function("scrollY > 1000")
    top = page.evaluate("document.querySelector('.highlighted').getBoundingClientRect().top")
    assert 0 < top < 800
    for name in ("docs/learning.html", "docs/configuration.html", "docs/api.html", "index.html"):
        page.goto((site / name).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") != dark
    assert problems == []
    context.close()
