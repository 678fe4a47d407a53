"""Ranks that are simulated in one process, on networks whose links are all known: `sim.run`."""

from ..base import PerRank
from .run import run

__all__ = ["PerRank", "run"]
