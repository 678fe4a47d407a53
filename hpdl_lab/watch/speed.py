"""The time of a step, what it sends and what it holds: with the reasons why it is slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import psutil

from ..units import bytes_text, counted
from .finding import Finding
from .places import line_at
from .records import Event, RankRecord, WatchedRun, line_name
from .strategy import FEW, SUMS, ObservedStrategy, elements, is_float, nbytes

if TYPE_CHECKING:
    from .collectives import Entry

PHASES = ("data", "forward", "backward", "exposed", "optimizer")
LABEL = {"exposed": "exposed communication"}
WARM = 2  # steps that are not counted, if there are more
MUCH = 0.2  # of a step
MANY = 8  # steps by which a rank is called slow
SLOWER = 1.3  # times the median of the ranks
SMALL = 1 << 20  # bytes
TINY_STEP = 1e-3  # s; of shorter steps no time is judged


@dataclass
class _Times:
    """The median step of a rank, in s: parts of PHASES and "rest"; total."""

    rank: int
    parts: dict[str, float]
    total: float
    steps: int

    @property
    def own(self) -> float:
        """The time without waiting for others."""
        return self.total - self.parts["exposed"]


def _times_of(rank: RankRecord) -> _Times | None:
    """Return the median step of a rank, None if it has taken none."""
    steps = [event for event in rank.steps if event["step"] >= WARM] or rank.steps[1:]  # the first one starts up
    if not steps:
        return None
    total = median((event["till"] - event["at"] - event["ns"].get("observer", 0)) / 1e9 for event in steps)
    parts = {name: median(event["ns"].get(name, 0) / 1e9 for event in steps) for name in PHASES}
    return _Times(rank.number, {**parts, "rest": max(0.0, total - sum(parts.values()))}, total, len(steps))


def all_times(run: WatchedRun) -> list[_Times]:
    return [times for times in map(_times_of, run.ranks) if times is not None]


def findings(run: WatchedRun) -> list[Finding]:
    """Return the reasons why a step is slow, and what it holds."""
    strategy, times = ObservedStrategy(run), all_times(run)
    if not times:
        return []
    return [*_time(run, times, strategy), *traffic(run, strategy), *_habits(run), *memory(run, strategy)]


def _time(run: WatchedRun, times: list[_Times], strategy: ObservedStrategy) -> Iterator[Finding]:
    """Yield the parts of a step, and which of them is too long."""
    worst = max(times, key=lambda one: one.total)
    parts = ", ".join(f"{LABEL.get(name, name)} {1e3 * s:.1f}" for name, s in worst.parts.items())
    yield Finding("slow", "step", f"a step takes {1e3 * worst.total:.1f} ms, the median of {worst.steps}: {parts} ms.")
    if worst.total < TINY_STEP:
        return
    share = {name: median(one.parts[name] / one.total for one in times) for name in worst.parts}
    epoch = run.ranks[0].first("epoch")
    if share["data"] > MUCH:
        workers = epoch.get("workers", 0)
        yield Finding(
            "slow",
            "input",
            f"""{share["data"]:.0%} of a step wait for the DataLoader, with num_workers={workers}: more workers prepare
            batches meanwhile.""",
            place=epoch.get("place"),
        )
    own = median(one.own for one in times)
    late = max(times, key=lambda one: one.own)
    slow = late.own > SLOWER * _own_of_others(times, late) and late.own - own > TINY_STEP if len(times) > 1 else False
    if slow and not strategy.pipeline and _mostly_last(run, late.rank):
        others = _own_of_others(times, late)
        which = max(
            late.parts, key=lambda name: late.parts[name] - median(o.parts[name] for o in times if o is not late)
        )
        yield Finding(
            "slow",
            "straggler",
            f"""rank {late.rank} works {1e3 * late.own:.1f} ms in a step, the others {1e3 * others:.1f} ms and wait
            for it: most of the difference is in {LABEL.get(which, which)}.""",
            [late.rank],
        )
    threads = max(event.get("threads", 1) for rank in run.ranks for event in [rank.first("left")])
    cores = len(psutil.Process().cpu_affinity())
    if threads > 1 and threads * run.size > cores and not _on_gpu(run):
        yield Finding(
            "slow",
            "threads",
            f"""{run.size} ranks x {threads} threads share {cores} cores: torch.set_num_threads or OMP_NUM_THREADS,
            {max(1, cores // run.size)} here.""",
        )


def _mostly_last(run: WatchedRun, number: int) -> bool:
    """Return True if a rank works longest in three of four steps: one slow step of a busy machine does not count."""
    rows = [[_own_ns(event) for event in rank.steps[WARM:]] for rank in run.ranks]
    late = [rank.number for rank in run.ranks].index(number)
    steps = [*zip(*rows, strict=False)]
    return len(steps) >= MANY and sum(row[late] == max(row) for row in steps) >= 0.75 * len(steps)


def _own_ns(event: Event) -> int:
    """Return the ns of a step without waiting for others."""
    return int(event["till"] - event["at"] - event["ns"].get("exposed", 0) - event["ns"].get("observer", 0))


def _own_of_others(times: list[_Times], late: _Times) -> float:
    return median(one.own for one in times if one is not late)


def _on_gpu(run: WatchedRun) -> bool:
    return "nccl" in run.backend


def _in_a_step(strategy: ObservedStrategy) -> list[Entry]:
    """Return the collectives of rank 0 in one of the last steps, the one with the median number of them."""
    windows = sorted((rows[0] for rows in strategy.windows), key=len)
    return windows[len(windows) // 2] if windows else []


def traffic(run: WatchedRun, strategy: ObservedStrategy) -> Iterator[Finding]:
    """Yield the traffic of rank 0 in a step, next to the need of its strategy."""
    entries = _in_a_step(strategy)
    calls: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for entry in entries:
        key = (entry["op"], entry["group"])
        calls[key] += 1
        sizes[key] += nbytes(entry)
    if not calls:
        return
    groups = {group for _, group in calls}
    calls_text = [
        f"{op} {counted(n, 'call')}, {bytes_text(sizes[op, group])}" + (f" (group {group})" if len(groups) > 1 else "")
        for (op, group), n in calls.items()
    ]
    gradient_bytes, p = sum(x["bytes"] for x in strategy.parameters.values()), run.size
    needs = ""
    if strategy.data_parallel and not strategy.fsdp:
        needs = f""" Data parallelism needs one all_reduce of its gradients, {bytes_text(gradient_bytes)}: each rank
            sends
            2(p-1)/p = {2 * (p - 1) / p:.2f} times as much."""
    elif strategy.fsdp and strategy.data_parallel:
        whole = gradient_bytes * p
        needs = f""" FSDP needs its parameters gathered twice and its gradients scattered once, {bytes_text(whole)}
            each: 3(p-1)/p = {3 * (p - 1) / p:.2f} times as much is sent by each rank."""
    yield Finding("slow", "traffic", f"in a step rank 0 calls {'; '.join(calls_text)}.{needs}")
    sums = [entry for entry in entries if entry["op"] in SUMS and is_float(entry)]
    count = len(strategy.parameters)
    total = sum(map(nbytes, sums))
    if strategy.data_parallel and not strategy.fsdp:
        if strategy.by_hand and count >= 8 and len(sums) >= 0.9 * count:
            yield Finding(
                "slow",
                "per parameter",
                f"""{len(sums)} all_reduce calls in a step for {count} parameters, {bytes_text(total / len(sums))}
                each: every call costs its latency again. One flat buffer, or DDP's buckets of 25 MB that travel
                during backward.""",
                place=sums[0]["place"],
            )
        elif strategy.ddp and len(sums) > 4 and total / len(sums) < SMALL and len(sums) > total / (25 * SMALL) + 3:
            yield Finding(
                "slow",
                "buckets",
                f"""{len(sums)} buckets in a step, {bytes_text(total / len(sums))} each: every one costs its latency
                again. DDP(..., bucket_cap_mb=25), the default, makes one of 25 MB from them.""",
            )
        elif sum(nbytes(entry) for entry in sums if elements(entry) > FEW) > 1.5 * gradient_bytes:
            yield Finding(
                "slow",
                "twice sent",
                f"""{bytes_text(total)} are added over ranks in a step, but only {bytes_text(gradient_bytes)} of
                gradients are
                needed: is something averaged that was so already?""",
                place=sums[-1]["place"],
            )


def _habits(run: WatchedRun) -> Iterator[Finding]:
    """Find calls in each step that make the ranks or the GPU wait."""
    rank = run.ranks[0]
    steps = [event for event in rank.steps if event["step"] >= WARM]
    if len(steps) < 3:
        return
    items = Counter(key for event in steps for key in event["counts"] if key.startswith("item "))
    for key, n in items.most_common(1):
        if n >= 0.9 * len(steps):
            file, _, line = key.removeprefix("item ").rpartition(":")
            place = line_at(file, int(line))
            yield Finding(
                "slow",
                "item",
                f"""{line_name(place)} calls .item() in each step: on a GPU the CPU waits
                there until all kernels are done. Keep the tensor, and read it every hundred steps.""",
                place=place,
            )
    barriers = [e for e in rank.entries if e["op"] == "barrier" and steps[0]["at"] <= e["time_ns"] <= steps[-1]["till"]]
    if len(barriers) >= 0.9 * len(steps) and barriers[0]["place"]:
        yield Finding(
            "slow",
            "barrier",
            f"""{line_name(barriers[0]["place"])} calls dist.barrier() in each step: the all_reduce of the gradients
            makes ranks wait for each other already.""",
            place=barriers[0]["place"],
        )


def memory(run: WatchedRun, strategy: ObservedStrategy) -> Iterator[Finding]:
    """Yield the memory that a rank holds."""
    event = next(iter(run.ranks[0].all("optimizer")[-1:]), {})
    if not event:
        return
    from ..parallel.grid.memory import Memory, sharded  # imports torch, which the command starts without

    parameters = sum(p["bytes"] for p in run.ranks[0].model().get("parameters", {}).values())
    held = Memory(parameters, event["bytes"]["gradients"], event["bytes"]["state"], max(0, event["saved"]))
    rows = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        f"state of {event['kind']}": held.optimizer,
    }
    if event["saved"] >= 0:
        rows["kept for backward"] = held.activations
    text = f"a rank holds {bytes_text(held.total)}: {', '.join(f'{name} {bytes_text(n)}' for name, n in rows.items())}."
    if strategy.data_parallel and not strategy.fsdp:
        saves = [bytes_text(held.total - sharded(held, run.size, stage).total) for stage in (1, 2, 3)]
        text += f" On {run.size} ranks ZeRO-1 would save {saves[0]}, ZeRO-2 {saves[1]}, ZeRO-3 (FSDP2) {saves[2]}."
    if event["blocks"]:
        kinds, kept, given = zip(*event["blocks"], strict=True)
        saved = sum(kept) - sum(given) - max(kept)  # a block at a time is whole again in backward
        if saved > 0.1 * held.total:
            text += (
                f" torch.utils.checkpoint around each of the {len(kinds)} blocks ({', '.join(sorted({*kinds}))}), "
                f"which backward then computes again, would save {bytes_text(saved)}."
            )
    if held.activations > held.total / 2:
        text += " Most is kept for backward: a smaller batch keeps less."
    yield Finding("memory", "memory", text)
