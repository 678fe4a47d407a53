"""`hpdl watch`: run anybody's script on its ranks, unchanged, and say what is wrong with it."""

from .launch import PATIENCE, run_watched, split
from .report import WatchReport, judge_run

__all__ = ["PATIENCE", "WatchReport", "judge_run", "run_watched", "split"]
