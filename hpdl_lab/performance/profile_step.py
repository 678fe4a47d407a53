"""A profile of the steps of a training, for any script that torchrun starts. It needs torch and nothing else.

    torchrun --standalone --nproc-per-node 2 profile_step.py train.py --its own arguments

The script runs as it is. After its first steps, some are timed and others are recorded by torch.profiler, in turns.
Then rank 0 prints the bars, whose sum is compared with the time of steps without a profiler, the MFU, and what to do
about the longest bars; the script goes on.
"""

import bisect
import functools
import os
import re
import runpy
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.flop_counter import FlopCounterMode

INPUT, HOST, MEMORY, MATMUL = "waiting for input", "Python and dispatch", "memory-bound kernels", "matrix products"
EXPOSED, OPTIMIZER, IMBALANCE = "exposed communication", "optimizer", "imbalance"
BARS = (INPUT, HOST, MEMORY, MATMUL, EXPOSED, OPTIMIZER, IMBALANCE)
FIXES = {
    INPUT: "DataLoader(num_workers=..., prefetch_factor=..., pin_memory=True), fewer and larger files",
    HOST: "torch.compile, a larger batch, no .item() or print of a tensor in the loop",
    MEMORY: "torch.compile, which fuses operations; 16 bits: half the bytes",
    EXPOSED: "DDP's bucket_cap_mb, no_sync() for accumulated gradients, a faster link",
    OPTIMIZER: "fused=True, or foreach=True, in the optimizer",
    IMBALANCE: "the same amount of work for each rank: batches of like length, no work of rank 0 alone",
}
SKIPPED, TIMED, WARMED, RECORDED = 3, 4, 1, 2  # steps: before the first round; then in each round
ROUNDS = 4
STEPS = SKIPPED + ROUNDS * (TIMED + WARMED + RECORDED)

STEP_REGION, INPUT_REGION, OPTIMIZER_REGION = "ProfilerStep", "enumerate(DataLoader)", "Optimizer."
MATMULS = re.compile(r"aten::(_?(add|ba?d?d?b|grouped_|scaled_)?mm\b|.*convolution|.*attention|_addmm_activation)")
COMMUNICATION = re.compile(r"(gloo|mpi|ucc):")
BEGIN, WAIT = "hpdl:begin", "hpdl:wait"  # of a back end whose communication torch.profiler does not see as a whole
MATMULS_ON_GPU = re.compile(r"gemm|cutlass|xmma|nvjet|conv|flash|fmha|attention", re.I)
OPTIMIZERS_ON_GPU = re.compile(r"multi_tensor_apply|adam|sgd", re.I)


class Span(NamedTuple):
    """A named piece of time. begin, end: in ns of the system's clock, which ranks of one host share."""

    begin: int
    end: int
    name: str


class Recording(NamedTuple):
    """The steps of a rank, timed and recorded.

    step_s: median of the steps without a profiler; quartiles: a quarter of them is shorter, and a quarter longer;
    bars: seconds per step, with all exposed communication in one bar; waits: [(begin, end, which communication)] of
    that bar; posted: when each communication began, in order; steps: how many were recorded; flops: of a step; peak:
    FLOP/s of one large product.
    """

    step_s: float
    quartiles: tuple[float, float]
    bars: dict[str, float]
    waits: list[tuple[int, int, int]]
    posted: list[int]
    steps: int
    flops: int
    peak: float


