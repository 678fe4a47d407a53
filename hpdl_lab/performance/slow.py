"""Slow training scripts, each with one fault, and the counters that show it: they count, and measure no time."""

from __future__ import annotations

import inspect
import io
import random
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

STEPS, TEXTS, WIDTH = 6, 2, 4  # texts: of one rank in one step; width: numbers for each token of a text
READING = "item tolist numpy cpu nonzero __array__ __bool__ __float__ __int__ __index__ __repr__ __format__".split()
LETTERS = "EACFBD"  # of the scripts, by the place of the fault
COUNTERS = ("syncs", "graphs", "breaks", "threads", "bytes waited for", "texts read")
FAULTS = {  # script: which counter, from 1, and why
    "A": (2, "dynamic=False: a graph for each shape"),
    "B": (5, "a copy from pageable memory, for which Python waits"),
    "C": (3, "a print in loss_of"),
    "D": (1, ".item() in each step"),
    "E": (4, "each rank takes all cores"),
    "F": (6, "each rank reads the whole batch, and drops what belongs to others"),
}
HEAD = ("script", "syncs", "graphs", "breaks", "threads", "cores", "bytes waited for", "texts read", "used")


if TYPE_CHECKING:

    class Weights(Tensor):
        """A Tensor that has a gradient when it is read, which type checkers do not know of a Tensor."""

        @property
        def grad(self) -> Tensor: ...
        @grad.setter
        def grad(self, value: Tensor | None) -> None: ...
        def __isub__(self, other: Tensor) -> Self: ...  # pyrefly: ignore[bad-override]


@dataclass
class RankWork:
    """The work of one rank of a node. The GPU is a stand-in: the CPU computes, and the copies are counted.

    cores, ranks: of the node; rank: this one; batches: the texts of each step by number, for all ranks together.
    """

    cores: int
    ranks: int
    rank: int
    reads: list[int] = field(default_factory=list, init=False)  # numbers of the texts
    pageable: int = field(default=0, init=False)  # bytes
    waited: int = field(default=0, init=False)  # bytes

    @property
    def batches(self) -> list[list[int]]:
        size = self.ranks * TEXTS
        numbers = random.Random(0).sample(range(STEPS * size), STEPS * size)
        return [numbers[step : step + size] for step in range(0, STEPS * size, size)]

    def weights(self) -> Weights:
        return cast("Weights", torch.full((WIDTH, WIDTH), 0.5, requires_grad=True))

    def read(self, numbers: Iterable[int]) -> list[Tensor]:
        """Read texts from the storage, (length, width) each."""
        new = list(numbers)
        self.reads += new
        return [torch.randn(5 + i * 7 % 13, WIDTH, generator=torch.Generator().manual_seed(i)) for i in new]

    def to_device(self, texts: list[Tensor], pin_memory: bool = False, non_blocking: bool = False) -> Tensor:
        """Collect texts in one tensor, (rows, width), and copy it; only from pinned memory without waiting."""
        x = torch.cat(texts)
        self.pageable += 0 if pin_memory else x.nbytes
        self.waited += 0 if pin_memory and non_blocking else x.nbytes
        return x


SHOWN = RankWork(cores=16, ranks=4, rank=0)


def train_slowly(job: RankWork) -> list[float]:
    """Train on the texts of one rank, one step for each batch."""
    torch.set_num_threads(job.cores)

    @partial(torch.compile, backend="eager", dynamic=False)
    def loss_of(x: Tensor, weights: Tensor) -> Tensor:
        hidden = (x @ weights).relu()
        print("forward")
        return (hidden - x).square().mean()

    weights, losses = job.weights(), []
    for batch in job.batches:
        texts = job.read(batch)[job.rank :: job.ranks]
        weights.grad = None
        x = job.to_device(texts)
        loss = loss_of(x, weights)
        loss.backward()
        with torch.no_grad():
            weights -= 0.1 * weights.grad
        losses.append(loss.item())
    return losses


