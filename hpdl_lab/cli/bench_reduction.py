"""`hpdl bench reduction`: the ladder of CUDA kernels that add a vector."""

import json

from .arguments import file


def add(benches):
    command = benches.add_parser("reduction", help="the ladder of CUDA kernels that add a vector, on a GPU")
    command.add_argument("--sizes", default="1MiB,256MiB", help="bytes (1MiB,256MiB)")
    command.add_argument("--json", type=file, metavar="FILE", help="write rows, GPU and versions there")
    command.add_argument("--markdown", type=file, metavar="FILE", help="write the table there")
    command.set_defaults(command=reduction)


def reduction(arguments):
    """Climb the ladder; exit code 1 where a kernel is wrong."""
    from ..collectives.sweep import parse_size
    from ..kernels import reduction

    sizes = [parse_size(text) for text in arguments.sizes.split(",")]
    ladder, rows = reduction.Ladder(), []
    about = ladder.about()
    print(f"{about['gpu']}, {about['bandwidth_GBps']:,} GB/s\n\n{reduction.HEADER}")
    for row in ladder.rows(sizes):
        rows.append(row)
        print(reduction.line_of(row), flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({**about, "rows": rows}, file, indent=1)
    if arguments.markdown:
        with open(arguments.markdown, "w") as file:
            file.write(reduction.markdown(rows, about))
    return int(any(row["wrong"] for row in rows))
