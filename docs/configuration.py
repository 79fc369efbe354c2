"""The configuration reference, made from the configuration itself: `make docs`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dreamfleet.agents.dreamer.config import PUBLISHED_SIZES, SIZES, size_preset
from dreamfleet.config import RunConfig
from dreamfleet.files import atomic_write
from dreamfleet.presets import PRESETS
from dreamfleet.settings import Setting, describe

_INTRODUCTION = """\
# Configuration

`make docs` makes this page from the code. A setting is a flag with its path: `--replay.capacity
100000`. A switch needs no value; `no-` before its name turns it off (`--replay.no-online`). Pairs
are words: `--env-options repeat=2`. From Python: `RunConfig().changed({"dreamer.model": "1m"})`.

`--config FILE` reads settings from JSON or YAML (`pip install pyyaml`), as `--print-config` writes
them; flags override it. Your own code in a file (a task, an agent, networks) must be named again as
a flag, or trusted with `--trust`.

The default and the allowed values are in parentheses; a lower bound of 0 or 1 is left out.
"""

_SHORT = {
    r"a whole number": "integer",
    r"a number": "number",
    r"true or false": "switch",
    r"a path": "path",
    r"NAME=VALUE pairs": "pairs",
    r"one of ": "",
    r"a list, each entry (\w+)": r"list of \1",
    r", at least (\S+) and at most (\S+)": r" \1 to \2",
    r" and at most ": " to ",
    r", at least ": " ≥",
    r", above ": " >",
}
"""How the page shortens the words of an error about a value."""


def reference() -> str:
    """The page."""
    config = RunConfig()
    parts = [_INTRODUCTION, "## The run\n"]
    agent = config.agent_type
    words = dict(_descriptions(config, "")) | dict(_descriptions(config.agent_config, agent.name))
    groups: dict[str, list[Setting]] = {}
    for setting in config.settings():
        groups.setdefault(setting.path.rpartition(".")[0], []).append(setting)
    for path, members in groups.items():
        if path.startswith("resources."):
            continue
        if path:
            parts += [f"## `{path}`\n", f"{words[path]}\n"]
        parts.append(_list(members))
    parts += ["## `resources`\n", _resources(groups)]
    parts += ["## Presets\n", _presets(), "## Sizes of the model\n", _sizes()]
    return "\n".join(parts)


def main() -> None:
    """Write the page to the file that is named on the command line."""
    atomic_write(Path(sys.argv[1]), reference())


def _descriptions(config: Any, path: str) -> Iterator[tuple[str, str]]:
    """What each class inside a configuration says about itself."""
    if path:
        yield path, (inspect.getdoc(type(config)) or "").split("\n\n")[0].replace("\n", " ")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and field.name != "agent_config":
            yield from _descriptions(value, f"{path}.{field.name}".lstrip("."))


def _list(settings: Sequence[Setting]) -> str:
    return "".join(f"- `{each.path}` ({_default(each)}): {each.help}\n" for each in settings)


def _default(setting: Setting) -> str:
    """The default, then what is allowed, unless that is clear: a type, or a bound of 0 or 1."""
    allowed = _value(setting.type)
    if isinstance(setting.value, (bool, int, float)):
        allowed = re.sub(r"^(switch|integer|number)( ≥[01]$)?", "", allowed).strip()
    elif allowed in ("text", "path", "pairs", "list of text"):
        allowed = ""
    elif setting.value is None:
        allowed = allowed.removesuffix(" or None")
    return f"{_shown(setting.value)}{allowed and f', {allowed}'}"


def _value(kind: Any) -> str:
    text = describe(kind)
    for words, short in _SHORT.items():
        text = re.sub(words, short, text)
    return text


def _resources(groups: Mapping[str, Sequence[Setting]]) -> str:
    """One line for each kind of resource; the roles differ in their defaults only."""
    roles = {p.removeprefix("resources."): g for p, g in groups.items() if "resources." in p}
    names = ", ".join(f"`{role}`" for role in roles)
    rows = [
        f"What the launcher ray reserves for each process of a ROLE: {names}.\n",
    ]
    for column in zip(*roles.values(), strict=True):
        name, first = column[0].path.rpartition(".")[2], column[0]
        same = [role for role, each in zip(roles, column, strict=True) if each.value == first.value]
        default = _default(first)
        if len(same) < len(roles):
            other = next(each for each in column if each.value != first.value)
            default += f" for {', '.join(same)}; else {_shown(other.value)}"
        rows.append(f"- `resources.ROLE.{name}` ({default}): {first.help}")
    return "\n".join(rows) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`" if str(value) != "" else "empty"


def _presets() -> str:
    """What each preset changes."""
    sizes = [f"size{size}" for size in PUBLISHED_SIZES]
    plain = [name for name in PRESETS if name not in (*sizes, "default", "debug")]
    rows = [
        "What [each](presets.md) changes in the defaults above, or in `published`. `debug` is "
        "left out: it makes everything small.\n",
        *(f"- `{name}`: {_own(name)}" for name in plain),
        "- `size1m` and so on: as `published`, with the model of that size",
    ]
    return "\n".join(rows) + "\n"


def _own(name: str) -> str:
    """The settings in which a preset differs from the one that it is closest to."""
    model = PRESETS[name].agent_config.model
    size = next((size for size in SIZES if size_preset(size) == model), None)

    def values(config: RunConfig) -> dict[str, Any]:
        found = {each.path: each.value for each in config.settings() if each.path != "logdir"}
        if size is None:
            return found
        # A model that has a name is one setting.
        found = {path: v for path, v in found.items() if not path.startswith("dreamer.model.")}
        return {**found, "dreamer.model": size if config.agent_config.model == model else ""}

    mine, found = values(PRESETS[name]), {}
    for base in ("default", "published"):
        theirs = values(PRESETS[base])
        changes = [f"`{k}={v}`" for k, v in mine.items() if v != theirs[k]]
        found[base] = ("as `published`, with " if base == "published" else "") + ", ".join(changes)
    return found["default"] if name == "published" else min(found.values(), key=len)


def _sizes() -> str:
    sizes = [size for size in SIZES if size != "debug"]
    names = [field.name for field in dataclasses.fields(size_preset("1m"))]
    shown = [n for n in names if len({str(getattr(size_preset(s), n)) for s in sizes}) > 1]
    rows = ["`--dreamer.model NAME`; those with a number are published. `debug` is for tests.\n"]
    rows += ["| size | " + " | ".join(f"`{name}`" for name in shown) + " |"]
    rows += ["|---" * (1 + len(shown)) + "|"]
    for size in sizes:
        cells = [str(getattr(size_preset(size), name)) for name in shown]
        rows.append(f"| `{size}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