class Recorder:
    """Times and profiles of the steps between calls of `boundary`, which returns True when there are enough."""

    def __init__(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or torch's profiler prints a line at every start and end
        self.times: list[float] = []
        self.rounds: list[Recording] = []
        self.steps, self._flops = 0, 0
        self._counter = FlopCounterMode(display=False)
        self._profiler: profile | None = None
        self._cost = cost_of_recording()
        self._began = time.perf_counter()

    def boundary(self) -> bool:
        """End a step and begin the next one. Return True if all has been recorded."""
        seconds = time.perf_counter() - self._began
        self.steps += 1
        position = (self.steps - SKIPPED - 1) % (TIMED + WARMED + RECORDED)
        if self.steps == SKIPPED - 1:
            self._counter.__enter__()
        elif self.steps == SKIPPED:
            self._counter.__exit__(None, None, None)
            self._flops = self._counter.get_total_flops()
        elif self.steps > SKIPPED and 0 < position < TIMED:  # in the first one, ranks wait for the last reader
            self.times.append(seconds)
        if self._profiler is not None:
            self._profiler.step()
            if position == TIMED + WARMED + RECORDED - 1:
                self.rounds.append(read_profile(self._profiler, self._cost))
                self._profiler = None
        elif self.steps > SKIPPED and position == TIMED - 1:
            self._profiler = recorder()
            self._profiler.start()
        self._began = time.perf_counter()
        return self.steps == STEPS

    def result(self) -> Recording:
        """Join the rounds: medians of the steps without a profiler and of the bars."""
        waits, posted = [], []
        for r in self.rounds:
            waits += [(begin, end, which + len(posted)) for begin, end, which in r.waits]
            posted += r.posted
        bars = {name: statistics.median(r.bars[name] for r in self.rounds) for name in self.rounds[0].bars}
        steps = sum(r.steps for r in self.rounds)
        least, middle, most = statistics.quantiles(self.times, n=4)
        return Recording(middle, (least, most), bars, waits, posted, steps, self._flops, _measured_peak())


def recorder() -> profile:
    device = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    planned = schedule(wait=0, warmup=WARMED, active=RECORDED, repeat=1)
    return profile(activities=[ProfilerActivity.CPU, *device], schedule=planned)


def cost_of_recording(operations: int = 500) -> tuple[float, float]:
    """Return (ns that the profiler adds to an operation, ns of an operation that adds one number)."""
    x = torch.zeros(1)

    def run() -> float:
        began = time.perf_counter_ns()
        for _ in range(operations):
            x.add_(1)
        return time.perf_counter_ns() - began

    run()
    alone = min(run() for _ in range(3))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        recorded = min(run() for _ in range(3))
    times = [event.time_range.elapsed_us() for event in profiler.events() or () if event.name == "aten::add_"]
    return max(0.0, recorded - alone) / operations, 1e3 * statistics.median(times)


def read_profile(profiler: profile, cost: tuple[float, float]) -> Recording:
    """Sort the events of the profiler by threads, and find the bars."""
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    start = profiler.profiler.kineto_results.trace_start_ns()
    threads: dict[int, list[Span]] = {}
    device, communication = [], []
    for event in profiler.events() or ():
        begin, end = (start + int(1e3 * at) for at in (event.time_range.start, event.time_range.end))
        span = Span(begin, end, event.name)
        if event.device_type == DeviceType.CUDA:
            if not getattr(event, "is_user_annotation", False):  # regions of the host, drawn over their kernels
                (communication if event.name.startswith("nccl") else device).append(span)
        elif event.is_async and COMMUNICATION.match(event.name):
            communication.append(span)
        elif not event.is_async:
            threads.setdefault(event.thread, []).append(span)
    main = next(spans for spans in threads.values() if any(span.name.startswith(STEP_REGION) for span in spans))
    begun, ended = ([span for span in sorted(main) if span.name == name] for name in (BEGIN, WAIT))
    communication += [Span(first.begin, last.end, "hpdl") for first, last in zip(begun, ended, strict=False)]
    return analyze(main, device, sorted(communication), cost)


def analyze(
    main: Sequence[Span], device: Sequence[Span], communication: Sequence[Span], cost: tuple[float, float]
) -> Recording:
    """Divide the time of the recorded steps among the bars.

    Every moment belongs to one bar: to a kernel if the GPU computes; else to the innermost open operation of the
    thread `_main`. Between operations it belongs to a communication that ends before the next one begins.
    """
    recorded_ns, dispatch_ns = cost
    steps = [span for span in main if span.name.startswith(STEP_REGION)]
    begin, end = min(step.begin for step in steps), max(step.end for step in steps)
    bars, waits = dict.fromkeys(BARS, 0.0), []
    seen: set[int] = set()
    busy = _kernels(device)
    for begun, ended, stack in _innermost(main, begin, end):
        bar = _bar_of(stack)
        if device and bar != INPUT:
            bar = HOST  # operations of the host start kernels
        for inner_begin, inner_end, kernel in _covered(begun, ended, busy):
            seconds = inner_end - inner_begin
            if kernel is not None:
                bars[kernel] += seconds
            elif bar == HOST and (waits_in := _waiting_in(inner_begin, inner_end, communication)) is not None:
                since, until, which = waits_in
                waits.append((since, until, which))
                bars[HOST] += seconds - (until - since)
                bars[EXPOSED] += until - since
            else:
                bars[bar] += seconds
        if stack and id(stack[-1]) not in seen:
            seen.add(id(stack[-1]))
            bars[bar] -= recorded_ns
            if bar in (MEMORY, MATMUL):  # every operation takes as long as one on a single number
                moved = min(dispatch_ns - recorded_ns, ended - begun - recorded_ns)
                bars[bar] -= moved
                bars[HOST] += moved
    per_step = {name: max(0.0, ns) / 1e9 / len(steps) for name, ns in bars.items()}
    return Recording(0.0, (0.0, 0.0), per_step, waits, [span.begin for span in communication], len(steps), 0, 0.0)


def _innermost(spans: Sequence[Span], begin: int, end: int) -> Iterator[tuple[int, int, list[Span]]]:
    """Yield (begin, end, spans open in between, the innermost last), which together are the time from begin to end."""
    stack: list[Span] = []
    now = begin
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)) + [Span(end, end, "")]:
        while stack and stack[-1].end <= span.begin:
            until = min(stack[-1].end, end)
            if until > now:
                yield now, until, stack
                now = until
            stack.pop()
        until = min(span.begin, end)
        if until > now:
            yield now, until, stack
            now = until
        stack.append(span)


