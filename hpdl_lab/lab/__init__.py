"""The attendee's verbs: `from hpdl_lab import lab`, then `lab.start(4)`, `lab.run(fn, x)`, `lab.check(fn)` ...

A verb is imported when it is first used: many need torch or matplotlib, which take a second each; `lab.start` does not.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from ..comm.errors import explainers
from ..spelling import explain_spelling

explainers.add(explain_spelling)

VERBS = {  # {module: its verbs}
    "engines.doctor": ("doctor",),
    "verbs.batches": ("batches",),
    "verbs.cluster": ("cluster", "inject", "restart", "run", "running", "start", "stop"),
    "verbs.compare": ("compare",),
    "verbs.designs": ("designs",),
    "verbs.dualpipe": ("dualpipe",),
    "verbs.exercises": ("catch_up", "check", "check_script", "hint", "solution"),
    "verbs.explorers": ("explore",),
    "verbs.gossip": ("gossip",),
    "verbs.grid": ("search",),
    "verbs.guess": ("guess", "reveal"),
    "verbs.landscape": ("landscape",),
    "verbs.memory": ("memory",),
    "verbs.measure": ("measure", "ping_pong", "tune"),
    "verbs.picker": ("grid",),
    "verbs.pipeline": ("pipeline",),
    "verbs.race": ("race",),
    "verbs.replay": ("replay",),
    "verbs.roofline": ("roofline", "write_again"),
    "verbs.scaling": ("scaling",),
    "verbs.serve": ("serve",),
    "verbs.show": ("show",),
    "verbs.staging": ("staging",),
    "verbs.target": ("time_to_target",),
    "verbs.tensor": ("tensor",),
    "verbs.train": ("train",),
    "verbs.watching": ("watch",),
    "verbs.waterfall": ("waterfall",),
}
HOMES = {verb: module for module, verbs in VERBS.items() for verb in verbs}
__all__ = sorted(HOMES)

if TYPE_CHECKING:  # the same for editors and type checkers
    from ..engines.doctor import doctor
    from ..verbs.batches import batches
    from ..verbs.cluster import cluster, inject, restart, run, running, start, stop
    from ..verbs.compare import compare
    from ..verbs.designs import designs
    from ..verbs.dualpipe import dualpipe
    from ..verbs.exercises import catch_up, check, check_script, hint, solution
    from ..verbs.explorers import explore
    from ..verbs.gossip import gossip
    from ..verbs.grid import search
    from ..verbs.guess import guess, reveal
    from ..verbs.landscape import landscape
    from ..verbs.measure import measure, ping_pong, tune
    from ..verbs.memory import memory
    from ..verbs.picker import grid
    from ..verbs.pipeline import pipeline
    from ..verbs.race import race
    from ..verbs.replay import replay
    from ..verbs.roofline import roofline, write_again
    from ..verbs.scaling import scaling
    from ..verbs.serve import serve
    from ..verbs.show import show
    from ..verbs.staging import staging
    from ..verbs.target import time_to_target
    from ..verbs.tensor import tensor
    from ..verbs.train import train
    from ..verbs.watching import watch
    from ..verbs.waterfall import waterfall
else:

    def __getattr__(name: str) -> Callable[..., object]:
        """Import a verb that is first asked for. A notebook shows its errors without frames of this package."""
        if name not in HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from ..verbs.plain import plainly

        verb = globals()[name] = plainly(getattr(import_module(f"hpdl_lab.{HOMES[name]}"), name))
        return verb

    def __dir__() -> list[str]:
        return __all__
