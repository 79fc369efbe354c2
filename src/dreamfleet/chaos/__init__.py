"""Proof under fault: a whole fleet while everything goes wrong, and an account of every step.

schedule   which faults, in which order
faults     how each is done, and when the fleet has recovered from it
fleet      the fleet, in a process of its own
network    a proxy before each server
hostile    what strangers and holders of keys send
accounts   every stored step and every count, afterwards
report     what was seen
conductor  all of it together
"""
