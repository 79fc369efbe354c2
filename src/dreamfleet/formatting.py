"""Numbers and times for terminals and pages."""

from __future__ import annotations

import math


def readable(value: float) -> str:
    """About four digits: 12,345,678 as 12.3M, 0.000123 as 1.23e-04."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return f"{value:.2e}"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if size >= limit:
            return f"{value / limit:.3g}{unit}"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def clock(seconds: float) -> str:
    """3:07, 1:02:03 or 3 d 4 h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
