"""The tables and the picture of `docs/scaling.md`, and a table of `docs/performance.md`.

    python -m benchmarks scale --json docs/scaling.json
    python -m docs.scaling docs/scaling.json docs/scaling.md docs/images/scaling.png
    python -m docs.scaling docs/scaling.json docs/performance.md

A table stands in the page between `<!-- NAME -->` and `<!-- end -->`. The text around it is written
by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.scale import CONNECTIONS, TASKS
from dreamfleet.config import RunConfig
from dreamfleet.files import atomic_write
from dreamfleet.plotting import COLORS, make_figure, plain_axis, save_figure
from dreamfleet.replay.storage.store import MAX_SLOTS

Values = Mapping[str, float]

FLEETS = {"64": 64, "1,000": 1_000}
STEPS_A_SECOND = 20
"""Of one environment, in the tables that need it: a simulator of middling weight."""
_ROLES = {"env": "environment process", "agent": "actor", "replay": "replay", "logger": "logger"}
_LAYOUTS = ("8 in one process", "a process each")


def fill(page: str, values: Values) -> str:
    """The page with its tables made again."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- {name} -->\n{TABLES[name](values)}<!-- end -->"

    return re.sub(r"<!-- ([\w ]+) -->\n.*?<!-- end -->", table, page, flags=re.DOTALL)


def read_values(path: Path) -> dict[str, float]:
    """What was measured, by its name."""
    rows = json.loads(path.read_text())
    values = {row["name"]: float(row["value"]) for row in rows}
    return values | {row["peer"]: float(row["peer_value"]) for row in rows if row["peer"]}


# --- tables --------------------------------------------------------------------------------------


def fleet(values: Values) -> str:
    """CPU time of each role for an environment step, in a whole fleet."""
    columns = [f"{kind}, {layout}" for kind in TASKS for layout in _LAYOUTS]
    rows = [["environment alone", *[_us(values[f"{k}/environment alone/cpu"])
             for k in TASKS for _ in _LAYOUTS]]]  # fmt: skip
    for role, name in _ROLES.items():
        cells = [values[f"{kind}/fleet, {each}/{role}"] for kind in TASKS for each in _LAYOUTS]
        rows.append([name, *map(_us, cells)])
    rates = [values[f"{kind}/fleet, {each}"] for kind in TASKS for each in _LAYOUTS]
    rows.append(["steps a second here", *(f"{rate:,.0f}" for rate in rates)])
    return _table(["CPU time a step", *columns], rows)


def costs(values: Values, kind: str, ratio: float) -> dict[str, float]:
    """Microseconds of CPU time that a step costs each role of a large fleet."""
    config = RunConfig()
    update = values[f"{kind}/learner update/cpu"]
    batch = values[f"{kind}/replay sample/cpu"] + values.get(f"{kind}/replay update/cpu", 0.0)
    updates = ratio / (config.batch_size * config.batch_length)  # for each step
    return {
        "actor": values[f"curve/dreamer/{kind}/{CONNECTIONS[-1]}/actor"],
        "learner": updates * update,
        "replay": values[f"{kind}/replay insert/cpu"] + updates * batch,
        "logger": values[f"{kind}/logger/cpu"],
    }


def saturation(values: Values) -> str:
    """How many cores each role keeps busy, and which one is the first that one core is too few
    for."""
    rows = []
    for kind in TASKS:
        for ratio in (RunConfig().train_ratio, 1.0):
            each = costs(values, kind, ratio)
            for text, envs in FLEETS.items():
                needed = {role: us * 1e-6 * envs * STEPS_A_SECOND for role, us in each.items()}
                order = sorted(needed, key=lambda role: -needed[role])
                full = [f"{role}" for role in order if needed[role] > 1]
                rows.append(
                    [
                        f"{text}, {kind}, train_ratio {ratio:g}",
                        *(_cores(needed[role]) for role in each),
                        ", ".join(full) or f"none; {order[0]} is next",
                    ]
                )
    columns = [f"{role}, cores" for role in costs(values, "vector", 1.0)]
    return _table(["environments", *columns, "more than one core, most first"], rows)


def limits(values: Values) -> str:
    """How often a second one core can do what a role does, by its CPU time alone."""
    most = CONNECTIONS[-1]
    costs_of = {
        f"actor, DreamerV3, {most:,} connections": (f"curve/dreamer/{{}}/{most}/actor",),
        **{
            f"{role}, fleet of eight, {layout}": (f"{{}}/fleet, {layout}/{role}",)
            for role in ("replay", "logger")
            for layout in reversed(_LAYOUTS)
        },
        "replay, inserts of 64 steps": ("{}/replay insert/cpu",),
        "logger, messages of 64 steps": ("{}/logger/cpu",),
        "replay, batches sampled": ("{}/replay sample/cpu",),
        "replay, batches sampled and updated": (
            "{}/replay sample/cpu",
            "{}/replay update/cpu",
        ),
    }
    rows = []
    for text, names in sorted(costs_of.items(), key=lambda each: each[0].partition(",")[0]):
        cells = [1e6 / sum(values[name.format(kind)] for name in names) for kind in TASKS]
        unit = "batches" if "batches" in text else "steps"
        rows.append([text, *(f"{_rounded(cell)} {unit}" for cell in cells)])
    return _table(["one core, a second", *TASKS], rows)


