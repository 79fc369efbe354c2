"""The result of a run under faults, as JSON and as text."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from chaos.audit import Accounts
from chaos.faults import Outcome

MEDIAN_GOAL, WORST_GOAL, SPEED_GOAL, FAULTS_GOAL = 3.0, 10.0, 0.7, 200 / 30
"""On a quiet machine: seconds of recovery, steps relative to an undisturbed fleet, and faults per
minute."""


@dataclass
class Report:
    """What a run under faults has shown."""

    minutes: float
    """How long there were faults."""
    outcomes: list[Outcome]
    quiet: float
    """Steps per second without faults."""
    disturbed: float
    """Steps per second with faults."""
    longest_pause: float = 0.0
    """Seconds in which no training environment made a step."""
    accounts: Accounts | None = None
    settings: str = ""
    problems: list[str] = field(default_factory=list)
    """Promises that did not hold, a sentence each."""
    orphans: list[float] = field(default_factory=list)
    """Seconds for which workers outlived a killed supervisor."""

    @property
    def recovery(self) -> dict[str, dict[str, float]]:
        """Count, median and worst seconds of recovery, by role."""
        found: dict[str, list[float]] = {}
        for outcome in self.outcomes:
            for role, seconds in outcome.recoveries:
                found.setdefault(role, []).append(seconds)
        return {
            role: {
                "count": len(seconds),
                "median": round(statistics.median(seconds), 3),
                "worst": round(max(seconds), 3),
            }
            for role, seconds in sorted(found.items())
        }

    @property
    def cut(self) -> dict[str, int]:
        """Connections that were shut down, by the kind of their socket."""
        return dict(sum((Counter(each.cut) for each in self.outcomes), Counter[str]()))

    @property
    def misses(self) -> list[str]:
        """Goals of speed that were not reached."""
        found = []
        for role, times in self.recovery.items():
            if role in ("supervisor", "disk"):  # which are no roles
                continue
            median, worst = times["median"], times["worst"]
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
        events = [
            {
                "at": round(each.at, 2),
                "fault": str(each.fault),
                "detail": each.detail,
                "recovery": {role: round(seconds, 3) for role, seconds in each.recoveries},
                "collateral": each.collateral,
            }
            for each in self.outcomes
        ]
        plain: dict[str, Any] = {
            "settings": self.settings,
            "minutes": round(self.minutes, 2),
            "faults": len(self.outcomes),
            "kinds": dict(sorted(Counter(each.fault.kind for each in self.outcomes).items())),
            "recovery_seconds": self.recovery,
            "longest_pause_seconds": round(self.longest_pause, 2),
            "steps_per_second": {"quiet": round(self.quiet, 1), "faults": round(self.disturbed, 1)},
            "connections_cut": self.cut,
            "hostile_requests": sum(each.sent for each in self.outcomes),
            "orphans_lived_seconds": [round(each, 2) for each in self.orphans],
            "problems": self.problems,
            "misses": self.misses,
            "accounts": asdict(self.accounts) if self.accounts else None,
            "events": events,
        }
        return json.dumps(plain, indent=2) + "\n"

    def to_text(self) -> str:
        kinds = Counter(each.fault.kind for each in self.outcomes)
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        lines = [
            f"faults         {len(self.outcomes)} in {self.minutes:.1f} minutes: {listed}",
            "recovery       role         count  median   worst",
        ]
        for role, times in self.recovery.items():
            count, median, worst = times["count"], times["median"], times["worst"]
            lines.append(f"               {role:<12} {count:>5}  {median:>5.2f} s {worst:>5.2f} s")
        share = self.disturbed / self.quiet if self.quiet else 0.0
        lines += [
            f"longest pause  {self.longest_pause:.1f} s",
            f"steps/s        {self.quiet:,.0f} without faults, {self.disturbed:,.0f} with them "
            f"({share:.0%})",
        ]
        if self.accounts is not None:
            found = self.accounts.findings
            lines += [
                f"steps audited  {found.rows:,}: {found.lost} lost, {found.doubled} doubled, "
                f"{found.spliced} spliced, {found.damaged} damaged, {found.wrong_actions} with a "
                "wrong action",
                f"               killed agents lost {found.lost_ends} unacknowledged steps",
                f"episodes       {found.finished:,} finished, {found.cut_short:,} cut short; "
                f"{self.accounts.scores:,} scores written",
                f"replay ratio   {self.accounts.samples:,} sequences trained on, "
                f"{self.accounts.due:,.0f} due",
            ]
        cut = ", ".join(f"{count} {kind}" for kind, count in sorted(self.cut.items()))
        lines.append(f"cut            {cut or 'no'} connections")
        if sent := sum(each.sent for each in self.outcomes):
            lines.append(f"attacks        {sent:,} hostile requests")
        lines += [f"missed         {each}" for each in self.misses]
        lines += [f"BROKEN         {each}" for each in self.problems]
        if not self.problems:
            lines.append("Every promise has held.")
        return "\n".join(lines) + "\n"
