"""`hpdl bench`: what can be measured; `hpdl tune`: which all-reduce is best here."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from .. import __version__
from ..bench.report import Report, Row, Table, field
from .arguments import Commands, file, name_list, own_engines, ranks, sizes

if TYPE_CHECKING:
    from ..comm.base import Comm
    from ..parallel.data_parallel import Strategy

Option: TypeAlias = tuple[Callable[[str], object] | tuple[str, ...], object, str]  # type or choices, default, help


PLACES = {"engines": None, "emulated hosts": "1gbit"}  # name: link
POINTS = tuple((kind, p) for kind in ("strong", "weak") for p in (1, 2, 4))
BUCKETS = (200_000, 100_000)  # bytes, of gradients of 670,000
GUESS = {2: 1.8, 4: 3, 1024: 300}  # drawn in the figure, as an attendee's would be

LADDER = Table(
    [
        field("size", form=",", unit="B", width=12),
        field("type"),
        field("rung", width=4),
        field("kernel", "name", width=14, left=True),
        field("time", "time_us", ",.1f", unit="us"),
        field("GB/s", "GBps", ",.0f"),
        field("of bandwidth", "of_bandwidth", ".0%"),
        field("#wrong", "wrong", width=6),
        field("change", left=True),
    ]
)


def add(commands: Commands) -> None:
    benches = commands.add_parser("bench", help="measure").add_subparsers(required=True, metavar="BENCH")

    def bench(
        name: str,
        run: Callable[[argparse.Namespace], int],
        text: str,
        many: int = 0,
        files: tuple[str, ...] = ("json", "markdown"),
        **options: Option,
    ) -> argparse.ArgumentParser:
        command = benches.add_parser(name, help=text)
        if many:
            command.add_argument("--ranks", type=ranks, default=many, help=f"ranks ({many})")
        for option, (kind, default, help_) in options.items():
            how: dict[str, Any] = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
            default_text = ",".join(default) if isinstance(default, tuple) else default
            command.add_argument(
                f"--{option.replace('_', '-')}", default=default, help=f"{help_} ({default_text})", **how
            )
        for kind in files:
            what = {"json": "rows, machine and versions", "markdown": "tables, in place of the last ones"}[kind]
            command.add_argument(f"--{kind}", type=file, metavar="FILE", help=f"write to FILE: {what}")
        command.set_defaults(command=run)
        return command

    in_the_cycle = "the time added to a step that writes its tensor before and reads the result afterwards"
    against = (name_list, "mpi,gloo", "mpi, gloo, and for --cycle environments such as .venv-openmpi; or none")
    bench(
        "all_reduce",
        all_reduce,
        "time and bandwidth of all-reduce: ours against others",
        many=2,
        sizes=(sizes, "4,1KiB,256KiB,4MiB,64MiB", "bytes per rank"),
        against=against,
        rounds=(ranks, 3, "rounds of --cycle"),
    ).add_argument("--cycle", action="store_true", help=in_the_cycle)
    bench(
        "collectives",
        collectives,
        "the whole family of algorithms for each of the eight collectives",
        many=4,
        sizes=(sizes, "1KiB,256KiB,8MiB", "bytes of the whole vector"),
        collective=(name_list, "all", "names, such as all_reduce,broadcast"),
        where=(("here", "emulated"), "here", "emulated: a host for each rank"),
        link=(str, "1gbit", "links of emulated hosts"),
        against=against,
        rounds=(ranks, 3, "rounds of --cycle"),
    ).add_argument("--cycle", action="store_true", help=in_the_cycle)
    gpt = {"size": (("tiny", "small"), "small", "size of the GPT")}
    bench(
        "ddp",
        ddp,
        "a training step: PyTorch's DDP on gloo and on ours, and our strategies",
        many=2,
        **gpt,
        batch=(ranks, 8, "examples a step over all ranks"),
        rounds=(ranks, 25, "steps of each candidate, in turn"),
        device=(("cpu", "cuda"), "cpu", "device of the tensors"),
    )
    bench(
        "memory",
        memory,
        "a training step with sharded parameters: PyTorch's FSDP2 and our ZeRO3, on gloo and on ours",
        many=2,
        **gpt,
        batch=(ranks, 8, "examples a step over all ranks"),
        rounds=(ranks, 25, "steps of each candidate, in turn"),
    )
    bench(
        "pipeline",
        pipeline,
        "a step of the same pipeline: torch.distributed.pipelining and ours",
        many=2,
        **gpt,
        batch=(ranks, 16, "examples a step"),
        micro_batches=(ranks, 8, "micro-batches of a batch"),
        rounds=(ranks, 15, "steps of each candidate, in turn"),
        schedule=(name_list, "all", "names, such as gpipe,1f1b"),
    )
    bench(
        "inference",
        inference,
        "generating with one LLaMA on the same cores: transformers and our engine; then decode on ranks, and on gloo",
        many=2,
        size=(("small", "medium"), "medium", "size of the LLaMA"),
        requests=(ranks, 16, "requests of mixed lengths"),
        rounds=(ranks, 7, "times that each candidate generates"),
    )
    bench("hybrid", hybrid, "a step of GPT-3 on 1,024 simulated GPUs, with published figures", files=("markdown",))
    bench(
        "reduction",
        reduction,
        "the ladder of CUDA kernels that add a vector, on a GPU",
        sizes=(sizes, "1MiB,256MiB", "bytes"),
    )
    bench(
        "run",
        run,
        "start of the engines and time of an empty lab.run",
        many=4,
        files=("json",),
        repeats=(ranks, 200, "empty calls"),
    )
    command = bench(
        "scaling",
        scaling,
        "simulated over measured training steps, and the figure of scaling",
        files=("markdown",),
        rounds=(ranks, 3, "rounds; the median is shown"),
    )
    command.add_argument("--png", type=file, metavar="FILE", help="write the figure of the emulated hosts there")

    command = commands.add_parser("tune", help="measure every all-reduce here: which is best for which message size")
    command.add_argument("--ranks", type=ranks, default=4, help="engines (4)")
    command.add_argument("--sizes", type=sizes, default="4,256,4KiB,64KiB,1MiB,4MiB", help="bytes per rank")
    command.add_argument(
        "--where", choices=("local", "emulated"), default="local", help="emulated: a host for each engine"
    )
    command.add_argument("--link", default="1gbit", help="links of emulated hosts (1gbit)")
    command.add_argument("--save", type=file, metavar="FILE", help="write the choice there, for Selection.load")
    command.set_defaults(command=tune)


def _report_of(arguments: argparse.Namespace) -> Report:
    """Return the Report that was asked for."""
    return Report(arguments.invocation, getattr(arguments, "json", None), arguments.markdown)


def _code_of(rows: list[Row], what: str) -> int:
    """Return exit code 1 if something is wrong, with one sentence."""
    wrong = sum(row["wrong"] for row in rows)
    if wrong:
        print(f"hpdl: {wrong:,} {what}: see the column #wrong", file=sys.stderr)
    return 1 if wrong else 0


def all_reduce(arguments: argparse.Namespace) -> int:
    from ..bench import collectives

    if arguments.cycle:
        return _in_cycles(arguments, ("all_reduce",))
    rows = collectives.race_all_reduces(arguments.ranks, arguments.sizes, arguments.against, _report_of(arguments))
    return _code_of(rows, "wrong elements")


def _in_cycles(arguments: argparse.Namespace, names: tuple[str, ...]) -> int:
    """Measure what collectives add to a step; without names all that have a cycle."""
    from ..bench import cycle

    if getattr(arguments, "where", "here") != "here":
        raise ValueError("--cycle measures ranks that share memory: --where here")
    task = arguments.ranks, arguments.sizes, names or cycle.COLLECTIVES, arguments.against, arguments.rounds
    return _code_of(cycle.cycle(*task, report=_report_of(arguments)), "wrong elements")


def collectives(arguments: argparse.Namespace) -> int:
    from ..bench import collectives
    from ..collectives.expected import COLLECTIVES

    if arguments.cycle:
        return _in_cycles(arguments, () if arguments.collective == ("all",) else arguments.collective)
    chosen = COLLECTIVES if arguments.collective == ("all",) else arguments.collective
    emulated = arguments.where == "emulated"
    with _emulated_hosts(arguments.ranks, arguments.link) if emulated else contextlib.nullcontext() as where:
        rows = collectives.race_collectives(arguments.ranks, arguments.sizes, chosen, _report_of(arguments), where)
    return _code_of(rows, "wrong elements")


@contextlib.contextmanager
def _emulated_hosts(ranks: int, link: str) -> Generator[tuple[str, Callable[..., Iterator[Row]]]]:
    """Yield engines of their own on `ranks` emulated hosts, as bench.collectives takes them."""
    from .. import lab

    with own_engines(), lab.start(ranks, where="emulated", link=link):
        yield f"emulated hosts joined by {link} links", lambda f, *args: iter(lab.run(f, *args, deadline=60).rows)


def ddp(arguments: argparse.Namespace) -> int:
    from ..bench import ddp

    task = arguments.ranks, arguments.size, arguments.batch, arguments.rounds
    rows = ddp.ddp(*task, _report_of(arguments), arguments.device)
    return _code_of(rows, "parameters differ from DDP on gloo")


def memory(arguments: argparse.Namespace) -> int:
    from ..bench import fsdp

    rows = fsdp.race_memory(arguments.ranks, arguments.size, arguments.batch, arguments.rounds, _report_of(arguments))
    return _code_of(rows, "parameters differ from FSDP2 on gloo")


def pipeline(arguments: argparse.Namespace) -> int:
    from ..bench import pipeline

    chosen = pipeline.SCHEDULES if arguments.schedule == ("all",) else arguments.schedule
    task = arguments.ranks, arguments.size, arguments.batch, arguments.micro_batches, arguments.rounds
    return _code_of(pipeline.race_pipelines(*task, chosen, _report_of(arguments)), "gradients differ from torch's")


def inference(arguments: argparse.Namespace) -> int:
    from ..bench import decode, inference

    report = _report_of(arguments)
    rows = inference.inference(arguments.size, arguments.requests, arguments.rounds, report)
    print()
    rows += decode.race_decode(arguments.ranks, arguments.size, 3 * arguments.rounds, report._replace(json=None))
    return _code_of(rows, "tokens differ from transformers, or from gloo")


def hybrid(arguments: argparse.Namespace) -> int:
    from ..bench import hybrid

    hybrid.gpt3(_report_of(arguments))
    return 0


def reduction(arguments: argparse.Namespace) -> int:
    """Climb the ladder; exit code 1 if a kernel is wrong."""
    from ..kernels import on_gpu
    from ..kernels.reduction import Ladder

    ladder = Ladder()
    messages = [{"about": ladder.about()}, *ladder.rows(arguments.sizes)]
    if reason := on_gpu.why_not():
        print(f"the rungs in Python: not run: {reason}")
    else:
        messages += on_gpu.rows(sizes=arguments.sizes, bandwidth=ladder.bandwidth)
    return _code_of(LADDER.tell("sum of a vector on one GPU", messages, report=_report_of(arguments)), "wrong sums")


def run(arguments: argparse.Namespace) -> int:
    """Start engines, call an empty function on all of them `repeats` times, and stop them."""
    from .. import lab

    times_ms = []
    with own_engines():
        t0 = time.perf_counter()
        with lab.start(arguments.ranks):
            lab.run(_nothing)
            start_s = time.perf_counter() - t0
            for _ in range(arguments.repeats):
                t0 = time.perf_counter()
                lab.run(_nothing)
                times_ms.append((time.perf_counter() - t0) * 1e3)
    p25, median, p75 = statistics.quantiles(times_ms, n=4, method="inclusive")
    print(f"start to first answer   {start_s:6.2f} s    {arguments.ranks} engines")
    print(f"empty lab.run, median   {median:6.2f} ms   p25 {p25:.2f}, p75 {p75:.2f}, {arguments.repeats} calls")
    if arguments.json:
        found = {"start_s": start_s, "median_ms": median, "p25_ms": p25, "p75_ms": p75}
        asked = {"command": arguments.invocation, "ranks": arguments.ranks, "repeats": arguments.repeats}
        with open(arguments.json, "w") as written:
            json.dump(asked | {name: round(value, 3) for name, value in found.items()}, written, indent=1)
    return 0


def _nothing(comm: Comm) -> None:
    """Do nothing: an empty call is timed."""


def scaling(arguments: argparse.Namespace) -> int:
    """Measure and simulate each strategy on 1, 2 and 4 ranks of each place, `rounds` times."""
    from .. import lab
    from ..bench.collectives import report_about

    def messages() -> Iterator[Row]:
        for number, (place, link) in enumerate(PLACES.items()):
            with own_engines(), lab.start(4, where=link and "emulated", link=link):
                if number == 0:
                    yield from lab.run(report_about).rows
                for name, strategy in _strategies().items():
                    found = [lab.scaling(strategy=strategy, simulate=()).agreement() for _ in range(arguments.rounds)]
                    medians = {f"{kind} {p}": statistics.median(r[kind, p] for r in found) for kind, p in POINTS}
                    yield {"place": place, "name": name, **medians}
                if arguments.png and link:
                    lab.scaling(prediction=GUESS, strategy=_strategies()["flat, Python"]).save(arguments.png)

    ratios = [field(f"{kind} {p}", form=".2f") for kind, p in POINTS]
    table = Table([field("place", width=14, left=True), field("name", width=18, left=True), *ratios])
    table.tell("simulated over measured", messages(), report=_report_of(arguments))
    return 0


def _strategies() -> dict[str, Strategy]:
    """Return strategies: messages that hold up the rank, and in the background; of our ring in Python, and in C++."""
    from ..collectives import ring
    from ..parallel.data_parallel import DataParallel, DataParallelBucketed, DataParallelOverlapped

    return {
        "flat, Python": DataParallel(ring.all_reduce),
        "bucketed, C++": DataParallelBucketed(None, *BUCKETS),
        "overlapped, Python": DataParallelOverlapped(ring.all_reduce, *BUCKETS),
        "overlapped, C++": DataParallelOverlapped(None, *BUCKETS),
    }


def tune(arguments: argparse.Namespace) -> int:
    """Measure on engines of its own, print the choice, and keep it if that is asked for."""
    from .. import lab
    from ..collectives.sweep import count_of

    for size in arguments.sizes:
        count_of(size, "float32")  # raises before any engine has started
    emulated = {"link": arguments.link} if arguments.where == "emulated" else {}
    with own_engines(), lab.start(arguments.ranks, where=arguments.where, **emulated):
        chosen = lab.tune(sizes=arguments.sizes, deadline=60)
    print(chosen)
    if arguments.save:
        remark = f"{arguments.invocation}\nhpdl_lab {__version__}, {time.strftime('%Y-%m-%d')}"
        chosen.save(arguments.save, remark=remark)
    return 0
