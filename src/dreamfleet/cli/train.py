"""`dreamfleet train`."""

from dreamfleet.cli.console import say


def train() -> None:
    """Train an agent. The fleet is not built yet: this says so and trains nothing."""
    say(
        "There is nothing to train with yet: this version holds the foundation (packaging, "
        "transport). The fleet that trains comes next; see CHANGELOG.md."
    )
