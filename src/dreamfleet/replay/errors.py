"""What can go wrong in the replay.

DreamfleetError
└── ReplayError
    ├── SchemaError          steps, updates or files whose keys, dtypes or shapes differ
    ├── NotEnoughDataError   a sample was asked for before there was a sequence to give
    ├── BatchOrderError      a batch so late that it is unknown whether it was added before
    ├── StorageFullError     no room for another chunk; what was stored stays readable
    ├── DirectoryInUseError  another process writes to the directory
    ├── ReplayClosedError    the replay was used after `close`
    └── RateLimitedError     a wait of the rate limiter ran into its timeout
"""

from dreamfleet.errors import DreamfleetError


class ReplayError(DreamfleetError):
    """Anything the replay refuses to do."""


class SchemaError(ReplayError, ValueError):
    """Keys, dtypes or shapes that differ from the steps already stored."""


class NotEnoughDataError(ReplayError):
    """No sequence of the wanted length is stored yet."""


class BatchOrderError(ReplayError):
    """A batch number far behind the newest one of its source."""


class StorageFullError(ReplayError, OSError):
    """The disk, the memory or `max_bytes` has no room for another chunk."""


class DirectoryInUseError(ReplayError):
    """Another process holds the directory open for writing."""


class ReplayClosedError(ReplayError):
    """The replay was closed; open the directory again."""


class RateLimitedError(ReplayError, TimeoutError):
    """The rate limiter did not let the caller through in time."""
