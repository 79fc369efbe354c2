"""What exists only to be fast on a processor."""
