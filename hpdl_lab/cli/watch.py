"""`hpdl watch`: run a script under observation, as torchrun does, and report what is wrong with it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..trace import save_chrome
from ..units import require_number
from .arguments import Commands

USAGE = "hpdl watch [--mpi] [--strict] [--json FILE] [--trace FILE] [OPTIONS OF torchrun] SCRIPT [ITS ARGUMENTS]"


def add(commands: Commands) -> None:
    """Add a command that takes every word as it is: `watch` separates torchrun's from the script's."""
    command = commands.add_parser(
        "watch",
        help="run any torchrun script, unchanged, and say what is wrong with it",
        prefix_chars="+",
        add_help=False,
    )
    command.add_argument("words", nargs="*")
    command.set_defaults(command=watch)


def _options() -> argparse.ArgumentParser:
    """Return the parser of our own options."""
    from ..watch import PATIENCE

    parser = argparse.ArgumentParser("hpdl watch", usage=USAGE, allow_abbrev=False)
    parser.add_argument("--mpi", action="store_true", help="launch by mpiexec, whose options follow: -n 4")
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 if it hangs, crashes or computes something else"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report there as JSON")
    parser.add_argument("--trace", metavar="FILE", type=Path, help="write a trace of the first steps for Perfetto")
    more = f"end ranks that wait for each other after S seconds ({PATIENCE:g})"
    parser.add_argument("--patience", metavar="S", type=float, default=PATIENCE, help=more)
    return parser


def watch(arguments: argparse.Namespace) -> int:
    """Run it, print the report to stderr, and return the exit code of the script; see --strict."""
    from ..watch import judge_run, run_watched, split

    before, script = split(arguments.words)
    own, launcher = _options().parse_known_args(before)
    require_number("--patience", own.patience, above=0)
    for path in filter(None, (own.json, own.trace)):
        if not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.absolute().parent} for {path.name}")
    wide = sys.stderr.isatty()

    def say(text: str) -> None:
        if wide and text:
            print(f"\r\x1b[2K{text}", end="\r", file=sys.stderr, flush=True)

    seen = run_watched([*launcher, *script], own.mpi, own.patience, say)
    found = judge_run(seen)
    print(f"\n{found}", file=sys.stderr)
    if own.json:
        own.json.write_text(json.dumps(found.as_dict(), indent=1))
    if own.trace:
        save_chrome(found.events(), own.trace)
    return 1 if seen.stalled or own.strict and found.strict else seen.exit_code
