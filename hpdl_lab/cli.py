"""The command `hpdl`: `hpdl doctor`, `hpdl tune`, `hpdl cluster emulate`, `hpdl bench all_reduce`, and other benches.

Exit codes: 0 done, 1 could not be done (one sentence on stderr), 2 wrong usage, 130 interrupted.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time

from . import __version__

DEFAULT_SIZES = "4,1KiB,256KiB,4MiB,64MiB"
TUNED_SIZES = "4,256,4KiB,64KiB,1MiB,4MiB"
FAMILY_SIZES = "1KiB,256KiB,8MiB"
RIVALS = ("mpi", "gloo")
HOW_TO_USE = """
In a notebook or a script, by the same user:   from hpdl_lab import lab; lab.start({n}); lab.run(fn, x)
A shell on a host:                             hpdl cluster shell host1    (then: tc -s qdisc show dev net0)
Ctrl-C ends engines and hosts."""


def main(argv=None):
    """Run one command; returns the exit code."""
    arguments = parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except KeyboardInterrupt:
        print("hpdl: interrupted", file=sys.stderr)
        return 130
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # what a user can mend; a bug shows its traceback
        print(f"hpdl: {error}", file=sys.stderr)
        return 1


def parser():
    top = argparse.ArgumentParser(prog="hpdl", description="A laboratory for distributed deep learning: `make lab`.")
    top.add_argument("--version", action="version", version=f"hpdl_lab {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("doctor", help="what this machine and build can do, with the reason for each no")
    command.set_defaults(command=doctor)

    clusters = commands.add_parser("cluster", help="emulated hosts").add_subparsers(required=True, metavar="WHAT")
    command = clusters.add_parser(
        "emulate", help="keep engines on emulated hosts until Ctrl-C, for notebooks and shells"
    )
    command.add_argument("--hosts", type=ranks, default=4, help="hosts (4)")
    command.add_argument("--link", default="1gbit", help="of each host, in both directions (1gbit)")
    command.add_argument("--engines", type=ranks, help="engines on all hosts together (one on each)")
    command.set_defaults(command=cluster_emulate)
    command = clusters.add_parser("shell", help="a shell on one of the emulated hosts that are up")
    command.add_argument("host", metavar="HOST", help="such as host2")
    command.set_defaults(command=cluster_shell)

    benches = commands.add_parser("bench", help="measure").add_subparsers(required=True, metavar="BENCH")
    command = benches.add_parser("all_reduce", help="time and bandwidth of all-reduce: ours against others")
    command.add_argument("--ranks", type=ranks, default=2, help="MPI ranks (2)")
    command.add_argument("--sizes", default=DEFAULT_SIZES, help=f"bytes per rank ({DEFAULT_SIZES})")
    command.add_argument("--against", type=rivals, default=RIVALS, help="of mpi, gloo; none for neither (mpi,gloo)")
    command.add_argument("--json", type=file, metavar="FILE", help="write rows, machine and versions there")
    command.set_defaults(command=bench_all_reduce)

    command = benches.add_parser("collectives", help="the whole family of algorithms for each of the eight collectives")
    command.add_argument("--ranks", type=ranks, default=4, help="MPI ranks (4)")
    command.add_argument("--sizes", default=FAMILY_SIZES, help=f"bytes of the whole vector ({FAMILY_SIZES})")
    command.add_argument("--collective", default="all", metavar="NAMES", help="such as all_reduce,broadcast (all)")
    command.add_argument("--where", choices=("here", "emulated"), default="here", help="emulated: a host for each rank")
    command.add_argument("--link", default="1gbit", help="of emulated hosts (1gbit)")
    command.add_argument("--json", type=file, metavar="FILE", help="write rows, machine and versions there")
    command.add_argument("--markdown", type=file, metavar="FILE", help="write the tables there, in place of the last")
    command.set_defaults(command=bench_collectives)

    command = benches.add_parser("reduction", help="the ladder of CUDA kernels that add a vector, on a GPU")
    command.add_argument("--sizes", default="1MiB,256MiB", help="bytes (1MiB,256MiB)")
    command.add_argument("--json", type=file, metavar="FILE", help="write rows, GPU and versions there")
    command.add_argument("--markdown", type=file, metavar="FILE", help="write the table there")
    command.set_defaults(command=bench_reduction)

    command = benches.add_parser("run", help="start of the engines and time of an empty lab.run")
    command.add_argument("--ranks", type=ranks, default=4, help="engines (4)")
    command.add_argument("--repeats", type=ranks, default=200, help="empty calls (200)")
    command.add_argument("--json", type=file, metavar="FILE", help="write the result there")
    command.set_defaults(command=bench_run)

    command = commands.add_parser("tune", help="measure every all-reduce here: which is best for which message size")
    command.add_argument("--ranks", type=ranks, default=4, help="engines (4)")
    command.add_argument("--sizes", default=TUNED_SIZES, help=f"bytes per rank ({TUNED_SIZES})")
    command.add_argument("--where", choices=("local", "emulated"), default="local", help="emulated: a host each")
    command.add_argument("--link", default="1gbit", help="of emulated hosts (1gbit)")
    command.add_argument("--save", type=file, metavar="FILE", help="write the choice there, for Selection.load")
    command.set_defaults(command=tune)
    return top


def ranks(text):
    """A number of ranks or repeats, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return int(text)


def rivals(text):
    """ "mpi,gloo" -> ("mpi", "gloo"); "none" -> ()."""
    names = () if text == "none" else tuple(text.split(","))
    unknown = [name for name in names if name not in RIVALS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(RIVALS)}, none")
    return names


