"""`hpdl bench ddp`: one step of training the same GPT by PyTorch's DDP, on gloo and on ours, and by our strategies.

What communication costs is what a step takes longer than the same step without any: DDP with a hook that sends nothing,
our buckets with an all_reduce that does nothing. All of them take turns, and are subtracted round by round. First, all
contenders take a few steps from the same parameters, and must come to the same.
"""

import statistics

from . import launch
from .step_table import StepTable

LEARNING_RATE = 0.05
CHECKED_STEPS = 3
TOLERANCE = 1e-6  # of a parameter, where three ranks or more add in different orders
SILENT = {  # the same steps without communication, and who is compared with them
    "DDP, silent": ("DDP on gloo", "DDP on hpdl"),
    "ours, silent": ("bucketed", "overlapped"),
}
WITHOUT = {name: silent for silent, names in SILENT.items() for name in names}
COLUMNS = ("name", "step", "p25", "p75", "samples", "exposed", "p25", "p75", "in events", "peak memory", "#wrong")
UNITS = ("", "(ms)", "(ms)", "(ms)", "(1/s)", "(ms)", "(ms)", "(ms)", "(ms)", "(MiB)", "")
TABLE = "{:<12} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>10} {:>12} {:>7}"


# -- before the ranks start ------------------------------------------------------------------------------------------


def ddp(ranks, size, batch, rounds, json_path=None, markdown_path=None, command=""):
    """Race the contenders, print the table; returns the rows.

    Args:    ranks: number; size: of the GPT, a name in models/gpt.py; batch: examples over all ranks;
             rounds: in which every contender takes one step. json_path, markdown_path: files for rows and table.
             command: what made the table, to be written with it.
    Raises:  ValueError for arguments that make no sense; RuntimeError where the ranks end with an error.
    """
    if batch < ranks:
        raise ValueError(f"a batch of {batch} has no example for some of {ranks} ranks")
    launch.warn_of_too_many(ranks)
    about, rows, task = {}, [], [size, batch]
    for message in launch.on_ranks(ranks, "ddp", [[*task, rounds]]):
        if "about" in message:
            about = message["about"]
        else:
            rows.append(message)
    for row in rows:  # each in processes of its own, as memory that was in use once stays in the books
        if row["name"] in SILENT:
            continue
        messages = launch.on_ranks(ranks, "ddp_memory", [[*task, row["name"]]])
        row["peak_MiB"] = next(m["peak_MiB"] for m in messages if "peak_MiB" in m)
    title = f"gpt {size}, {rows[0]['parameters']:,} parameters, {batch} examples a step on {ranks} ranks"
    StepTable(COLUMNS, UNITS, TABLE, cells, verdicts).tell(rows, title, about, command, json_path, markdown_path)
    return rows


def cells(row):
    """One row as texts, in the order of COLUMNS."""
    found = [row["name"], *(f"{t:.2f}" for t in row["step_ms"]), f"{row['samples_per_s']:.1f}"]
    if row["name"] in SILENT:
        return (*found, *[""] * 6)
    inside = "" if row["in_events_ms"] is None else f"{row['in_events_ms']:.2f}"
    return (*found, *(f"{t:.2f}" for t in row["exposed_ms"]), inside, f"{row['peak_MiB']:.0f}", row["wrong"])


def verdicts(rows):
    """A sentence for each of ours: how it compares with DDP on gloo."""
    gloo = next(row for row in rows if row["name"] == "DDP on gloo")
    told = []
    for row in rows:
        if row["name"] in SILENT or row is gloo:
            continue
        speed, left = gloo["step_ms"][0] / row["step_ms"][0], row["exposed_ms"][0] / gloo["exposed_ms"][0]
        told.append(f"{row['name']}: {speed:.2f} times the samples/s of DDP on gloo, {left:.0%} of its exposed time.")
    return told


# -- on every rank ---------------------------------------------------------------------------------------------------


