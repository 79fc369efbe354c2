"""Why a run makes no progress: who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_REPORTS_MISSED = 3
_DOING = {
    "actor": "the agent does not act: it starts, restores a checkpoint or hangs",
    "learner": "the learner does not train: it waits for its first batch, compiles or hangs",
    "replay": "the replay says nothing: it starts or hangs",
}


def why(status: Mapping[str, Any], away: Sequence[str], log_every: float) -> str:
    """One sentence for everybody who waits, as far as is known.

    Args:
        status: What the logger knows; `ROLE/waiting` are a role's own words, `ROLE/silence` the
            seconds since it last reported.
        away: Processes that do not run at the moment.
        log_every: Seconds between two reports of a role.
    """
    reasons = [f"{name} has failed and is about to be started again" for name in away]
    absent = {"actor", "learner"} if "agent" in away else set()
    absent |= {"replay"} & set(away)
    if "learner waited" in str(status.get("replay/waiting", "")):
        absent.add("learner")  # the replay speaks for it
    for role, doing in _DOING.items():
        if role in absent:
            continue
        if status.get(f"{role}/silence", float("inf")) > 1 + _REPORTS_MISSED * log_every:
            reasons.append(doing)
        elif words := status.get(f"{role}/waiting"):
            reasons.append(str(words).rstrip("."))
    return "; ".join(reasons) or "nobody says that it waits"
