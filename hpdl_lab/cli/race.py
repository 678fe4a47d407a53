"""`hpdl race`: the plans in a file race, as by lab.race in a notebook."""

from __future__ import annotations

import argparse
from contextlib import suppress

from .arguments import Commands, own_engines, ranks


def add(commands: Commands) -> None:
    command = commands.add_parser("race", help="race with a plan: score = time x (1 + prediction error)")
    command.add_argument("file", metavar="FILE", help="TOML, with a table [simulated], [here], or both")
    command.add_argument("--league", choices=("simulated", "here"), help="only this table of the file")
    command.add_argument("--seed", type=int, help="seed of the failure and of the hidden text (drawn now)")
    command.add_argument("--rounds", type=ranks, default=3, help="trainings of the league here; the median counts (3)")
    command.set_defaults(command=race)


def race(arguments: argparse.Namespace) -> int:
    """Print each result; returns 0 if all have passed."""
    from .. import lab
    from ..race.here import HerePlan
    from ..race.plan import Disqualified, plan_of, read_plan

    tables = read_plan(arguments.file)
    passed = True
    for league in [arguments.league] if arguments.league else list(tables):
        how = {"seed": arguments.seed, "rounds": arguments.rounds}
        if league == "here":
            with own_engines():
                with suppress(Disqualified):  # lab.race says why, and needs no engines for that
                    lab.start(plan_of(HerePlan, tables.get(league, {})).ranks)
                result = lab.race(arguments.file, league, **how)
                lab.stop()
        else:
            result = lab.race(arguments.file, league, **how)
        print(result)
        passed &= result.passed
    return 0 if passed else 1