def _bar_of(stack: Sequence[Span]) -> str:
    """Return the bar of a moment of a thread: its region counts, then its innermost operation."""
    for span in stack:
        if span.name.startswith(INPUT_REGION):
            return INPUT
        if span.name.startswith(OPTIMIZER_REGION):
            return OPTIMIZER
    name = stack[-1].name if stack else ""
    if not name.startswith("aten::"):
        return HOST
    return MATMUL if MATMULS.match(name) else MEMORY


def _kernels(device: Sequence[Span]) -> list[tuple[int, int, str]]:
    """Return [(begin, end, bar)] of a GPU's kernels in order; time in which two overlap belongs to the first."""
    found, now = [], 0
    for span in sorted(device):
        begin = max(span.begin, now)
        if span.end > begin:
            matmul = MATMULS_ON_GPU.search(span.name)
            bar = OPTIMIZER if OPTIMIZERS_ON_GPU.search(span.name) else MATMUL if matmul else MEMORY
            found.append((begin, span.end, bar))
            now = span.end
    return found


def _covered(begin: int, end: int, busy: Sequence[tuple[int, int, str]]) -> Iterator[tuple[int, int, str | None]]:
    """Divide the time from begin to end: yield (begin, end, bar of the kernel that runs, or None)."""
    i = bisect.bisect_right(busy, begin, key=lambda kernel: kernel[1])
    while i < len(busy) and busy[i][0] < end:
        if busy[i][0] > begin:
            yield begin, busy[i][0], None
        yield max(begin, busy[i][0]), min(end, busy[i][1]), busy[i][2]
        begin = busy[i][1]
        i += 1
    if begin < end:
        yield begin, end, None


def _waiting_in(begin: int, end: int, communication: Sequence[Span]) -> tuple[int, int, int] | None:
    """Return (begin, end, index of the communication) of a thread's wait between begin and end, or None.

    A thread that waits goes on when the communication ends. So none waits for one that goes on after `end`.
    """
    ended = [(span.end, max(begin, span.begin), i) for i, span in enumerate(communication) if begin < span.end <= end]
    if not ended:
        return None
    until, _, which = max(ended)
    return min(since for _, since, _ in ended), until, which


