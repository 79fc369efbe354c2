"""Pages that are made from the code are current, and no page names what does not exist."""

from __future__ import annotations

import errno
import inspect
import itertools
import os
import re
import runpy
import shlex
import sys
import tomllib

import pytest
from documents import PAGES, ROOT, blocks, commands, python_blocks, sentences

from dreamfleet.cli import COMMANDS
from dreamfleet.cli.train import config_of
from dreamfleet.config import RunConfig
from dreamfleet.envs import MissingExtraError, registry
from dreamfleet.errors import ConfigError
from dreamfleet.metrics.glossary import explain
from dreamfleet.presets import PRESETS, preset
from dreamfleet.settings import pairs
from dreamfleet.transport import RoleKey, load_key

reference = runpy.run_path(str(ROOT / "docs" / "configuration.py"))["reference"]


def test_the_configuration_reference_is_current() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == reference(), "run 'make docs'"


def test_every_field_of_the_configuration_is_listed() -> None:
    names = re.findall(r"^- `([\w.*]+)` \(", reference(), re.MULTILINE)
    for name in ("task", "train_ratio", "dreamer.loss.horizon", "dreamer.model.deter"):
        assert name in names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_every_page_is_listed() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in PAGES:
        if page.name != "README.md":
            assert f"({page.relative_to(ROOT / 'docs').as_posix()})" in index


BUDGET = {
    "configuration.md": 3_300, "machines.md": 2_000, "scaling.md": 1_500, "operations.md": 1_500,
    "environments.md": 1_350, "metrics.md": 1_300,
}  # fmt: skip
"""Words of a page, as `wc -w` counts them; of any other page 1,000."""


def test_pages_over_their_budget_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """It does not fail: who reads a document pays for each word, who writes one should know."""
    words = {page: len(page.read_text().split()) for page in PAGES}
    over = [
        f"{page.name} {count:,} of {most:,}"
        for page, count in words.items()
        if count > (most := BUDGET.get(page.name, 1_000))
    ]
    with capsys.disabled():
        sys.stdout.write(f"\n{sum(words.values()):,} words; over budget: {', '.join(over)}\n")


def test_the_path_is_linear() -> None:
    """Each page of the path ends with a link to the next, in the order of the side bar."""
    found = re.search(r'"The path": \[(.*?)\]', (ROOT / "docs" / "conf.py").read_text())
    path = re.findall(r'"(\w+)"', found[1])
    index = (ROOT / "docs" / "README.md").read_text()
    assert re.findall(r"^\d+\. \[[^]]+\]\((\w+)\.md\)", index, re.MULTILINE) == path
    for name, following in itertools.pairwise(path):
        last = (ROOT / "docs" / f"{name}.md").read_text().strip().rpartition("\n\n")[2]
        assert re.match(rf"Next: \[[^]]+\]\({following}\.md\)", last), name


def test_blocks_say_what_they_are() -> None:
    """A shell or Python block without its language would not be run by the tests."""
    for page in PAGES:
        for block in blocks(page):
            # Blocks of several machines, `console`, are run by a test of their own.
            assert block.language in ("sh", "python", "console", "")
            assert block.language != "console" or block.page == "machines.md"
            if not block.language:
                assert "$ " not in block.text
                assert not re.search(r"^(dreamfleet|python|pip) ", block.text, re.MULTILINE)


def test_who_typed_make_train_is_told_where_the_command_is() -> None:
    """`make` installs into .venv, which no shell looks into by itself."""
    for page in ("README.md", "docs/install.md", "Makefile"):
        text = (ROOT / page).read_text().replace("$(BIN)", ".venv/bin")
        assert ". .venv/bin/activate" in text, page
        assert ".venv/bin/dreamfleet" in text, page


