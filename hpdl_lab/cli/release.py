"""`hpdl release`: an attendee's folder of notebooks, or a course of nbgrader, written or brought up to date."""

import sys

from .arguments import folder


def add(commands):
    command = commands.add_parser("release", help="write the exercises into a folder, or update what is there")
    command.add_argument(
        "folder", type=folder, metavar="FOLDER", help="of one attendee, or of a course: what was changed is kept"
    )
    kind = command.add_mutually_exclusive_group()
    kind.add_argument(
        "--from", dest="source", type=folder, metavar="DIR", help="exercise forms (notebooks/ of this clone)"
    )
    kind.add_argument("--nbgrader", action="store_true", help="FOLDER is a course: write the sources for nbgrader")
    command.set_defaults(command=release)


def release(arguments):
    from ..release import course, update

    said = course.write(arguments.folder) if arguments.nbgrader else update.write(arguments.folder, arguments.source)
    for sentence in said:
        print(sentence)
    if not said:
        print("Nothing to do: the notebooks are up to date.", file=sys.stderr)
    return 0
