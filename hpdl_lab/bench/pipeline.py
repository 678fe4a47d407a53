"""`hpdl bench pipeline`: a step of the same stages by our executor and by torch.distributed.pipelining on gloo.

Both have the same stages, schedule and micro-batches, and must come to the same gradients first. Then they take turns,
and are compared round by round. Memory is measured in processes of its own for each, as what was in use once stays in
the books.
"""

from . import launch
from .step_table import StepTable

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble_h1")
CHECKED_STEPS = 3
TOLERANCE = 1e-4  # of a parameter's largest gradient: torch divides by the micro-batches last, we first
COLUMNS = ("schedule", "name", "step", "p25", "p75", "of torch", "p25", "p75", "saved", "peak memory", "#wrong")
UNITS = ("", "", "(ms)", "(ms)", "(ms)", "", "", "", "(MiB by rank)", "(MiB by rank)", "")
PER_RANK = (("saved_MiB", 1), ("peak_MiB", 0))  # columns with a number for each rank, and their digits
TABLE = "{:<15} {:<6} {:>8} {:>8} {:>8} {:>9} {:>6} {:>6} {:>24} {:>20} {:>7}"


# -- before the ranks start ------------------------------------------------------------------------------------------


def pipeline(
    ranks, size, batch, micro_batches, rounds, names=SCHEDULES, json_path=None, markdown_path=None, command=""
):
    """Race the contenders for every schedule, print the table; returns the rows.

    Args:    ranks: stages of the pipeline, interleaved has two per rank; size: of the GPT, a name in models/gpt.py;
             batch: examples a step; rounds: in which every contender takes one step. json_path, markdown_path: files
             for rows and table; command: what made the table, to be written with it.
    Raises:  ValueError for arguments that make no sense; RuntimeError where the ranks end with an error.
    """
    from ..models import module_of
    from ..schedules import build

    if batch % micro_batches:
        raise ValueError(f"a batch of {batch} cannot be shared by {micro_batches} micro-batches of equal size")
    layers = module_of("gpt").SIZES[size]["layers"] + 4  # two tables, a norm and the head are layers, too
    for name in names:
        stages = build(name, ranks, micro_batches).stages
        if stages > layers:
            raise ValueError(f"the {size} gpt has {layers} layers, too few for the {stages} stages of {name}")
    launch.warn_of_too_many(ranks)
    about, rows, task = {}, [], [size, batch, micro_batches]
    for message in launch.on_ranks(ranks, "pipeline", [[*task, name, rounds] for name in names]):
        if "about" in message:
            about = message["about"]
        else:
            rows.append(message)
    for row in rows:
        run = [*task, row["schedule"], row["name"]]
        row |= next(m for m in launch.on_ranks(ranks, "pipeline_memory", [run]) if "peak_MiB" in m)
    parameters = rows[0]["parameters"]
    title = f"gpt {size}, {parameters:,} parameters, {batch} examples in {micro_batches} micro-batches on {ranks} ranks"
    StepTable(COLUMNS, UNITS, TABLE, cells, verdicts).tell(rows, title, about, command, json_path, markdown_path)
    return rows


def cells(row):
    """One row as texts, in the order of COLUMNS."""
    step = [f"{t:.2f}" for t in row["step_ms"]]
    ratio = [f"{r:.2f}" for r in row["of_torch"]] if row["of_torch"] else [""] * 3
    saved, peak = (" / ".join(f"{mib:.{digits}f}" for mib in row[key]) for key, digits in PER_RANK)
    return (row["schedule"], row["name"], *step, *ratio, saved, peak, row["wrong"])


def verdicts(rows):
    """A sentence for each schedule: how ours compares with torch's."""
    return [
        f"{row['schedule']}: our step takes {row['of_torch'][0]:.2f} times as long as torch's, median of the rounds."
        for row in rows
        if row["of_torch"]
    ]


# -- on every rank ---------------------------------------------------------------------------------------------------


def on_ranks(comm, size, batch, micro_batches, name, rounds):
    """Check, then time both contenders in turns; rank 0 reports a row for each."""
    from .ddp import comm_max, quartiles
    from .turns import SLOW, sample

    with contenders(comm, size, batch, micro_batches, name) as steps:
        wrong = check(comm, steps)
        times = {who: [] for who in steps}
        for i in range(rounds):
            for who in list(steps) if i % 2 else list(reversed(steps)):  # who is first changes
                times[who].append(sample(comm, steps[who], SLOW) / 1e6)
        for who in steps:
            times[who] = comm_max(comm, times[who])
        if comm.rank == 0:
            ratios = [ours / theirs for ours, theirs in zip(times["ours"], times["torch"], strict=True)]
            parameters = sum(p.numel() for p in steps["ours"].task.model.parameters())
            for who in steps:
                comm.report(
                    schedule=name,
                    name=who,
                    parameters=parameters,
                    step_ms=quartiles(times[who]),
                    of_torch=quartiles(ratios) if who == "ours" else None,
                    wrong=wrong[who],
                )


def memory_on_ranks(comm, size, batch, micro_batches, name, who):
    """Rank 0 reports, for each rank, the most MiB that autograd kept at once and that the process had."""
    import resource

    import numpy as np

    from ..parallel.grid.saved_bytes import SavedBytes

    with contenders(comm, size, batch, micro_batches, name, only=who) as steps:
        saved = SavedBytes(steps[who].params.values())
        for _ in range(CHECKED_STEPS):
            with saved:
                steps[who]()
    mine = [saved.most / 2**20, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]
    everybodys = np.asarray(comm.all_gather(np.array(mine)))
    if comm.rank == 0:
        comm.report(saved_MiB=everybodys[:, 0].round(3).tolist(), peak_MiB=everybodys[:, 1].round(1).tolist())


def contenders(comm, size, batch, micro_batches, name, only=None):
    """A context: {"torch": step, "ours": step}, or one of them; steps are called without arguments."""
    from contextlib import contextmanager

    @contextmanager
    def both():
        from ..comm.torch_group import process_group
        from ..schedules import build
        from .pipeline_steps import Ours, Task, Torchs

        task = Task(size, batch, build(name, comm.size, micro_batches))
        ours = Ours(comm, task)
        if only == "ours":
            yield {"ours": ours}
            return
        with process_group(comm, "gloo") as gloo:
            theirs = Torchs(comm, task, ours, gloo)
            yield {"torch": theirs} if only else {"torch": theirs, "ours": ours}

    return both()


def check(comm, steps):
    """{who: parameters, on all ranks together, whose gradient is not that of torch after a few steps}."""
    import torch

    for step in steps.values():
        for _ in range(CHECKED_STEPS):
            step()
    wrong = 0
    for name, param in steps["ours"].params.items():
        theirs = steps["torch"].params[name].grad
        wrong += int(((param.grad - theirs).abs() > TOLERANCE * theirs.abs().max()).sum())
    return {"torch": 0, "ours": int(comm.all_reduce(torch.tensor([wrong])))}
