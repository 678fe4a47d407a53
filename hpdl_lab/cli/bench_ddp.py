"""`hpdl bench ddp`: a step of data-parallel training, PyTorch's and ours."""

import sys

from .arguments import file, ranks


def add(benches):
    command = benches.add_parser("ddp", help="a training step: PyTorch's DDP on gloo and on ours, and our strategies")
    command.add_argument("--ranks", type=ranks, default=2, help="MPI ranks (2)")
    command.add_argument("--size", choices=("tiny", "small"), default="small", help="of the GPT (small)")
    command.add_argument("--batch", type=ranks, default=8, help="examples a step over all ranks (8)")
    command.add_argument("--rounds", type=ranks, default=25, help="in which each contender takes a step (25)")
    command.add_argument("--json", type=file, metavar="FILE", help="write rows, machine and versions there")
    command.add_argument("--markdown", type=file, metavar="FILE", help="write the table there, in place of the last")
    command.set_defaults(command=ddp)


def ddp(arguments):
    from .. import bench

    task = arguments.ranks, arguments.size, arguments.batch, arguments.rounds
    command = "hpdl bench ddp --ranks {} --size {} --batch {} --rounds {}".format(*task)
    rows = bench.ddp(*task, arguments.json, arguments.markdown, command=command)
    wrong = sum(row["wrong"] for row in rows)
    if wrong:
        print(f"hpdl: {wrong:,} parameters differ from those of DDP on gloo: see the column #wrong", file=sys.stderr)
    return 1 if wrong else 0
