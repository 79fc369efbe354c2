"""Words of the documents and of the code: spelled right, and those of the field."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from documents import PAGES, ROOT, sentences

PLACES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "results")
PLACES += ("src", "benchmarks", "examples", "deploy", "Makefile")

AVOIDED = {
    "processors?": "CPU",
    "nobody|no one": "what does not, such as: no process",
    "somebody|someone|anybody|anyone": "a user, a process",
    "whoever|whom": "its owner, its caller",
    "everybody": "all processes, every user",
    "(?:go|goes|went) on": "continue",
    "heard (?:of|from)": "silent, lost",
    "once more": "again, a second signal",
    "in vain": "without a result",
}
"""Words that the documents and messages avoid, and what to write instead."""


def test_words_are_spelled_right() -> None:
    pytest.importorskip("codespell_lib", reason="codespell is not installed: make setup-dev")
    command = [sys.executable, "-m", "codespell_lib", "--skip", "*.json,*.ipynb,*.png,*.svg,*.pyc"]
    done = subprocess.run(
        [*command, *PLACES], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("word", AVOIDED)
def test_documents_and_messages_use_the_words_of_the_field(word: str) -> None:
    texts = {page.name: page.read_text() for page in PAGES} | {"a message": sentences()}
    for name, text in texts.items():
        found = re.search(rf"^.*\b(?:{word})\b.*$", text, re.MULTILINE | re.IGNORECASE)
        assert not found, f"{name}: {found[0]}: write {AVOIDED[word]}"
