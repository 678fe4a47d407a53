"""`hpdl race`: the plans in a file race, as by lab.race in a notebook."""

from __future__ import annotations

import argparse
from typing import Any

from .arguments import own_engines, ranks


def add(commands: Any) -> None:
    command = commands.add_parser("race", help="race with a plan: score = time x (1 + prediction error)")
    command.add_argument("file", metavar="FILE", help="TOML, with a table [simulated], [here], or both")
    command.add_argument("--league", choices=("simulated", "here"), help="only this table of the file")
    command.add_argument("--seed", type=int, help="of the failure and of the hidden text (drawn now)")
    command.add_argument("--rounds", type=ranks, default=3, help="trainings of the league here, the median counts (3)")
    command.set_defaults(command=race)


def race(arguments: argparse.Namespace) -> int:
    """Print each result; 0 if all have passed."""
    from .. import lab
    from ..race.plan import read

    tables = read(arguments.file)
    passed = True
    for league in [arguments.league] if arguments.league else list(tables):
        how = {"seed": arguments.seed, "rounds": arguments.rounds}
        if league == "here":
            entries = tables.get(league, {})
            sizes = [n for axis in ("dp", "pp", "tp") if isinstance(n := entries.get(axis, 1), int)]
            count = 1
            for n in sizes:
                count *= n
            with own_engines(), lab.start(max(1, count)):
                result = lab.race(arguments.file, league, **how)
        else:
            result = lab.race(arguments.file, league, **how)
        print(result)
        passed &= result.passed
    return 0 if passed else 1
