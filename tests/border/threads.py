"""Collectives in shared memory with threads as ranks: each has a ShmGroup of its own over one memory. See run.py."""

import random
import threading
import time
import traceback

import numpy as np
from things import COUNTS, DTYPES, attempt, flaw, refused, values

NUMPY = tuple(dtype for dtype in DTYPES if dtype != "bfloat16")
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce", "gather", "scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
LARGE = 140_000  # elements: some chunks of the staging area
SECONDS = 60.0  # the longest that one case may take


class Plan:
    """What all ranks do in one case, which each works out for itself from the same random numbers."""

    def __init__(self, rng, size):
        self.rng, self.size = rng, size
        self.op = rng.choice(OPERATIONS)
        self.count = rng.choice((*COUNTS, LARGE))
        self.dtype = rng.choice(NUMPY)
        self.root = rng.randrange(size)
        self.odd_rank = rng.randrange(size)
        self.oddity = rng.choice(("", "", "", "", "flaw", "count", "dtype", "root", "op", "meeting"))
        self.offsets = [rng.choice((0, 0, 3)) for _ in range(size)]
        self.shared = [rng.random() < 0.5 for _ in range(size)]
        self.beside = [rng.choice(("", "", "wait", "look")) for _ in range(size)]  # how all_reduce is waited for there

    def x_of(self, rank, dtype=None, count=None):
        """What `rank` brings: (count,), or a row for each rank."""
        rows = self.op in ("reduce_scatter", "all_to_all", "scatter")
        count = (self.count if count is None else count) * (self.size if rows else 1)
        return ((np.arange(count) % 13 + 3 * rank) % 61).astype(dtype or self.dtype)

    def expected(self, rank):
        """What `rank` ends with; None where it gets nothing."""
        op, size, everybodys = self.op, self.size, [self.x_of(r) for r in range(self.size)]
        if op in ("reduce", "gather") and rank != self.root:
            return None
        if op in ("all_reduce", "reduce"):
            return sum(x.astype(np.int64) for x in everybodys).astype(self.dtype)
        if op == "broadcast":
            return everybodys[self.root]
        if op in ("all_gather", "gather"):
            return np.concatenate(everybodys)
        if op == "scatter":
            return everybodys[self.root].reshape(size, -1)[rank]
        if op == "reduce_scatter":
            return sum(x.astype(np.int64) for x in everybodys).astype(self.dtype).reshape(size, -1)[rank]
        return np.concatenate([x.reshape(size, -1)[rank] for x in everybodys])


def disagreement(plan):
    """Does the oddity make the ranks disagree?"""
    if plan.oddity == "root":
        return plan.op in ROOTED and plan.size > 1
    return plan.oddity in ("count", "dtype", "op", "meeting") and plan.size > 1


