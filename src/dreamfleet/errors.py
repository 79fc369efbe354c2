"""The root of every error Dreamfleet raises on purpose.

    DreamfleetError
    ├── ConfigError       a setting that cannot work; the message names it and the fix
    └── one subtree a layer, drawn in its own `errors.py`

Whoever wants to show a clean sentence instead of a traceback catches `DreamfleetError`: its
message is written for the person, says what is wrong and what to do about it. Anything else that
escapes is a bug.
"""


class DreamfleetError(Exception):
    """Something a person can understand and fix."""


class ConfigError(DreamfleetError, ValueError):
    """A setting, or a combination of settings, that cannot work."""
