"""The configuration reference, made from the configuration itself: `make docs`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

from dreamfleet.agents.dreamer.config import SIZES, size_preset
from dreamfleet.config import RunConfig
from dreamfleet.presets import PRESETS

_INTRODUCTION = """\
# Configuration

This page is made from the code by `make docs`, and a test keeps it current.

Settings are those of `dreamfleet.config.RunConfig`. On the command line many have an option of
their own (`dreamfleet train --help`); every one can be given with `--set NAME=VALUE`, those of the
agent by their path, such as `--set dreamer.loss.horizon=100`, and the model also by the name of a
size, such as `--set dreamer.model=1m`. What is not given is taken from the preset, and the resolved
configuration is saved as `config.json` beside the run. A setting that does not exist, that has the
wrong type or that contradicts another is refused at the start, with the fix.
"""


def reference() -> str:
    """The page."""
    parts = [_INTRODUCTION, "## The run\n", _table(RunConfig(), "")]
    for path, group in _groups(RunConfig().agent_config, "dreamer"):
        words = (inspect.getdoc(type(group)) or "").split("\n")[0]
        parts += [f"## `{path}`\n", f"{words}\n", _table(group, f"{path}.")]
    parts += ["## Presets\n", _presets(), "## Sizes of the model\n", _sizes()]
    return "\n".join(parts)


def main() -> None:
    Path(sys.argv[1]).write_text(reference())


def _groups(config: Any, path: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield f"{path}.{field.name}", value


def _table(config: Any, prefix: str) -> str:
    sentences = _sentences(type(config))
    kinds = get_type_hints(type(config))
    rows = ["| setting | type | default | |", "|---|---|---|---|"]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            rows.append(f"| `{prefix}{field.name}.*` | | | {sentences[field.name]} See below. |")
            continue
        row = f"| `{prefix}{field.name}` | {_kind(kinds[field.name])} | {_shown(value)} "
        rows.append(f"{row}| {sentences[field.name]} |")
    return "\n".join(rows) + "\n"


def _sentences(kind: type) -> dict[str, str]:
    """The text under each field, which Python itself throws away."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(ast.literal_eval(after.value).split())
    return found


def _kind(kind: Any) -> str:
    text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    if text.startswith("typing.Literal"):
        return " or ".join(f"`{choice}`" for choice in kind.__args__)
    return text.replace("typing.", "").replace("|", "or").replace("NoneType", "None")


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`" if str(value) != "" else "empty"


def _presets() -> str:
    """What each preset sets otherwise than the defaults above."""
    rows = ["`--preset NAME`; only what differs from the defaults above is shown.\n"]
    rows += ["| setting | " + " | ".join(f"`{name}`" for name in PRESETS) + " |"]
    rows += ["|---" * (1 + len(PRESETS)) + "|"]
    plain = dict(_flat(RunConfig()))
    settings = {name: dict(_flat(config)) for name, config in PRESETS.items()}
    for path, value in plain.items():
        values = [settings[name][path] for name in PRESETS]
        if any(each != value for each in values):
            cells = [_shown(each) if each != value else "" for each in values]
            rows.append(f"| `{path}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _sizes() -> str:
    names = [field.name for field in dataclasses.fields(size_preset("1m"))]
    shown = [n for n in names if len({str(getattr(size_preset(s), n)) for s in SIZES}) > 1]
    rows = [
        "`dreamfleet.agents.size_preset(NAME)`; those with a number of parameters are published.\n"
    ]
    rows += ["| size | " + " | ".join(f"`{name}`" for name in shown) + " |"]
    rows += ["|---" * (1 + len(shown)) + "|"]
    for size in SIZES:
        cells = [str(getattr(size_preset(size), name)) for name in shown]
        rows.append(f"| `{size}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _flat(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


if __name__ == "__main__":
    main()
