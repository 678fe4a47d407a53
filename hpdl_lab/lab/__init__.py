"""The attendee's verbs: `from hpdl_lab import lab`, then `lab.start(4)`, `lab.run(fn, x)`, `lab.check(fn)` ..."""

from ..engines.doctor import doctor
from .cluster import cluster, inject, restart, run, running, start, stop
from .designs import designs
from .exercises import catch_up, check, check_script, hint, solution
from .explorers import explore
from .gossip import gossip
from .grid import search
from .guess import guess
from .landscape import landscape
from .measure import measure, ping_pong, tune
from .picker import grid
from .pipeline import pipeline
from .plain import plainly
from .scaling import scaling
from .show import show
from .tensor import tensor
from .train import train

__all__ = [
    "catch_up",
    "check",
    "check_script",
    "cluster",
    "designs",
    "doctor",
    "explore",
    "gossip",
    "grid",
    "guess",
    "hint",
    "inject",
    "landscape",
    "measure",
    "ping_pong",
    "pipeline",
    "restart",
    "run",
    "running",
    "scaling",
    "search",
    "show",
    "solution",
    "start",
    "stop",
    "tensor",
    "train",
    "tune",
]

for _name in __all__:  # the border: whatever a verb raises, a notebook shows it without frames of this package
    globals()[_name] = plainly(globals()[_name])
