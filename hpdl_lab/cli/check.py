"""`hpdl check`: launch and judge a converted training script, as lab.check_script does in a notebook."""

from __future__ import annotations

import argparse

from .arguments import Commands


def add(commands: Commands) -> None:
    command = commands.add_parser("check", help="launch a converted script, such as train_ddp.py, and judge it")
    command.add_argument("file", metavar="FILE", help="the converted script")
    command.set_defaults(command=check)


def check(arguments: argparse.Namespace) -> int:
    """Print what lab.check_script says; 0 if the script is right."""
    from .. import lab

    try:
        result = lab.check_script(arguments.file)
    except LookupError as error:
        raise ValueError(str(error)) from None
    print(result)
    return 0 if result else 1
