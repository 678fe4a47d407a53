"""`hpdl bench hybrid`: a step of GPT-3 on 1,024 simulated GPUs, beside what has been published."""

from .arguments import file


def add(benches):
    command = benches.add_parser("hybrid", help="a step of GPT-3 on 1,024 simulated GPUs, beside published figures")
    command.add_argument("--markdown", type=file, metavar="FILE", help="write the table there, in place of the last")
    command.set_defaults(command=run)


def run(arguments):
    from ..bench import hybrid
    from ..bench.markdown import put

    rows, took, peak = hybrid.gpt3()
    if arguments.markdown:
        put(
            arguments.markdown,
            "hybrid",
            hybrid.text(rows, took, peak, "hpdl bench hybrid --markdown docs/measurements.md"),
        )
    return 0
