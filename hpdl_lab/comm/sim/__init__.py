"""Ranks that are simulated in one process, on networks of which every link is known: `sim.run`."""

from ..base import PerRank
from .run import run

__all__ = ["PerRank", "run"]
