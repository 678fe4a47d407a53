"""`hpdl release`: an attendee's folder of notebooks, written or brought up to date."""

import sys


def add(commands):
    command = commands.add_parser("release", help="write the exercises into a folder, or update what is there")
    command.add_argument("folder", metavar="FOLDER", help="of one attendee; what they changed is kept")
    command.add_argument("--from", dest="source", metavar="DIR", help="exercise forms (notebooks/ of this clone)")
    command.set_defaults(command=release)


def release(arguments):
    from ..classroom import release

    said = release.write(arguments.folder, arguments.source)
    for sentence in said:
        print(sentence)
    if not said:
        print("Nothing to do: the notebooks are up to date.", file=sys.stderr)
    return 0
