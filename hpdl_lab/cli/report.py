"""`hpdl report`: one HTML file with what you did in the course."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from .arguments import Commands, file, folder


def add(commands: Commands) -> None:
    command = commands.add_parser("report", help="write one HTML file: exercises, guesses, figures, the race")
    command.add_argument(
        "file", nargs="?", type=file, default="hpdl_report.html", metavar="FILE", help="file to write (%(default)s)"
    )
    command.add_argument(
        "--home", type=folder, metavar="FOLDER", help="folder of another person's progress.jsonl (~/.hpdl)"
    )
    command.set_defaults(command=report)


def report(arguments: argparse.Namespace) -> int:
    """Write the page, and print its path."""
    from ..report import collect, read_curves  # here, because exercises take torch along
    from ..report.page import page
    from ..system import write_file
    from ..verbs.progress import FILE, progress, read_rows

    home = Path(arguments.home) if arguments.home else progress().path.parent
    if arguments.home and not (home / FILE).is_file():
        raise ValueError(f"{home} holds no {FILE}")
    text = page(collect(read_rows(home / FILE), read_curves(home)), time.strftime("%Y-%m-%d"))
    write_file(arguments.file, text)
    print(Path(arguments.file).absolute())
    return 0