def on_ranks(comm, size, batch, rounds):
    """Check, then time all contenders in turns; rank 0 reports a row for each."""
    from ..trace import now_ns
    from .turns import SLOW, sample

    comm.trace.enabled = True  # what is exposed is told by events as well
    with groups(comm) as made:
        steps = {name: Step(comm, name, size, batch, made) for name in (*WITHOUT, *SILENT)}
        wrong = check(comm, steps)
        times, windows = {name: [] for name in steps}, {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                begin = now_ns()
                times[name].append(sample(comm, step, SLOW) / 1e6)
                windows[name].append((begin, now_ns()))
        for name in steps:
            times[name] = comm_max(comm, times[name])
        for name, step in steps.items():
            inside = None if name == "DDP on gloo" else exposed_in_events(comm, windows[name])
            if comm.rank == 0:
                found = {"name": name, "parameters": step.parameters, "wrong": wrong[name]}
                comm.report(**found, **summary(name, times, batch), in_events_ms=inside)
        for step in steps.values():
            step.stop()


def memory_on_ranks(comm, size, batch, name):
    """Rank 0 reports the most memory that a rank had while the contender `name` took steps, MiB."""
    import resource

    with groups(comm) as made:
        step = Step(comm, name, size, batch, made)
        for _ in range(CHECKED_STEPS):
            step()
        step.stop()
    peak = comm_max(comm, [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024])[0]
    if comm.rank == 0:
        comm.report(peak_MiB=round(peak, 1))


def groups(comm):
    """A context: {"gloo": process group, "hpdl": process group} of the ranks of `comm`."""
    from contextlib import contextmanager

    @contextmanager
    def both():
        import torch.distributed as dist

        from ..torch_backend import process_group

        with process_group(comm, "gloo") as gloo:
            yield {"gloo": gloo, "hpdl": dist.new_group(backend="hpdl", pg_options=comm)}

    return both()


class Step:
    """One contender's step of training, always on the same examples. made: see `groups`."""

    def __init__(self, comm, name, size, batch, made):
        import torch

        from .. import models
        from ..data.sharding import shard

        generator = torch.Generator().manual_seed(0)
        self.comm, self.name, self.model = comm, name, models.build("gpt", size)
        tokens = torch.randint(80, (batch, self.model.block + 1), generator=generator)
        mine = tokens[shard(torch.arange(batch), comm.rank, comm.size)]
        self.x, self.y, self.answers = mine[:, :-1], mine[:, 1:], batch * self.model.block
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.run, self.strategy = self.model, strategy_of(name)
        if name.startswith("DDP"):
            from torch.nn.parallel import DistributedDataParallel

            group = made["hpdl" if name.endswith("hpdl") else "gloo"]
            self.run = DistributedDataParallel(self.model, process_group=group, gradient_as_bucket_view=True)
            self.answers /= comm.size  # DDP averages where we add
            if name in SILENT:
                self.run.register_comm_hook(None, as_it_is)
        elif self.strategy:
            self.strategy.start(comm, self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)

    def __call__(self):
        from torch.nn.functional import cross_entropy

        span = self.comm.trace.span
        self.optimizer.zero_grad()
        with span("forward"):
            logits = self.run(self.x)
            loss = cross_entropy(logits.flatten(0, -2), self.y.flatten(), reduction="sum") / self.answers
        with span("backward"):
            loss.backward()
        with span("add gradients"):
            if self.strategy:
                self.strategy.add_gradients(self.comm, self.model)
        with span("update"):
            self.optimizer.step()

    def flat(self):
        """All parameters (N,), a copy."""
        import torch

        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    def stop(self):
        if self.strategy:
            self.strategy.stop()


def strategy_of(name):
    from ..parallel.data_parallel import DataParallelBucketed, DataParallelOverlapped

    if name == "ours, silent":
        return DataParallelBucketed(all_reduce=nothing)
    kinds = {"bucketed": DataParallelBucketed, "overlapped": DataParallelOverlapped}
    return kinds[name]() if name in kinds else None


def nothing(comm, x):
    """An all_reduce that does not communicate."""
    return x


def as_it_is(state, bucket):
    """A hook of DDP that does not communicate."""
    import torch

    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def check(comm, steps):
    """{name: parameters, on all ranks together, that are not those of DDP on gloo after a few steps}."""
    import torch

    for step in steps.values():
        for _ in range(CHECKED_STEPS):
            step()
    want, wrong = steps["DDP on gloo"].flat(), {}
    for name, step in steps.items():
        off = (step.flat() - want).abs() > (0.0 if comm.size == 2 else TOLERANCE)
        count = 0 if name in SILENT else int(off.sum())
        wrong[name] = int(comm.all_reduce(torch.tensor([count])))
    return wrong


def comm_max(comm, values):
    """The greatest over ranks of each of `values`, list of float."""
    import numpy as np

    return np.asarray(comm.all_gather(np.array(values))).max(axis=0).tolist()


def summary(name, times, batch):
    """Median and quartiles of the steps, and of what they take longer than those without communication."""
    longer = [a - b for a, b in zip(times[name], times[WITHOUT.get(name, name)], strict=True)]
    step_ms = quartiles(times[name])
    return {
        "step_ms": step_ms,
        "samples_per_s": round(batch * 1e3 / step_ms[0], 2),
        "exposed_ms": quartiles(longer),
    }


def quartiles(values):
    """[median, p25, p75]."""
    p25, median, p75 = statistics.quantiles(values, n=4, method="inclusive")
    return [round(median, 4), round(p25, 4), round(p75, 4)]


def exposed_in_events(comm, windows):
    """ms per step of this rank in which it waited for communication, by its events within `windows` (ns).

    gloo's own work inside DDP has no events.
    """
    from ..parallel.scaling.accounting import account

    events = [e for e in comm.trace.events if any(begin <= e.t0_ns <= end for begin, end in windows)]
    found = account([e for e in events if e.op != "barrier"])
    return round(found.exposed * found.seconds * 1e3, 4) if found else None
