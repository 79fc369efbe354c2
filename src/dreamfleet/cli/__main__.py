"""`python -m dreamfleet.cli`, for when the console script is not on the path."""

import sys

from dreamfleet.cli import main

sys.exit(main())
