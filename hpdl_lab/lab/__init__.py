"""The attendee's verbs: `from hpdl_lab import lab`, then `lab.start(4)`, `lab.run(fn, x)`, `lab.check(fn)` ..."""

from ..features import doctor
from .cluster import cluster, restart, run, running, start, stop
from .exercises import check, hint, solution
from .landscape import landscape
from .measure import measure, predict
from .scaling import scaling
from .steps import collectives, steps
from .timeline import timeline, traffic
from .train import train
from .tune import tune
from .zoo import zoo

__all__ = [
    "check",
    "cluster",
    "collectives",
    "doctor",
    "hint",
    "landscape",
    "measure",
    "predict",
    "restart",
    "run",
    "running",
    "scaling",
    "solution",
    "start",
    "steps",
    "stop",
    "timeline",
    "traffic",
    "train",
    "tune",
    "zoo",
]
