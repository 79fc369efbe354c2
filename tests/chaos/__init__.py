"""Fault injection: a whole fleet under faults, then an account of every stored step.

schedule   which faults, in which order
faults     how each is done, and when the fleet has recovered from it
fleet      the run, started as users start it
env        the environment, whose steps can be audited
audit      every stored step and every count, afterwards
report     the result
"""
