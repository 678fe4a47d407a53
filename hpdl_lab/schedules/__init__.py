"""Pipeline schedules as data: printed, validated, timed, exchanged with torch.distributed.pipelining.

schedule.py says what a schedule is, one file per schedule holds the order of a rank, catalog.py names them. What
executes them is parallel/pipeline.py.
"""

from .catalog import CATALOG, build
from .evaluation import Evaluation, Timed, evaluate
from .schedule import KINDS, Action, Schedule

__all__ = [
    "CATALOG",
    "KINDS",
    "Action",
    "Evaluation",
    "Schedule",
    "Timed",
    "build",
    "evaluate",
]
