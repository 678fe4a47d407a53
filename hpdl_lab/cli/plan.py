"""`hpdl plan`: will a class fit on a node, what hurts first, and what to paste."""

import dataclasses
import os
import re
import sys

from .arguments import file

UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def add(commands):
    command = commands.add_parser("plan", help="will a class fit on a node, what hurts first, settings to paste")
    command.add_argument("--attendees", type=int, help="who come")
    command.add_argument("--node-cores", type=int, help="cores of one node")
    command.add_argument("--memory", help="of one node, with its unit: 256GB, or 12GiB")
    command.add_argument("--gpus", type=int, default=0, help="of one node (0)")
    command.add_argument("--engines", type=int, help="of each attendee (4, which the notebooks start)")
    command.add_argument("--measure", action="store_true", help="measure the constants on this machine first, 1 minute")
    command.add_argument("--save", type=file, metavar="FILE", help="where --measure writes (~/.hpdl/costs.json)")
    command.set_defaults(command=plan)


def plan(arguments):
    """Print plan and constants; exit code 1 where the class does not fit on one node."""
    from ..classroom import costs
    from ..classroom.plan import ENGINES, Plan
    from .plan_text import constants, text

    asked = (arguments.attendees, arguments.node_cores, arguments.memory)
    if None in asked and not (arguments.measure and asked == (None,) * 3):
        raise ValueError("a plan needs all three: hpdl plan --attendees 40 --node-cores 64 --memory 256GB")
    if arguments.save and not arguments.measure:
        raise ValueError("--save is where --measure writes: give both, or neither")
    nbytes = memory(arguments.memory) if arguments.memory else 0
    known = measured(arguments.save or costs.own_path()) if arguments.measure else costs.load()
    if arguments.attendees is None:
        print(constants(known))
        return 0
    engines = ENGINES if arguments.engines is None else arguments.engines
    made = Plan(known, arguments.attendees, arguments.node_cores, nbytes, arguments.gpus, engines)
    print(text(made), constants(known), sep="\n\n")
    if made.fits < made.attendees:
        print(
            f"hpdl: {made.fits:,} of {made.attendees:,} attendees fit on such a node: see what hurts first",
            file=sys.stderr,
        )
        return 1
    return 0


def memory(text):
    """Bytes of "256GB" (10^9) or "12GiB" (2^30). Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MGT]I?B)", text.strip().upper())
    if match is None:
        raise ValueError(f"memory is a number with its unit, such as 256GB (10^9 bytes) or 12GiB (2^30), got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def measured(path):
    """Measure the constants with one attendee on this machine, and write them to `path`."""
    from ..bench.markdown import write
    from ..classroom import drill

    constants = dataclasses.replace(drill.measure("hpdl plan --measure"), path=str(path))
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    write(path, constants.json())
    return constants
