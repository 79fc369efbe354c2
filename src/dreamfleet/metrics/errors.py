"""What can go wrong with metrics.

DreamfleetError
└── MetricsError
    └── MissingOutputError   an output's package is not installed; the message holds the command
"""

from dreamfleet.errors import DreamfleetError


class MetricsError(DreamfleetError):
    """Metrics that cannot be written or read."""


class MissingOutputError(MetricsError, ImportError):
    """An output whose package is not installed."""
