"""Collectives written as attendees write them: `f(comm, x)` over messages, with steps and bytes in the docstring."""
