"""The attendee's verbs: `from hpdl_lab import lab`, then `lab.start(4)`, `lab.run(fn, x)`, `lab.check(fn)` ..."""

from ..features.freed_memory import keep_freed_memory
from ..features.torch_compiler import put_off_torch_compiler
from ..features.uncollected import uncollected

keep_freed_memory()  # this and the next as on engines, or a step of simulated ranks would take longer than theirs
put_off_torch_compiler()

with uncollected():  # a fifth of the time to the first answer of a notebook
    from ..engines.doctor import doctor
    from .cluster import cluster, inject, restart, run, running, start, stop
    from .designs import designs
    from .exercises import check, hint, solution
    from .graph import gossip, graph
    from .grid import grid
    from .landscape import landscape
    from .measure import measure, predict
    from .mesh import mesh
    from .network import network
    from .ping_pong import ping_pong
    from .pipeline import pipeline
    from .plain import plainly
    from .scaling import scaling
    from .schedule import schedule
    from .search import search
    from .steps import collectives, steps
    from .tensor import tensor
    from .timeline import horovod_timeline, timeline, traffic
    from .train import train
    from .tune import tune
    from .zoo import zoo

__all__ = [
    "check",
    "cluster",
    "collectives",
    "designs",
    "doctor",
    "gossip",
    "graph",
    "grid",
    "hint",
    "horovod_timeline",
    "inject",
    "landscape",
    "measure",
    "mesh",
    "network",
    "ping_pong",
    "pipeline",
    "predict",
    "restart",
    "run",
    "running",
    "scaling",
    "schedule",
    "search",
    "solution",
    "start",
    "steps",
    "stop",
    "tensor",
    "timeline",
    "traffic",
    "train",
    "tune",
    "zoo",
]

for _name in __all__:  # the border: whatever a verb raises, a notebook shows it without frames of this package
    globals()[_name] = plainly(globals()[_name])
