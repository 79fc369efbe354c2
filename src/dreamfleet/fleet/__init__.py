"""The fleet as data (`workers`), who starts it (`launchers`) and who watches it (`supervisor`).

Nothing is imported here: every process of a fleet passes through this package when it starts.
"""
