"""Notebook 14: a slow script is repaired, on nodes that the text does not show; counters decide, not times."""

from __future__ import annotations

import math
from typing import Any

from ...performance.slow import STEPS, TEXTS, Counts, RankWork, count_runs, table_of_runs, train_quickly, train_slowly
from ...units import counted
from ..checkers import because
from ..ranks import alone, capital, number, real, type_text
from ..record import Answer, Broken, Exercise, Passed, Reason

JOBS = (RankWork(cores=12, ranks=3, rank=1), RankWork(cores=10, ranks=4, rank=3))
GRAPHS = 2  # the second one, if torch finds out by itself that the number of rows changes


def _check_train(fn: Answer) -> Passed:
    *_, got = [_check_job(fn, job) for job in JOBS]
    return Passed(
        f"the losses of the slow script, on {len(JOBS)} nodes",
        f"""{counted(got.graphs, "graph")} for {STEPS} steps, no graph break,
        {counted(got.synchronizations, "synchronization")}, {counted(got.threads, "thread")} on {JOBS[-1].cores} cores,
        no bytes waited for, and every text that is read is used""",
    )


def _check_job(fn: Answer, job: RankWork) -> Counts:
    """Raise Broken unless fn is right and quick on this node; return what it took."""
    where = f"on rank {job.rank} of a node with {counted(job.ranks, 'rank')} and {counted(job.cores, 'core')}"
    right = count_runs(train_quickly, job)  # before fn: the first compilation takes seconds
    got = alone(count_runs, fn, job, where=where)
    _check_losses(got, right, capital(where))
    for is_wrong, why in _faults(got, right):
        if is_wrong:
            text = f"{capital(where)}, the losses are right."
            raise Broken(str(because(why, text)), table_of_runs({"yours": got, "repaired": right}))
    return got


def _check_losses(got: Counts, right: Counts, where: str) -> None:
    """Raise Broken unless the script returned the loss of each step."""
    try:
        losses: list[Any] = list(got.losses)
        kept = any(getattr(loss, "requires_grad", False) for loss in losses)
        values = [real(loss.detach() if kept else loss) for loss in losses]
    except (TypeError, ValueError, RuntimeError, AttributeError):
        what = type_text(type(got.losses).__name__)
        raise Broken(f"returns: {where}, your function returned {what}: return a list of {STEPS} losses.") from None
    if len(values) != STEPS:
        said = counted(len(values), "loss", "losses")
        raise Broken(f"steps: {where}, there are {STEPS} batches, and you return {said}. Each step has one.")
    for k, (value, wanted) in enumerate(zip(values, right.losses, strict=True)):
        if not math.isclose(value, wanted, rel_tol=1e-5):
            text = f"{where}, the loss of step {k} should be {number(wanted)}, and you say {number(value)}."
            raise because(LATER if k else _why_first(value, got.job, right), text)
    if kept:
        raise Broken(f"""detach: {where}, the losses are right, but each still holds the graph of its step. What keeps
            the number and drops the graph?""")


LATER = "update: The first loss is right. What has to happen to weights and gradients between two steps?"


def _why_first(value: float, job: RankWork, right: Counts) -> Reason:
    """Return the reason why the loss of the first step is wrong."""
    mine, read = right.job.reads[:TEXTS], job.reads[:TEXTS]
    rows = sum(map(len, RankWork(1, 1, 0).read(mine)))
    counted_rows = rows * right.losses[0] / value if value > 0 else 0.0
    if counted_rows > rows + 0.5 and math.isclose(counted_rows, round(counted_rows), rel_tol=1e-5):
        return f"padding: The texts have {rows} rows, and your mean is over {counted_rows:.0f}. Is padding in it?"
    if read != mine:
        return f"""texts: The first texts that you read are {read}, but this rank has the texts {mine}. Which texts of
            a batch does the slow script use?"""
    return "loss: Change what the script waits for, but not what it computes."


def _faults(got: Counts, right: Counts) -> list[tuple[bool, Reason]]:
    """Return (whether the script has it, what shows it) for each fault."""
    job, read, used = got.job, len(got.job.reads), len(right.job.reads)
    return [
        (
            got.threads > job.cores,
            f"""threads: But each rank has {got.threads // job.ranks} threads. That makes {got.threads}, which take
            turns on {job.cores} cores. PyTorch takes all cores unless you say how many. How many are there for each
            rank?""",
        ),
        (
            got.threads < right.threads,
            f"""threads: But all ranks together have {counted(got.threads, "thread")} for {job.cores} cores. How many
            cores are there for each rank?""",
        ),
        (
            read > used,
            f"""reads: But the rank reads {read} texts and uses {used}: {read / used:.3g} for each one used. When do you
            know which ones you need?""",
        ),
        (
            job.pageable > 0,
            f"""copies: But the rank waits until {job.waited:,} bytes are copied from pageable memory. The driver copies
            them to pinned memory first. Could they be collected there?""",
        ),
        (
            job.waited > 0,
            f"""copies: The memory is pinned, but the rank still waits until {job.waited:,} bytes are copied. Does
            Python need to wait for that?""",
        ),
        (
            got.breaks > 0,
            f"""breaks: But loss_of has {counted(got.breaks, "graph break")}: its graph is cut into pieces, and Python
            runs in between. Which line of loss_of is no operation on tensors?""",
        ),
        (got.graphs == 0 < right.graphs, "graphs: But torch.compile recorded no graph: loss_of runs in eager mode."),
        (
            got.graphs > GRAPHS,
            f"""graphs: But torch.compile recorded {got.graphs} graphs in {STEPS} steps: another number of rows, another
            graph. How can one graph serve all of them?""",
        ),
        (
            got.synchronizations > 1,
            f"""synchronizations: But in {STEPS} steps Python reads numbers from tensors {got.synchronizations} times.
            On a GPU, each of these reads waits for all earlier work. When are the losses needed, and can one tensor
            hold them all?""",
        ),
    ]


EXERCISES = (Exercise("14.4", "why is it slow", train_quickly, 2, _check_train, scaffold=train_slowly),)
