"""The attendee's verbs: `from hpdl_lab import lab`, then `lab.start(4)`, `lab.run(fn, x)`, `lab.stop()`."""

from .cluster import cluster, restart, run, start, stop

__all__ = ["cluster", "restart", "run", "start", "stop"]
