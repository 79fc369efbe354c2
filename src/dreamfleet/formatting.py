"""Numbers as a person reads them."""

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