def file(path):
    """A path that can be written: known before the measuring, not after it."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


def doctor(arguments):
    from . import features

    report = features.doctor()
    print(f"hpdl_lab {__version__}\n\n{report}")
    return 0 if report.ok else 1


def cluster_emulate(arguments):
    """Keep engines on emulated hosts until Ctrl-C, or until a notebook ends or replaces them."""
    from .engines.cluster import Cluster

    n = arguments.engines or arguments.hosts
    with Cluster.start(n, where="emulated", link=arguments.link, hosts=arguments.hosts) as cluster:
        if cluster.attached:
            raise RuntimeError(f"{cluster.layout} are up already: end them first, with lab.stop() in a notebook")
        cluster.show()
        print(HOW_TO_USE.format(n=n), flush=True)
        try:
            while cluster.alive():
                time.sleep(0.5)
            print("Ended by a notebook.")
        except KeyboardInterrupt:
            print("\nEnded.")
    return 0


def cluster_shell(arguments):
    """Become a shell on an emulated host."""
    from .engines import host_engine, session_dir

    path, number = session_dir.find()[0], arguments.host.removeprefix("host")
    if number not in map(str, range(host_engine.count(path))):
        raise RuntimeError(f"no emulated host {arguments.host} is up: hpdl cluster emulate makes host0, host1, ...")
    os.execv(sys.executable, [sys.executable, "-m", "hpdl_lab.engines.host_shell", path, number])


def bench_all_reduce(arguments):
    from . import bench
    from .collectives.sweep import parse_size

    sizes = [parse_size(text) for text in arguments.sizes.split(",")]
    rows = bench.all_reduce(arguments.ranks, sizes, arguments.against, arguments.json)
    wrong = sum(row["wrong"] for row in rows)
    if wrong:
        print(f"hpdl: {wrong:,} wrong elements: see the column wrong", file=sys.stderr)
    return 1 if wrong else 0


def bench_reduction(arguments):
    """Climb the ladder; exit code 1 where a kernel is wrong."""
    from .collectives.sweep import parse_size
    from .kernels import reduction

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


def bench_collectives(arguments):
    from . import bench
    from .collectives.expected import COLLECTIVES
    from .collectives.sweep import parse_size

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
    wrong = sum(row["wrong"] for row in rows)
    if wrong:
        print(f"hpdl: {wrong:,} wrong elements: see the column #wrong", file=sys.stderr)
    return 1 if wrong else 0


@contextlib.contextmanager
def emulated_hosts(ranks, link):
    """Engines of their own on `ranks` emulated hosts, as bench.collectives takes them."""
    from . import lab

    with tempfile.TemporaryDirectory(prefix="hpdl-", dir="/tmp") as place:
        os.environ["XDG_RUNTIME_DIR"] = place  # those of a notebook are left alone
        with lab.start(ranks, where="emulated", link=link):
            yield f"emulated hosts joined by {link} links", lambda f, *args: lab.run(f, *args, deadline=60).rows


def bench_run(arguments):
    """Start engines, call an empty function on all of them `repeats` times, and stop them."""
    from . import lab

    times_ms = []
    with tempfile.TemporaryDirectory(prefix="hpdl-", dir="/tmp") as place:
        os.environ["XDG_RUNTIME_DIR"] = place  # engines of its own: those of a notebook are left alone
        t0 = time.perf_counter()
        with lab.start(arguments.ranks):
            lab.run(nothing)
            start_s = time.perf_counter() - t0
            for _ in range(arguments.repeats):
                t0 = time.perf_counter()
                lab.run(nothing)
                times_ms.append((time.perf_counter() - t0) * 1e3)
    times_ms.sort()
    result = {
        "ranks": arguments.ranks,
        "start_s": round(start_s, 3),
        "repeats": arguments.repeats,
        "median_ms": round(statistics.median(times_ms), 3),
        "p25_ms": round(times_ms[len(times_ms) // 4], 3),
        "p75_ms": round(times_ms[3 * len(times_ms) // 4], 3),
    }
    print(f"start to first answer   {start_s:6.2f} s    {arguments.ranks} engines")
    print(
        f"empty lab.run, median   {result['median_ms']:6.2f} ms   p25 {result['p25_ms']:.2f}, "
        f"p75 {result['p75_ms']:.2f}, {arguments.repeats} calls"
    )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)
    return 0


def tune(arguments):
    """Measure on engines of its own, print the choice, and keep it where that is asked for."""
    from . import lab
    from .collectives.sweep import count_of, parse_size

    sizes = [parse_size(text) for text in arguments.sizes.split(",")]
    for size in sizes:
        count_of(size, "float32")  # raises before any engine has started
    emulated = {"link": arguments.link} if arguments.where == "emulated" else {}
    with tempfile.TemporaryDirectory(prefix="hpdl-", dir="/tmp") as place:
        os.environ["XDG_RUNTIME_DIR"] = place  # engines of its own: those of a notebook are left alone
        with lab.start(arguments.ranks, where=arguments.where, **emulated):
            chosen = lab.tune(sizes=sizes, deadline=60)
    print(chosen)
    if arguments.save:
        link = f" --link {arguments.link}" if emulated else ""
        made_by = f"hpdl tune --ranks {arguments.ranks} --sizes {arguments.sizes} --where {arguments.where}{link}"
        chosen.save(arguments.save, remark=f"{made_by}\nhpdl_lab {__version__}, {time.strftime('%Y-%m-%d')}")
    return 0


def nothing(comm):
    """The empty function of `hpdl bench run`."""
