"""DreamerV3."""
