"""Collectives written as attendees write them, `f(comm, x)` over messages, with steps and bytes in the docstring.

Beside each function is its schedule as data (steps.py says what that is); cost.py and table.py hold all of them.
"""
