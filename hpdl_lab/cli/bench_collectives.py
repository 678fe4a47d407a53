"""`hpdl bench all_reduce`, `hpdl bench collectives`: messages of real ranks, right first and timed second."""

import argparse
import contextlib
import sys

from . import private
from .arguments import file, ranks

DEFAULT_SIZES = "4,1KiB,256KiB,4MiB,64MiB"
FAMILY_SIZES = "1KiB,256KiB,8MiB"
RIVALS = ("mpi", "gloo")


def add(benches):
    command = benches.add_parser("all_reduce", help="time and bandwidth of all-reduce: ours against others")
    command.add_argument("--ranks", type=ranks, default=2, help="MPI ranks (2)")
    command.add_argument("--sizes", default=DEFAULT_SIZES, help=f"bytes per rank ({DEFAULT_SIZES})")
    command.add_argument("--against", type=rivals, default=RIVALS, help="of mpi, gloo; none for neither (mpi,gloo)")
    command.add_argument("--json", type=file, metavar="FILE", help="write rows, machine and versions there")
    command.set_defaults(command=all_reduce)

    command = benches.add_parser("collectives", help="the whole family of algorithms for each of the eight collectives")
    command.add_argument("--ranks", type=ranks, default=4, help="MPI ranks (4)")
    command.add_argument("--sizes", default=FAMILY_SIZES, help=f"bytes of the whole vector ({FAMILY_SIZES})")
    command.add_argument("--collective", default="all", metavar="NAMES", help="such as all_reduce,broadcast (all)")
    command.add_argument("--where", choices=("here", "emulated"), default="here", help="emulated: a host for each rank")
    command.add_argument("--link", default="1gbit", help="of emulated hosts (1gbit)")
    command.add_argument("--json", type=file, metavar="FILE", help="write rows, machine and versions there")
    command.add_argument("--markdown", type=file, metavar="FILE", help="write the tables there, in place of the last")
    command.set_defaults(command=collectives)


def rivals(text):
    """ "mpi,gloo" -> ("mpi", "gloo"); "none" -> ()."""
    names = () if text == "none" else tuple(text.split(","))
    unknown = [name for name in names if name not in RIVALS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(RIVALS)}, none")
    return names


def all_reduce(arguments):
    from .. import bench
    from ..collectives.sweep import parse_size

    sizes = [parse_size(text) for text in arguments.sizes.split(",")]
    rows = bench.all_reduce(arguments.ranks, sizes, arguments.against, arguments.json)
    return code_of(rows, "wrong")


def collectives(arguments):
    from .. import bench
    from ..collectives.expected import COLLECTIVES
    from ..collectives.sweep import parse_size

    sizes = [parse_size(text) for text in arguments.sizes.split(",")]
    names = COLLECTIVES if arguments.collective == "all" else arguments.collective.split(",")
    emulated = arguments.where == "emulated"
    command = f"hpdl bench collectives --ranks {arguments.ranks} --sizes {arguments.sizes}"
    command += "" if names is COLLECTIVES else f" --collective {arguments.collective}"
    command += f" --where emulated --link {arguments.link}" if emulated else ""
    with emulated_hosts(arguments.ranks, arguments.link) if emulated else contextlib.nullcontext() as where:
        rows = bench.collectives(
            arguments.ranks, sizes, names, arguments.json, arguments.markdown, where=where, command=command
        )
    return code_of(rows, "#wrong")


def code_of(rows, column):
    """Exit code 1 where elements are wrong."""
    wrong = sum(row["wrong"] for row in rows)
    if wrong:
        print(f"hpdl: {wrong:,} wrong elements: see the column {column}", file=sys.stderr)
    return 1 if wrong else 0


@contextlib.contextmanager
def emulated_hosts(ranks, link):
    """Engines of their own on `ranks` emulated hosts, as bench.collectives takes them."""
    from .. import lab

    with private.place(), lab.start(ranks, where="emulated", link=link):
        yield f"emulated hosts joined by {link} links", lambda f, *args: lab.run(f, *args, deadline=60).rows
