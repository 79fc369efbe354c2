"""These agents are tiny: they compile longer than they run."""

import quick_compiling  # noqa: F401
