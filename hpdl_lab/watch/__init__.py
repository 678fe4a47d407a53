"""`hpdl watch`: run anybody's script on its ranks, unchanged, and say what is wrong with it."""

from .launch import PATIENCE, run, split
from .report import Report, judge

__all__ = ["PATIENCE", "Report", "judge", "run", "split"]
