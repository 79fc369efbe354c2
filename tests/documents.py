"""What the documentation shows: its blocks of shell commands and of Python."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from dreamfleet.metrics.glossary import entries

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^```([^\n`]*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(page.name, language, text) for language, text in found]


def commands() -> list[tuple[str, str]]:
    """Every line of every shell block, with the page it is on."""
    return [
        (block.page, line.partition("  #")[0].strip())
        for page in PAGES
        for block in blocks(page)
        if block.language == "sh"
        for line in block.text.splitlines()
    ]


def python_blocks(name: str) -> list[str]:
    return [b.text for b in blocks(ROOT / "docs" / name) if b.language == "python"]


def glossary() -> list[str]:
    """Regular expressions of the metrics that the page explains."""
    return [entry.pattern.pattern for entry in entries()]


def sentences(without: str = "-") -> str:
    """Every message: strings that are no docstrings, with {} for what is known when they appear.

    Args:
        without: A package to leave out.
    """
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        if without in path.parts:
            continue
        tree = ast.parse(path.read_text())
        docstrings = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "{}" for p in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)