def mean_bars(ranks: Sequence[Recording]) -> dict[str, float]:
    """Return seconds per step of each bar, the mean of all ranks.

    A rank that waits in a communication which another rank has not begun yet waits for that rank: imbalance. The rest
    is exposed communication. The clocks of all ranks have to agree, as they do on one host.
    """
    bars = {name: statistics.fmean(rank.bars[name] for rank in ranks) for name in BARS}
    if len({len(rank.posted) for rank in ranks}) == 1:
        latest = [max(times) for times in zip(*(rank.posted for rank in ranks), strict=True)]
        waited = sum(max(0, min(end, latest[which]) - begin) for rank in ranks for begin, end, which in rank.waits)
        moved = min(bars[EXPOSED], waited / 1e9 / sum(rank.steps for rank in ranks))
        bars[EXPOSED] -= moved
        bars[IMBALANCE] += moved
    return bars


def report_text(ranks: Sequence[Recording]) -> str:
    """Return the bars as lines of text, with the MFU and what to do about the longest bars."""
    step_s = statistics.fmean(rank.step_s for rank in ranks)
    bars = mean_bars(ranks)
    unexplained = step_s - sum(bars.values())
    rows = [*bars.items(), ("unexplained", unexplained), ("step", step_s)]
    lines = [
        f"{name:22}{1e3 * seconds:9.2f} ms {seconds / step_s:6.1%} {'#' * min(60, round(40 * seconds / step_s))}"
        for name, seconds in rows
    ]
    flops = statistics.fmean(rank.flops for rank in ranks)
    peak = statistics.fmean(rank.peak for rank in ranks)
    lines.append(f"FLOPs of a step {flops:.3g}, {flops / step_s / peak:.1%} of what one large product reaches here")
    longest = sorted((name for name in FIXES if bars[name] > 0.02 * step_s), key=lambda name: -bars[name])
    lines += [f"{n}. {name}: {FIXES[name]}" for n, name in enumerate(longest[:3], 1)]
    if abs(unexplained) > 0.05 * step_s:
        least, most = (1e3 * statistics.fmean(rank.quartiles[i] for rank in ranks) for i in (0, 1))
        lines.append(
            f"More than 5% is unexplained. Half of the steps took {least:.1f} to {most:.1f} ms: if that is a wide"
        )
        lines.append("range, other programs use the cores. Run it again.")
    return "\n".join(lines)


def _measured_peak(size: int = 1024) -> float:
    """Return the FLOP/s of one large product of matrices, in float32 on a CPU and in bfloat16 on a GPU."""
    cuda = torch.cuda.is_available()
    size *= 8 if cuda else 1
    a = torch.randn(size, size, device="cuda" if cuda else "cpu", dtype=torch.bfloat16 if cuda else torch.float32)
    times = []
    for _ in range(6):
        began = time.perf_counter()
        (a @ a)[0, 0].item()
        times.append(time.perf_counter() - began)
    return 2 * size**3 / min(times)


def _main() -> None:
    """Run the script of the command line; at its (STEPS + 1)th step, rank 0 prints the report."""
    sys.argv = sys.argv[1:]
    if not sys.argv:
        raise SystemExit("usage: torchrun --standalone --nproc-per-node 2 profile_step.py train.py [its arguments]")
    recorder = Recorder()

    def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        hook.remove()
        step = optimizer.step

        @functools.wraps(step)
        def followed(*args: Any, **kwargs: Any) -> object:
            result = step(*args, **kwargs)
            if recorder.steps < STEPS and recorder.boundary():
                _show(recorder.result())
            return result

        # A step ends outside the region that the profiler calls a step.
        optimizer.step = followed  # pyrefly: ignore[bad-assignment]

    hook = register_optimizer_step_post_hook(after_step)
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
    if recorder.steps < STEPS and os.environ.get("RANK", "0") == "0":
        print(f"profile_step.py: the script made fewer than {STEPS + 1} steps of an optimizer; so many are needed")


def _show(mine: Recording) -> None:
    """Print the report of all ranks on rank 0."""
    ranks = [mine]
    if dist.is_initialized():
        rows: list[tuple[Any, ...]] = [()] * dist.get_world_size()
        dist.all_gather_object(rows, tuple(mine))
        ranks = [Recording(*row) for row in rows]
    if os.environ.get("RANK", "0") == "0":
        print(report_text(ranks), flush=True)


if __name__ == "__main__":
    _main()
