"""Pipeline schedules as data: printed, validated, timed, exchanged with torch.distributed.pipelining.

schedule.py defines a schedule, one file per schedule holds the order of a rank, catalog.py names them. They are
executed by parallel/hybrid/model.py.
"""

from .catalog import CATALOG, build
from .evaluation import Evaluation, TimedAction, evaluate, summary
from .printing import over_time
from .schedule import KINDS, Action, Pair, Schedule, compact
from .strings import from_csv, from_strings, to_csv, to_strings
from .validation import validate

__all__ = [
    "CATALOG",
    "KINDS",
    "Action",
    "Evaluation",
    "Pair",
    "Schedule",
    "TimedAction",
    "build",
    "compact",
    "evaluate",
    "from_csv",
    "from_strings",
    "over_time",
    "summary",
    "to_csv",
    "to_strings",
    "validate",
]
