"""`hpdl bench pipeline`: a step of a pipeline, torch.distributed.pipelining's and ours."""

import sys

from .arguments import file, ranks


def add(benches):
    command = benches.add_parser("pipeline", help="a step of the same pipeline: torch.distributed.pipelining and ours")
    command.add_argument("--ranks", type=ranks, default=2, help="MPI ranks (2)")
    command.add_argument("--size", choices=("tiny", "small"), default="small", help="of the GPT (small)")
    command.add_argument("--batch", type=ranks, default=16, help="examples a step (16)")
    command.add_argument("--micro-batches", type=ranks, default=8, help="into which the batch is cut (8)")
    command.add_argument("--rounds", type=ranks, default=15, help="in which each contender takes a step (15)")
    command.add_argument("--schedule", default="all", metavar="NAMES", help="such as gpipe,1f1b (all)")
    command.add_argument("--json", type=file, metavar="FILE", help="write rows, machine and versions there")
    command.add_argument("--markdown", type=file, metavar="FILE", help="write the table there, in place of the last")
    command.set_defaults(command=pipeline)


def pipeline(arguments):
    from .. import bench
    from ..bench.pipeline import SCHEDULES

    names = SCHEDULES if arguments.schedule == "all" else tuple(arguments.schedule.split(","))
    task = arguments.ranks, arguments.size, arguments.batch, arguments.micro_batches, arguments.rounds
    command = "hpdl bench pipeline --ranks {} --size {} --batch {} --micro-batches {} --rounds {}".format(*task)
    command += "" if names is SCHEDULES else f" --schedule {arguments.schedule}"
    rows = bench.pipeline(*task, names, arguments.json, arguments.markdown, command=command)
    wrong = sum(row["wrong"] for row in rows)
    if wrong:
        print(f"hpdl: {wrong:,} gradients differ from those of torch: see the column #wrong", file=sys.stderr)
    return 1 if wrong else 0
