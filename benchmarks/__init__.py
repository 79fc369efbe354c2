"""Speed, scale and growth: one module per benchmark, each with a `run(...)` that yields rows.

Every peer runs in the same run as what it is compared with, because the same code on another day
or another machine gives other milliseconds.
"""
