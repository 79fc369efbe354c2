"""What a run under faults has shown: as JSON, as text and as a picture."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dreamfleet.chaos.accounts import Accounts
from dreamfleet.chaos.faults import Outcome
from dreamfleet.errors import DreamfleetError
from dreamfleet.plotting import COLORS, make_figure, plain_axis, save_figure

MEDIAN_GOAL, WORST_GOAL, SPEED_GOAL, FAULTS_GOAL = 3.0, 10.0, 0.7, 200 / 30
"""Seconds of recovery, steps next to those of an undisturbed fleet, and faults a minute: what is to
be reached on a quiet machine."""


class PromiseBroken(DreamfleetError):
    """A fleet under faults did not do what it promises."""


@dataclass
class Report:
    """All that was seen of a run."""

    minutes: float
    """How long there were faults."""
    outcomes: list[Outcome]
    samples: list[tuple[float, int]]
    """Steps of the environments at times: seconds since the first fault."""
    quiet: float
    """Steps a second without faults."""
    disturbed: float
    """The same with faults."""
    accounts: Accounts | None
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the run."""
    problems: list[str] = field(default_factory=list)
    """Promises that did not hold, a sentence each."""
    lost: dict[str, int] = field(default_factory=dict)
    """What of which calls was lost with a connection, and how often."""
    calls: dict[str, int] = field(default_factory=dict)
    """Calls between the fleet's processes that were `made`, and those that went around libzmq
    (`direct`)."""
    orphans: list[float] = field(default_factory=list)
    """Seconds for which processes have outlived a killed supervisor."""

    @property
    def recovery(self) -> dict[str, list[float]]:
        """Seconds of each recovery, by role."""
        found: dict[str, list[float]] = {}
        for outcome in self.outcomes:
            for role, seconds in outcome.recoveries:
                found.setdefault(role, []).append(seconds)
        return dict(sorted(found.items()))

    @property
    def longest_pause(self) -> float:
        """Seconds in which no environment made a step."""
        pause = last = 0.0
        steps = -1
        for at, made in self.samples:
            if made != steps:
                steps, last = made, at
            pause = max(pause, at - last)
        return pause

    @property
    def misses(self) -> list[str]:
        """Goals of speed that were not reached."""
        found = []
        for role, seconds in self.recovery.items():
            if role in ("supervisor", "disk"):  # which are not roles
                continue
            median, worst = statistics.median(seconds), max(seconds)
            if median > MEDIAN_GOAL or worst > WORST_GOAL:
                found.append(
                    f"{role} recovered in {median:.1f} s (median) and {worst:.1f} s (worst); the "
                    f"goal is {MEDIAN_GOAL:g} s and {WORST_GOAL:g} s."
                )
        if self.quiet and self.disturbed < SPEED_GOAL * self.quiet:
            found.append(
                f"The fleet made {self.disturbed / self.quiet:.0%} of the steps of an undisturbed "
                f"one; the goal is {SPEED_GOAL:.0%}."
            )
        if self.minutes and len(self.outcomes) / self.minutes < FAULTS_GOAL:
            found.append(
                f"There were {len(self.outcomes)} faults in {self.minutes:.1f} minutes; the goal "
                f"is {FAULTS_GOAL * self.minutes:.0f}."
            )
        return found

    def to_json(self) -> str:
        recovery = {
            role: {
                "count": len(seconds),
                "median": round(statistics.median(seconds), 3),
                "worst": round(max(seconds), 3),
            }
            for role, seconds in self.recovery.items()
        }
        plain: dict[str, Any] = {
            "settings": self.settings,
            "minutes": round(self.minutes, 2),
            "faults": len(self.outcomes),
            "kinds": dict(sorted(Counter(each.fault.kind for each in self.outcomes).items())),
            "recovery_seconds": recovery,
            "longest_pause_seconds": round(self.longest_pause, 2),
            "steps_per_second": {"quiet": round(self.quiet, 1), "faults": round(self.disturbed, 1)},
            "calls": self.calls,
            "calls_lost": self.lost,
            "hostile_requests": sum(each.sent for each in self.outcomes),
            "orphans_lived_seconds": [round(each, 2) for each in self.orphans],
            "problems": self.problems,
            "misses": self.misses,
            **self._accounts(),
            "events": [
                {
                    "at": round(each.at, 2),
                    "fault": str(each.fault),
                    "detail": each.detail,
                    "recovery": {role: round(seconds, 3) for role, seconds in each.recoveries},
                    "collateral": each.collateral,
                }
                for each in self.outcomes
            ],
        }
        return json.dumps(plain, indent=2) + "\n"

    def _accounts(self) -> dict[str, Any]:
        if self.accounts is None:
            return {}
        found = self.accounts.findings
        return {
            "rows": {
                "audited": found.rows,
                "lost": found.lost,
                "doubled": found.doubled,
                "spliced": found.spliced,
                "damaged": found.damaged,
                "wrong_actions": found.wrong_actions,
                "unacknowledged": found.lost_ends,
            },
            "episodes": {"finished": found.finished, "cut_short": found.cut_short,
                         "scores": self.accounts.scores},
            "counts": self.accounts.steps,
            "samples": {"made": self.accounts.samples, "due": round(self.accounts.due)},
            "updates": self.accounts.updates,
        }  # fmt: skip

    def to_text(self) -> str:
        kinds = Counter(each.fault.kind for each in self.outcomes)
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        lines = [
            f"faults         {len(self.outcomes)} in {self.minutes:.1f} minutes: {listed}",
            "recovery       role         count  median   worst",
        ]
        for role, seconds in self.recovery.items():
            median, worst = statistics.median(seconds), max(seconds)
            lines.append(
                f"               {role:<12} {len(seconds):>5}  {median:>5.2f} s {worst:>5.2f} s"
            )
        share = self.disturbed / self.quiet if self.quiet else 0.0
        lines += [
            f"longest pause  {self.longest_pause:.1f} s",
            f"steps/s        {self.quiet:,.0f} without faults, {self.disturbed:,.0f} with them "
            f"({share:.0%})",
        ]
        if self.accounts is not None:
            found = self.accounts.findings
            lines += [
                f"rows audited   {found.rows:,}: {found.lost} lost, {found.doubled} doubled, "
                f"{found.spliced} spliced, {found.damaged} damaged, {found.wrong_actions} with a "
                "wrong action",
                f"               {found.lost_ends} steps were with killed agents, not acknowledged",
                f"episodes       {found.finished:,} finished, {found.cut_short:,} cut short; "
                f"{self.accounts.scores:,} scores written",
                f"replay ratio   {self.accounts.samples:,} sequences trained on, "
                f"{self.accounts.due:,.0f} due",
            ]
        if self.calls:
            made, direct = self.calls["made"], self.calls["direct"]
            lines.append(f"calls          {made:,}, {direct:,} of them around libzmq")
        if self.lost:
            lines.append(f"calls lost     {sum(self.lost.values())}, of {len(self.lost)} kinds")
        if sent := sum(each.sent for each in self.outcomes):
            lines.append(f"attacks        {sent:,} hostile requests, all refused or ignored")
        lines += [f"missed         {each}" for each in self.misses]
        lines += [f"BROKEN         {each}" for each in self.problems]
        if not self.problems:
            lines.append("Every promise has held.")
        return "\n".join(lines) + "\n"

    def draw(self, out: Path) -> None:
        """Draw speed and faults over time, and recoveries by role."""
        figure = make_figure(11, 6.4)
        speed, faults = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (1, 1)})
        self._draw_speed(speed)
        self._draw_recoveries(faults)
        save_figure(figure, out, dpi=130)

    def _draw_speed(self, axis: Any) -> None:
        times, rates = _rates(self.samples)
        axis.fill_between(times, rates, step="mid", color=COLORS[0], alpha=0.25, linewidth=0)
        axis.plot(times, rates, color=COLORS[0], linewidth=0.8, drawstyle="steps-mid")
        axis.axhline(self.quiet, color="0.4", linestyle="--", linewidth=1, label="without faults")
        axis.axhline(self.disturbed, color=COLORS[1], linewidth=1, label="mean with faults")
        faults = [each.at / 60 for each in self.outcomes]
        axis.plot(faults, [0] * len(faults), "|", color="0.2", markersize=9, label="faults")
        axis.set_ylabel("environment steps a second")
        axis.set_ylim(bottom=0)
        axis.margins(x=0.01)
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1)}  # above the curve
        axis.legend(**place, fontsize=8, frameon=False, ncols=3)
        axis.set_title(
            f"{len(self.outcomes)} faults in {self.minutes:.1f} minutes", loc="left", fontsize=11
        )
        plain_axis(axis)

    def _draw_recoveries(self, axis: Any) -> None:
        for number, role in enumerate(self.recovery):
            points = [
                (outcome.at / 60, max(seconds, 1e-3))
                for outcome in self.outcomes
                for each, seconds in outcome.recoveries
                if each == role
            ]
            color = COLORS[number % len(COLORS)]
            marker = "osD^v"[number // len(COLORS)]
            axis.plot(
                *zip(*points, strict=True), marker, color=color, markersize=4, label=role, alpha=0.8
            )
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        for goal, text in ((MEDIAN_GOAL, "median goal"), (WORST_GOAL, "worst goal")):
            axis.axhline(goal, color="0.6", linestyle=":", linewidth=1)
            place = {"xy": (1, goal), "xycoords": ("axes fraction", "data"), "va": "bottom"}
            axis.annotate(f"{text}: {goal:g} s", **place, ha="right", fontsize=7, color="0.4")
        axis.set_ylabel("seconds until recovered")
        axis.set_xlabel("minutes")
        if self.recovery:
            place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
            axis.legend(**place, fontsize=8, frameon=False, ncols=4)
        plain_axis(axis)


def _rates(
    samples: Sequence[tuple[float, int]], width: float = 1.0
) -> tuple[list[float], list[float]]:
    """Steps a second over intervals, and the minutes of these."""
    times, rates = [], []
    begin, steps = samples[0] if samples else (0.0, 0)
    for at, made in samples:
        if at - begin >= width:
            times.append((at + begin) / 120)
            rates.append((made - steps) / (at - begin))
            begin, steps = at, made
    return times, rates