def test_extras_in_the_text_exist_and_those_that_are_listed_are_all() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    for page in PAGES:
        for names in re.findall(r"(?:dreamfleet|'\.)\[([\w,]+)\]", page.read_text()):
            assert set(names.split(",")) <= extras, page.name
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([a-z]+)`", row)}
    # Tools of developers.
    assert extras - listed == {"dev", "bench"}


def documented(text: str) -> dict[str, object]:
    """Options as they are written, `NAME=VALUE`, each in its own quotes."""
    return pairs(re.findall(r"`(\w+=[^`]+)`", text))


def real(task: str) -> dict[str, object]:
    """Options as they are in the code, with their defaults."""
    parameters = inspect.signature(registry._constructor(task)).parameters.values()
    return {
        each.name: each.default
        for each in parameters
        if each.kind is each.KEYWORD_ONLY and each.name != "seed"
    }


@pytest.mark.parametrize(
    "task",
    ["gym:CartPole-v1", "dmc:walker_walk", "atari:pong", "crafter:reward",
     "minigrid:Empty-5x5-v0", "bundled:catch", "bundled:corridor", "bundled:pointmass",
     "bundled:dummy"],
)  # fmt: skip
def test_every_option_of_a_suite_is_explained(task: str) -> None:
    suite, name = task.split(":")
    try:
        options = real(task)
    except MissingExtraError as error:
        pytest.skip(str(error))
    page = (ROOT / "docs" / "suites" / f"{suite}.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| `")]
    if suite == "bundled":
        row = next(row for row in rows if row.startswith(f"| `{name}`"))
        assert documented(row) == options
    else:
        # The first cell; others speak of other options.
        assert documented("".join(row.split("|")[1] for row in rows)) == options


def test_the_protocol_of_atari_100k_is_told() -> None:
    page = (ROOT / "docs" / "suites" / "atari.md").read_text()
    (words,) = re.findall(r"`atari100k:` has the same options.*?\n\n", page, re.DOTALL)
    assert {**real("atari:pong"), **documented(words)} == real("atari100k:pong")


def test_messages_that_are_quoted_are_those_that_appear() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    said = sentences() + os.strerror(errno.ENOSPC) + os.strerror(errno.EMFILE)
    symptoms = re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
    quotes = [quote for each in symptoms for quote in re.findall(r'"([^"]+)"', each)]
    assert len(quotes) >= 20
    for quote in quotes:
        assert re.sub(r"\d+", "{}", quote.removesuffix(" ...")) in said, quote


def test_commands_in_the_text_exist() -> None:
    """`dreamfleet NAME` and `make NAME`, wherever they stand."""
    makefile = (ROOT / "Makefile").read_text()
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text()
        for name in re.findall(r"(?<!from )dreamfleet ([a-z][a-z-]+)", text):
            assert name in COMMANDS, f"{page.name}: dreamfleet {name}"
        for name in re.findall(r"`make ([a-z-]+)", text):
            assert re.search(rf"^{name}:", makefile, re.MULTILINE), f"{page.name}: make {name}"
    assert commands()


def test_every_way_to_install_and_every_system_is_told() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    for words in ("a repository", "git+URL", "a wheel", "make wheel", "macOS", "Windows", "WSL 2"):
        assert words in page
    assert "no GPU was tried" in page
    names = re.findall(r"--preset\s+([\w,]+)`", page)
    assert len(names) >= 2
    for name in names:
        preset(name)
    flag = "dreamer.execution.compute_dtype"
    assert preset("size12m").changed({flag: "float32"}) != preset("size12m")
    assert f"--{flag.replace('_', '-')} float32" in page


def test_one_table_says_what_every_preset_is_for() -> None:
    page = (ROOT / "docs" / "presets.md").read_text()
    table = re.search(r"\| preset \| for \|\n\|---\|---\|\n((?:\|.*\n)+)", page)
    named = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table[1].splitlines()]
    assert sorted(name for row in named for name in row) == sorted(PRESETS)


