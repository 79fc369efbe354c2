"""How `make docs` makes a site of the Markdown pages: settings of Sphinx.

The pages stay what a forge shows. All that a site needs beyond them is here: the order of the
pages, and the API reference, which is made from each package's `__all__`.
"""

import importlib
import inspect
import os
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import dreamfleet

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the site needs no accelerator to be built


ROOT = Path(__file__).parents[1]
NAVIGATION = {
    "The path": ["install", "quickstart", "environments", "evaluation", "machines", "algorithm"],
    "When something is wrong": ["troubleshooting", "learning"],
    "Guides": [
        "python", "presets", "from_sb3", "sweeps", "datasets", "agents", "view", "dream", "export",
        "sharing", "examples", "gallery",
    ],
    "Suites": [
        "suites/gym", "suites/dmc", "suites/atari", "suites/crafter", "suites/minigrid",
        "suites/bundled",
    ],
    "Operation": [
        "operations", "scaling", "performance", "accelerators", "security", "reliability", "chaos",
    ],
    "Reference": ["README", "configuration", "metrics", "api"],
    "Decisions": [
        *("decisions/transport", "decisions/replay", "decisions/web_page", "decisions/site"),
        "decisions/command_line",
    ],
    "The project": ["../results/README", "../ARCHITECTURE", "../CONTRIBUTING", "../CHANGELOG"],
}  # fmt: skip
"""What the side bar shows; a page that is missing here fails the build."""
API = ("", ".envs", ".agents", ".dream", ".replay", ".transport", ".metrics")
"""Packages of the API reference, in its order."""

# Settings have a page of their own.
for _function in (dreamfleet.train, dreamfleet.resume):
    vars(_function).pop("__signature__", None)

project = "Dreamfleet"
root_doc = "README"
include_patterns = ["[ACR][A-Z]*.md", "docs/**.md", "results/README.md"]
exclude_patterns = [
    ".*", "build", "deploy", "dist", "examples", "locks", "runs", "site", "src", "tests",
]  # fmt: skip

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4  # as a forge makes them
highlight_language = "text"  # a block without a language is output, not Python
default_role = "code"  # docstrings quote code as Markdown does
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = project
html_static_path = ["site"]
html_css_files = ["style.css"]
html_js_files = ["found.js"]
html_show_sphinx = html_show_copyright = html_copy_source = False
# Pages that are opened from the disk may not fetch each other.
html_show_search_summary = False


def _complete(_: Sphinx, name: str, source: list[str]) -> None:
    """Add what a forge shows by itself: the entries of the side bar, and the programs."""
    if name == "docs/examples":
        for path in sorted((ROOT / "examples").glob("*.py")):
            source[0] += f"\n## `{path.name}`\n\n```python\n{path.read_text()}```\n"
    if name == "docs/api":
        source[0] += _api()
    if name == root_doc:
        for caption, pages in NAVIGATION.items():
            names = "\n".join(os.path.normpath(f"docs/{page}") for page in pages)
            source[0] += (
                f"\n```{{toctree}}\n:hidden:\n:titlesonly:\n:caption: {caption}\n\n{names}\n```\n"
            )


def _api() -> str:
    """The public names of every package: functions, classes, exceptions; each name once."""
    shown, text = set[int](), ""
    for package in (f"dreamfleet{suffix}" for suffix in API):
        found: dict[str, list[str]] = {"function": [], "class": [], "exception": []}
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if id(value) in shown or isinstance(value, str):
                continue
            shown.add(id(value))
            error = isinstance(value, type) and issubclass(value, Exception)
            kind = "exception" if error else "class" if isinstance(value, type) else "function"
            lines = f".. auto{kind}:: {package}.{name}\n"
            if kind == "class":
                lines += f"   :members: {_methods(value)}\n" if _is_settings(name) else _MEMBERS
            found[kind].append(lines)
        names = "".join(line for lines in found.values() for line in lines)
        text += f"\n## `{package}`\n\n```{{eval-rst}}\n{names}```\n"
    return text


_MEMBERS = "   :members:\n   :special-members: __call__\n   :private-members: _begin, _advance\n"


def _is_settings(name: str) -> bool:
    """Settings have a page of their own."""
    return name.endswith("Config")


def _methods(value: type) -> str:
    own = [n for n, each in vars(value).items() if inspect.isfunction(each) and each.__doc__]
    return ", ".join(n for n in own if not n.startswith("_")) or "__doc__"


def _add_index(app: Sphinx, error: Exception | None) -> None:
    """The first page is also what a folder shows."""
    if error is None:
        first = Path(app.outdir, f"{root_doc}.html")
        first.with_name("index.html").write_bytes(first.read_bytes())


def _mark_code(*event: Any) -> None:
    """An indented block of a docstring, behind a colon and an empty line, is code."""
    lines: list[str] = event[-1]
    for index, line in enumerate(lines[:-2]):
        if line.endswith(":") and not lines[index + 1] and lines[index + 2].startswith("    "):
            lines[index] += ":"


def _shorten(_: Sphinx, kind: str, name: str, *_about: object) -> tuple[str, None] | None:
    """The fields of settings are on the page of the configuration."""
    return ("", None) if kind == "class" and _is_settings(name) else None


def setup(app: Sphinx) -> None:
    # Its settings are on the page of the configuration; Sphinx reads defaults from the source.
    vars(dreamfleet.train).pop("__signature__", None)
    app.connect("source-read", _complete)
    app.connect("autodoc-process-docstring", _mark_code, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", _shorten)
    app.connect("build-finished", _add_index)
