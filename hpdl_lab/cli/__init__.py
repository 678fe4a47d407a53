"""The command `hpdl`: `hpdl doctor`, `hpdl tune`, `hpdl cluster emulate`, `hpdl bench all_reduce`, and other benches.

Each family of commands is a file here with `add(commands)`, which declares the arguments and the function behind them.
Exit codes: 0 done, 1 could not be done (one sentence on stderr), 2 wrong usage, 130 interrupted.
"""

import argparse
import shlex
import sys

from . import bench, check, cluster, doctor, hub, plan, race, record, report, watch, weights

FAMILIES = (doctor, cluster, check, bench, record, weights, hub, plan, race, report, watch)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        arguments = parser().parse_args(argv)
        arguments.invocation = shlex.join(["hpdl", *(sys.argv[1:] if argv is None else argv)])
        return arguments.command(arguments)
    except KeyboardInterrupt:
        print("hpdl: interrupted", file=sys.stderr)
        return 130
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # what a user can mend; a bug shows its traceback
        print(f"hpdl: {_sentence(error)}", file=sys.stderr)
        return 1


def _sentence(error: Exception) -> str:
    """Return what an error says; for what the system refused, the file and why, without the number."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(prog="hpdl", description="A laboratory for distributed deep learning: `make lab`.")
    top.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for family in FAMILIES:
        family.add(commands)
    return top


class _Version(argparse.Action):
    """The option that reads the version when it is asked for: no other command waits for that."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        from .. import __version__

        print(f"hpdl_lab {__version__}")
        parser.exit()
