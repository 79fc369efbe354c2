"""What can go wrong with a fleet.

DreamfleetError
└── FleetError    a process failed and the run ended because of it; shows the first error
"""

from dreamfleet.errors import DreamfleetError


class FleetError(DreamfleetError):
    """A process failed, and the run ended because of it."""