def spans() -> list[tuple[str, str]]:
    """Everything that is quoted as code in a line of text, with the page it is on."""
    found = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        found += [(page.name, span.replace("\n", " ")) for span in re.findall(r"`([^`]+)`", text)]
    return found


SPANS = spans()
SETTINGS = {each.path for each in RunConfig().settings()}


def is_setting(path: str) -> bool:
    """Also a group of settings, such as `replay.fractions`."""
    return any(name == path or name.startswith(f"{path}.") for name in SETTINGS)


def test_settings_in_the_text_exist() -> None:
    """`replay.capacity`, and `--replay.capacity 1000` wherever it stands."""
    checked = 0
    for page, span in SPANS:
        if re.fullmatch(r"(dreamer|replay|resources)(\.[a-z_]+)+", span):
            assert is_setting(span), f"{page}: {span}"
            checked += 1
        for flag in re.findall(r"--((?:dreamer|replay|resources)\.[a-z.-]+)", span):
            path = flag.replace(".no-", ".").replace("-", "_")
            assert is_setting(path), f"{page}: --{flag}"
            checked += 1
    assert checked > 50


def test_trainings_in_the_text_have_settings_that_are_accepted() -> None:
    """`dreamfleet train ...` in a line of text, which no test runs."""
    checked = 0
    for page, span in SPANS:
        words = shlex.split(span) if span.startswith("dreamfleet train --") else []
        foreign = {"TASK", "DIR", "[OPTIONS]", "..."} & set(words)
        if words and not foreign and not {"--agent", "--help", "--help-all"} & set(words):
            try:
                config_of(words[2:])
            except ConfigError as error:
                pytest.fail(f"{page}: {span}: {error}")
            checked += 1
    assert checked > 5


ROLES = r"(train|report|eval|episode|episodes|eval_episodes|learner|actor|env|machines|replay)"
FILES = ("replay/damaged",)


def test_metrics_in_the_text_are_in_the_glossary() -> None:
    checked = 0
    for page, span in SPANS:
        if page != "metrics.md" and re.fullmatch(rf"{ROLES}(/[\w]+)+", span) and span not in FILES:
            assert explain(span), f"{page}: {span}"
            checked += 1
    assert checked > 40


def test_tasks_in_the_text_exist() -> None:
    checked, missing = 0, set[str]()
    for page, span in SPANS:
        for task in re.findall(
            r"\b(?:gym|dmc|atari|atari100k|crafter|minigrid|bundled):[\w-]+", span
        ):
            suite, _, name = task.partition(":")
            if name.isupper() or name in ("ID", "GAME", "NAME", "MODULE", "NAMESPACE"):
                continue
            try:
                assert name in registry.tasks(suite), f"{page}: {task}"
                checked += 1
            except MissingExtraError as error:
                missing.add(str(error))
    assert checked > 20
    if missing:
        pytest.skip(min(missing))


RUN_BY_TESTS = {
    "README.md": "test_readme.py",
    "agents.md": "test_documents_work.py",
    "dream.md": "test_dream.py",
    "environments.md": "test_documents_work.py",
    "evaluation.md": "test_documents_work.py",
    "from_sb3.md": "test_documents_work.py",
    "machines.md": "test_documents_work.py",
    "python.md": "test_from_python.py",
    "security.md": "test_documents.py",
}
"""Pages with programs, and the tests that run them."""


def test_the_programs_of_every_page_are_run_by_a_test() -> None:
    shown = {page.name for page in PAGES for b in blocks(page) if b.language == "python"}
    assert shown == RUN_BY_TESTS.keys()
    for page, name in RUN_BY_TESTS.items():
        (test,) = (ROOT / "tests").rglob(name)
        assert page in test.read_text()


def test_the_key_of_a_role_is_made_as_shown() -> None:
    (code,) = python_blocks("security.md")
    exec(code, {})
    key = load_key("env.key")
    assert isinstance(key, RoleKey)
    assert key.role == "env"