def train_quickly(job: RankWork) -> list[float]:
    """Train on the texts of one rank, one step for each batch.

        one rank:  storage --read--> main memory --to_device--> GPU --loss_of--> losses

    The losses must not change. The all-reduce of gradients is left out.

    Args:    job: `job.cores`, `job.ranks`: how many a node has; `job.rank`: this rank.
             `job.batches`: for each step, the indices of the texts of all ranks.
             `job.read(indices)`: read these texts, (length, 4) each.
             `job.to_device(texts, pin_memory=False, non_blocking=False)`: copy texts to
             the GPU as one tensor, (rows, 4). pin_memory: collect the texts in pinned
             memory first. non_blocking: do not wait for the copy.
    Returns: the loss of each step.
    Budget:  at most one synchronization, at most two graphs, no graph break, and no
             bytes waited for. The threads of all ranks fill the cores of the node, with
             at most one thread on a core. Every text that is read is used.
             backend="eager" runs graphs as they are, without a compiler.
    """
    torch.set_num_threads(job.cores // job.ranks)

    @partial(torch.compile, backend="eager", dynamic=True)
    def loss_of(x: Tensor, weights: Tensor) -> Tensor:
        hidden = (x @ weights).relu()
        return (hidden - x).square().mean()

    weights, losses = job.weights(), []
    for batch in job.batches:
        texts = job.read(batch[job.rank :: job.ranks])
        weights.grad = None
        x = job.to_device(texts, pin_memory=True, non_blocking=True)
        loss = loss_of(x, weights)
        loss.backward()
        with torch.no_grad():
            weights -= 0.1 * weights.grad
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


class Counts(NamedTuple):
    """The losses that a script returned, and the counts while it ran."""

    losses: list[float]
    synchronizations: int
    graphs: int
    breaks: int
    threads: int  # of all ranks
    job: RankWork


class _Synchronizations(TorchFunctionMode):
    """A count of the calls by which Python reads a number from a tensor; on a GPU, each waits for all work before."""

    count = 0

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.count += getattr(func, "__name__", "") in READING
        return func(*args, **(kwargs or {}))


def count_runs(script: Callable[[RankWork], list[float]], job: RankWork) -> Counts:
    """Run a script twice: first compiled, to count graphs, then in eager mode, to count synchronizations."""
    import torch._dynamo as dynamo  # takes seconds
    from torch._dynamo.utils import counters

    before, job = torch.get_num_threads(), replace(job)
    dynamo.reset()
    counters.clear()
    compiled = torch.compile
    try:
        # whatever the script asks for
        torch.compile = lambda fn=None, **how: compiled(fn, **how | {"backend": "eager"})  # pyrefly: ignore[bad-assignment]
        torch.set_num_threads(job.cores)  # PyTorch's own choice on such a node
        losses, threads = script(job), torch.get_num_threads()
        graphs = counters["stats"]["unique_graphs"]
        breaks = max(sum(counters[kind].values()) for kind in ("graph_break", "resumes"))  # the first counts no `if`
        # set_stance is there since PyTorch 2.6; with `disable`, fullgraph=True raises
        new = hasattr(torch.compiler, "set_stance")
        eager = torch.compiler.set_stance("force_eager") if new else dynamo.config.patch(disable=True)
        with eager, _Synchronizations() as mode:
            script(replace(job))
    finally:
        torch.compile = compiled
        torch.set_num_threads(before)
    return Counts(losses, mode.count, graphs, breaks, threads * job.ranks, job)


def _scripts() -> dict[str, Callable[[RankWork], list[float]]]:
    """Return six scripts: train_quickly, each with one of the lines in which train_slowly differs from it."""
    quick, slow = (inspect.getsource(fn).rpartition('"""\n')[2].split("\n") for fn in (train_quickly, train_slowly))
    changes = [change for change in SequenceMatcher(None, quick, slow).get_opcodes() if change[0] != "equal"]
    found = {}
    for letter, (_, begin, end, first, last) in zip(LETTERS, changes, strict=True):
        scope = dict(globals())
        exec("\n".join(["def script(job):", *quick[:begin], *slow[first:last], *quick[end:]]), scope)
        found[letter] = scope["script"]
    return dict(sorted(found.items()))


def table_of_runs(counts: dict[str, Counts] | None = None) -> str:
    """Return the counters as lines of text: of these runs, or of the six scripts and of train_slowly."""
    if counts is None:
        with redirect_stdout(io.StringIO()):
            counts = {name: count_runs(fn, SHOWN) for name, fn in (_scripts() | {"all six": train_slowly}).items()}
    rows: list[tuple[str, ...]] = [HEAD]
    for name, (_, *numbers, job) in counts.items():
        rows.append((name, *(f"{n:,}" for n in (*numbers, job.cores, job.waited, len(job.reads), STEPS * TEXTS))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows)


def diagnosed(answers: dict[str, float]) -> str:
    """Return the fault of each script as lines of text, beside the number of the counter that was guessed."""
    lines, right = [], 0
    for script, (number, why) in FAULTS.items():
        mine = answers.get(script)
        right += mine == number
        found = "right" if mine == number else f"you said {mine}"
        lines.append(f"{script}: {number} {COUNTERS[number - 1]:17} {why:68} {found}")
    return "\n".join([*lines, f"{right} of {len(FAULTS)}"])
