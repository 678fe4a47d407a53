"""`hpdl tune`: which all-reduce is best here for which message size."""

import time

from .. import __version__
from . import private
from .arguments import file, ranks

SIZES = "4,256,4KiB,64KiB,1MiB,4MiB"


def add(commands):
    command = commands.add_parser("tune", help="measure every all-reduce here: which is best for which message size")
    command.add_argument("--ranks", type=ranks, default=4, help="engines (4)")
    command.add_argument("--sizes", default=SIZES, help=f"bytes per rank ({SIZES})")
    command.add_argument("--where", choices=("local", "emulated"), default="local", help="emulated: a host each")
    command.add_argument("--link", default="1gbit", help="of emulated hosts (1gbit)")
    command.add_argument("--save", type=file, metavar="FILE", help="write the choice there, for Selection.load")
    command.set_defaults(command=tune)


def tune(arguments):
    """Measure on engines of its own, print the choice, and keep it where that is asked for."""
    from .. import lab
    from ..collectives.sweep import count_of, parse_size

    sizes = [parse_size(text) for text in arguments.sizes.split(",")]
    for size in sizes:
        count_of(size, "float32")  # raises before any engine has started
    emulated = {"link": arguments.link} if arguments.where == "emulated" else {}
    with private.place(), lab.start(arguments.ranks, where=arguments.where, **emulated):
        chosen = lab.tune(sizes=sizes, deadline=60)
    print(chosen)
    if arguments.save:
        link = f" --link {arguments.link}" if emulated else ""
        made_by = f"hpdl tune --ranks {arguments.ranks} --sizes {arguments.sizes} --where {arguments.where}{link}"
        chosen.save(arguments.save, remark=f"{made_by}\nhpdl_lab {__version__}, {time.strftime('%Y-%m-%d')}")
    return 0