class Rank:
    """One of the threads."""

    def __init__(self, core, rank, size, memory, tensors, part):
        self.core, self.rank, self.size = core, rank, size
        self.group = core.ShmGroup(memory, rank, size)
        self.group.add(tensors, part)
        self.progress = core.Progress()
        self.mine = tensors.array(rank * part, part)

    def call(self, op, x, root, out_dtype, beside, seconds=0.02):
        """The collective, advanced until it is done; returns the result, or None where this rank gets nothing."""
        group, rank, size = self.group, self.rank, self.size
        out = None
        if op in ("all_gather", "gather"):
            out = np.zeros(size * x.size, out_dtype)
        elif op in ("reduce_scatter", "scatter"):
            out = np.zeros(x.size // size, out_dtype)
        elif op in ("all_to_all", "reduce"):
            out = np.zeros(x.size, out_dtype)
        if op in ("gather", "reduce") and rank != root:
            out = None
        if op == "all_reduce" and beside:
            self.finish_task(self.progress.all_reduce_in_memory(group, x), beside)
            return x
        rooted = [root] if op in ROOTED else []
        brought = None if op == "scatter" and rank != root else x
        args = [brought] if op in ("all_reduce", "broadcast") else [brought, out]
        done = getattr(group, op)(*args, *rooted, seconds, True)
        self.finish(done)
        return x if op in ("all_reduce", "broadcast") else out

    def finish_task(self, task, how):
        """Wait for it, and so advance it, or only look until another thread has finished it."""
        end = time.monotonic() + SECONDS
        while not task.ended if how == "look" else not task.wait(0.02, 1e-4, True):
            assert time.monotonic() < end, f"rank {self.rank} still waits for {task.missing()}"
            time.sleep(1e-4 if how == "look" else 0)
        assert task.progress and 0 < task.t0_ns <= task.t1_ns or task.calls()
        task.wait(0.0, 0.0, False)  # raises what it ended with

    def finish(self, done):
        end = time.monotonic() + SECONDS
        while not done:
            assert time.monotonic() < end, f"rank {self.rank} still waits for {self.group.missing()}"
            done = self.group.wait(0.02, 1e-4, True)

    def place(self, plan, x):
        """x, in shared memory where the plan says so."""
        offset = plan.offsets[self.rank] * x.itemsize
        if not plan.shared[self.rank] or plan.op not in ("all_reduce", "broadcast"):
            return x
        there = self.mine[offset : offset + x.nbytes].view(x.dtype)
        there[...] = x
        return there

    def act(self, plan):
        odd = plan.oddity if self.rank == plan.odd_rank else ""
        op, root, dtype, count = plan.op, plan.root, plan.dtype, plan.count
        if odd == "flaw":
            self.refuse(plan)  # and then does what the others wait for
        if odd == "count":
            count += 1
        if odd == "dtype":
            dtype = "float64" if dtype != "float64" else "int64"
        if odd == "root":
            root = (root + 1) % self.size
        if odd == "op":
            op = OPERATIONS[(OPERATIONS.index(op) + 1) % len(OPERATIONS)]
        x = self.place(plan, plan.x_of(self.rank, dtype, count if op == plan.op else None))
        if odd == "meeting":
            call = self.core.Call("barrier", 0, 0, -1)
            got, error = attempt(lambda: self.finish(self.group.barrier(call, 0.02, True)))
        else:
            if op != plan.op:
                x = np.zeros(self.size * 6, dtype)
            got, error = attempt(self.call, op, x, root, dtype, plan.beside[self.rank])
        if disagreement(plan):
            assert error and "the ranks disagree" in str(error), (error, vars(plan))
            return
        assert error is None, (error, vars(plan))
        want = plan.expected(self.rank) if plan.oddity != "meeting" else None
        assert (got is None) == (want is None) and (want is None or np.array_equal(got, want)), vars(plan)

    def refuse(self, plan):
        """A tensor that will not do is refused before anybody hears of it."""
        x, what = flaw(random.Random(plan.count), plan.count, plan.dtype)
        adds = plan.op in ("all_reduce", "reduce", "reduce_scatter")
        brings = plan.op != "scatter" or self.rank == plan.root
        if brings and refused(what, plan.op in ("all_reduce", "broadcast"), adds):
            out = values(random.Random(0), 3, plan.dtype)
            args = [x] if plan.op in ("all_reduce", "broadcast") else [x, out]
            root = [plan.root] if plan.op in ROOTED else []
            assert attempt(getattr(self.group, plan.op), *args, *root, 0.02, True)[1], (what, vars(plan))


def run(core, seed, size, cases):
    """Run this many cases on `size` threads; raises what the first of them raised."""
    part = 1 << 22
    memory = core.SharedMemory.create(core.ShmGroup.nbytes_for(size))
    tensors = core.SharedMemory.create(part * size)
    failed = []

    def live(rank):
        me = Rank(core, rank, size, memory, tensors, part)
        for i in range(cases):
            try:
                me.act(Plan(random.Random(f"{seed} {size} {i}"), size))
            except BaseException:
                failed.append(f"case {i} on thread {rank} of {size}:\n{traceback.format_exc()}")
            if failed:
                return

    ranks = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(size)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(600)
        assert failed or not thread.is_alive(), "a thread hangs"
    if failed:
        raise AssertionError("\n".join(failed))
