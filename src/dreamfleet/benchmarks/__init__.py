"""Speed, measured: one module a subject, each with `run(quick) -> list[Row]`.

Figures are ratios within one run on one machine, because the same code on another day or another
machine gives other milliseconds. Peers are measured where their package is installed.
"""
