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
    from .gossip import gossip
    from .grid import search
    from .landscape import landscape
    from .measure import measure, ping_pong, predict, tune
    from .picker import grid
    from .pipeline import pipeline
    from .plain import plainly
    from .scaling import scaling
    from .show import show
    from .tensor import tensor
    from .train import train

__all__ = [
    "check",
    "cluster",
    "designs",
    "doctor",
    "gossip",
    "grid",
    "hint",
    "inject",
    "landscape",
    "measure",
    "ping_pong",
    "pipeline",
    "predict",
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
