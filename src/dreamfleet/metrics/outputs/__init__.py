"""Outputs: JSON lines, media files, trackers, Prometheus. A new one is a class (see `Output` in
`base`) in a module of its own."""