def walls(values: Values) -> str:
    """What a second actor and a second shard gain on two cores."""
    rows = []
    for name, what in (
        ("actors={}", "`actors`, DreamerV3 with images, steps a second"),
        ("replay_shards={}, inserts", "`replay_shards`, images stored a second"),
        ("replay_shards={}, samples", "`replay_shards`, batches of images drawn a second"),
    ):
        one, two = (values[name.format(count)] for count in (1, 2))
        rows.append([what, f"{one:,.0f}", f"{two:,.0f}", f"{two / one:.2f}x"])
    return _table(["setting, on two cores", "1", "2", "gain"], rows)


def network(values: Values) -> str:
    """What an environment sends and receives."""
    rows = []
    for kind in TASKS:
        out, back = (values[f"bytes/random/{kind}/{way} the actor"] for way in ("to", "from"))
        rate = STEPS_A_SECOND * (out + back)
        thousand = f"{8e-6 * 1000 * rate:,.0f} Mbit/s"
        rows.append([kind, f"{out:,.0f}", f"{back:,.0f}", f"{8e-3 * rate:,.0f} kbit/s", thousand])
    columns = ["bytes to the actor", "bytes back", f"at {STEPS_A_SECOND} steps/s", "1,000 of them"]
    return _table(["environment, a step", *columns], rows)


def replay(values: Values) -> str:
    """What a replay of some size takes."""
    rows = []
    for size, text in ((1e11, "100 GB"), (1e13, "10 TB")):
        for kind in TASKS:
            steps = size / values[f"{kind}/stored step"]
            files = steps / RunConfig().replay.chunk
            chunk = RunConfig().replay.chunk
            while steps / chunk > MAX_SLOTS / 2:  # files of many streams are not full
                chunk *= 2
            rows.append(
                [
                    f"{text}, {kind}",
                    f"{steps / 1e6:,.0f} M",
                    f"{files:,.0f}",
                    f"{chunk:,}",
                    f"{steps * values['replay/index'] / 1e9:,.1f} GB",
                    _duration(steps / 1e6 * values["replay/reopen"]),
                ]
            )
    columns = ["steps", "files of 1,024 steps", "`replay.chunk` to set", "index in memory"]
    return _table(["replay", *columns, "time to reopen"], rows)


TABLES: Mapping[str, Callable[[Values], str]] = {
    each.__name__: each for each in (fleet, saturation, limits, walls, network, replay)
}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |\n" for line in (head, *rows)]
    return "".join([lines[0], "|---" * len(head) + "|\n", *lines[1:]])


def _us(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:,.0f} ms"
    return f"{value:,.0f} us" if value >= 10 else f"{value:.1f} us"


def _cores(value: float) -> str:
    text = f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
    return f"**{text}**" if value > 1 else text


def _rounded(value: float) -> str:
    """With two digits that count: more of them would promise too much."""
    return f"{float(f'{value:.2g}'):,.0f}"


def _duration(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds < 120 else f"{seconds / 60:,.0f} min"


# --- the picture ---------------------------------------------------------------------------------


def _lines() -> list[tuple[str, str]]:
    return [(agent, kind) for agent in ("random", "dreamer") for kind in TASKS]


def draw(values: Values, out: Path) -> None:
    """Steps a second against environments."""
    figure = make_figure(7.2, 4.2)
    axis = figure.subplots()
    names = {"random": "random agent", "dreamer": "DreamerV3's policy"}
    for number, (agent, kind) in enumerate(_lines()):
        rates = [values[f"curve/{agent}/{kind}/{count}"] for count in CONNECTIONS]
        style = {"color": COLORS[number // 2], "linestyle": ("-", "--")[number % 2]}
        label = f"{names[agent]}, {kind}s"
        axis.plot(
            CONNECTIONS, rates, marker="o", markersize=3.5, linewidth=1.8, label=label, **style
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(CONNECTIONS)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_ylim(bottom=0)
    axis.set_title("One actor, replay and logger on", fontsize=11, loc="left", fontweight="bold")
    axis.set_xlabel("environments, each with a connection of its own")
    axis.set_ylabel("steps a second")
    plain_axis(axis)
    axis.legend(fontsize=8, frameon=False, loc="upper left", handlelength=3.2)
    save_figure(figure, out)


def main(arguments: Sequence[str]) -> None:
    """Make the page's tables again, and the picture if it is named."""
    values, page = read_values(Path(arguments[0])), Path(arguments[1])
    atomic_write(page, fill(page.read_text(), values))
    if len(arguments) > 2:
        draw(values, Path(arguments[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
