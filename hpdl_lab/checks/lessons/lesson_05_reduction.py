"""Notebook 05: a sum on the GPU, run thread by thread; races and bank conflicts are counted in the log of its accesses.

Numba, which takes 0.3 s to import, is imported by the first check.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from ...kernels import ladder, on_gpu
from ...units import counted
from ..ranks import alone, capital, number
from ..record import Answer, Broken, Exercise, Passed

if TYPE_CHECKING:
    from ...kernels.threads import Access, Launch

CASES = ((3, 1000), (4, 4096), (2, 100), (1, 1), (2, 0))  # (blocks, elements)
MOST_BARRIERS = 3
MEANS = {
    "race": "Nothing says which comes first: on a GPU the sum would be right in one run, and wrong in another.",
    "barrier": "cuda.syncthreads() waits for every thread of the block: it belongs outside of any `if` of a thread.",
    "shuffle": "All lanes of its mask have to call the shuffle, in the same line.",
    "returns": "A kernel returns nothing: it adds the sum to out[0].",
    "bounds": "A GPU reads what lies there, without an error.",
}


def _case_of(blocks: int, n: int) -> str:
    return f"with {counted(blocks, 'block')} of {ladder.THREADS} threads and {counted(n, 'element')}"


def _launch(fn: Answer, blocks: int, x: np.ndarray, where: str) -> tuple[Launch, float]:
    """Return (the Launch of fn on x, what it leaves in out[0]); raises Broken."""
    from ...kernels.threads import KernelError, Launch

    out = np.zeros(1, np.float32)

    def run() -> Launch | KernelError:
        try:
            return Launch(fn, blocks, ladder.THREADS, x, out)
        except KernelError as error:
            return error

    done = alone(run, where=where)
    if isinstance(done, KernelError):
        raise Broken(f"{done.failed}: {capital(where)}, {done}. {MEANS[done.failed]}")
    return done, float(out[0])


def _check_gpu_sum(fn: Answer) -> Passed:
    for blocks, n in CASES:
        where = _case_of(blocks, n)
        x = (np.arange(n) % 13 + 1).astype(np.float32)  # sums of these are exact in any order
        done, got = _launch(fn, blocks, x, where)
        _check_order(done, capital(where))
        _check_reads(done, n, capital(where))
        if got != x.sum():
            raise _why_sum(fn, done, n, f"{capital(where)}, out[0] should be {number(x.sum())} and is {number(got)}.")
        _check_budget(done, capital(where))
    from ...kernels import threads

    done, _ = _launch(fn, *(4, np.ones(4096, np.float32)), where="")
    costs = threads.counts(done)
    return Passed(
        f"the sum of up to 4,096 elements, in {len(CASES)} launches",
        f"4 blocks, 4,096 elements: {costs['atomics']} atomics where the naive kernel has 4,096, "
        f"{counted(costs['barriers'], 'barrier')}, {costs['sectors']} sectors of 32 bytes read: 512 hold x",
        f"{len(done.log):,} accesses looked at: 0 races, 0 bank conflicts",
        _on_this_gpu(fn),
    )


def _on_this_gpu(fn: Answer) -> str:
    """Return the fact about the compiled kernel, or why there is none; raise Broken if it is wrong."""
    if reason := on_gpu.why_not():
        return f"counted, not timed: {reason}"
    try:
        (row,) = on_gpu.rows((fn,))
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise Broken(f"gpu: Right on simulated threads, but numba cannot run it on this GPU: {text}") from error
    if row["wrong"]:
        raise Broken(f"""gpu: Right on simulated threads, but on this GPU the sum of {row["size"] >> 20} MiB is another
            one: does it hold for any number of blocks?""")
    return f"on this GPU: {row['size'] >> 20} MiB in {row['time_us']:,.0f} us, {row['GBps']:,.0f} GB/s"


def _check_order(done: Launch, where: str) -> None:
    """Raise Broken for a race, for shared memory that is read before it is written, or for a kernel that changes x."""
    from ...kernels import threads

    if found := next(threads.races(done.log), None):
        a, b = found
        if a.block == b.block:
            between = "with no barrier between them"
        else:
            a, b = (f"{access} (block {access.block})" for access in found)
            between = "and blocks come in any order: cuda.atomic.add is for what they share"
        raise Broken(f"race: {where}, {a}, and {b}, {between}. {MEANS['race']}")
    if early := next((access for access in done.log if access.fresh and access.kind == "read"), None):
        raise Broken(f"""unwritten: {where}, {early}, which no thread has written: shared memory holds what the last
            kernel left there. Let every thread write its element, even if it is 0.""")
    if changed := next((access for access in done.log if access.array.name == "x" and access.kind != "read"), None):
        raise Broken(f"input: {where}, {changed}: x belongs to the caller: leave it as it is.")


def _check_reads(done: Launch, n: int, where: str) -> None:
    """Raise Broken unless every element of x is read once, neighbors by neighbors."""
    from ...kernels import threads

    reads = [access for access in done.log if access.array.name == "x"]
    times = Counter(access.element for access in reads)
    if left := [i for i in range(n) if not times[i]]:
        all_threads = done.blocks * done.threads
        each = f"There are {all_threads:,} threads: how does each of them find its next element?"
        unread = counted(len(left), "element")
        raise Broken(f"tail: {where}, no thread reads {unread}, the first is x[{left[0]}]. {each}")
    if twice := next((i for i in range(n) if times[i] > 1), None):
        a, b = [access for access in reads if access.element == twice][:2]
        raise Broken(f"""twice: {where}, x[{twice}] is read {times[twice]} times, first by thread {a.thread} of block
            {a.block}, then by thread {b.thread} of block {b.block}: a sum waits for memory.""")
    (who, most), fair = _max_of(reads), -(-n // (done.blocks * done.threads))
    if most > 2 * fair:
        raise Broken(f"""work: {where}, thread {who[1]} of block {who[0]} reads {most:,} elements, and {fair:,} for
            each of the {done.blocks * done.threads:,} threads are enough: the others wait for it, or do nothing.""")
    for accesses in threads.by_warps(reads, shared=False):
        least = -(-len(accesses) * threads.WORD // threads.SECTOR)
        if threads.sectors(accesses) > least + 1:  # one more if the first does not begin a sector
            a, b = accesses[:2]
            raise Broken(f"""coalesced: {where}, in one instruction {a} and thread {b.thread} x[{b.element}]. The warp
                fetches {threads.sectors(accesses)} sectors of {threads.SECTOR} bytes for {len(accesses)} elements;
                if neighboring threads read neighboring elements, it fetches {least}.""")


def _max_of(reads: list[Access]) -> tuple[tuple[int, int], int]:
    """Return ((block, thread) that reads most, how many elements)."""
    return max(Counter((a.block, a.thread) for a in reads).items(), key=lambda item: item[1], default=((0, 0), 0))


def _why_sum(fn: Answer, done: Launch, n: int, text: str) -> Broken:
    """Return Broken for a wrong sum of elements that were all read once: which is not in it once, and who had it."""
    right, wrong = 0, n + 1  # the sum of so many ones, then zeros

    def sum_of(ones: int) -> float:
        return _launch(fn, done.blocks, (np.arange(n) < ones).astype(np.float32), where="")[1]

    while wrong - right > 1:
        middle = (right + wrong) // 2
        right, wrong = (middle, wrong) if sum_of(middle) == middle else (right, middle)
    if wrong > n:
        return Broken(f"sum: {text} The sum of ones is right: does your code change the numbers?")
    if wrong == 1 and (constant := sum_of(0)):
        return Broken(f"sum: {text} It is {number(constant)} for zeros: does every partial sum begin at 0?")
    times = sum_of(wrong) - (wrong - 1)
    owner = next(access for access in done.log if access.array.name == "x" and access.element == wrong - 1)
    return Broken(f"""sum: {text} x[{wrong - 1}], which thread {owner.thread} of block {owner.block} reads, is counted
        {number(times)} times: follow the partial sum of lane {owner.thread % ladder.WARP} of warp {owner.warp}.""")


def _check_budget(done: Launch, where: str) -> None:
    """Raise Broken for atomics, bank conflicts and barriers beyond the budget."""
    from ...kernels import threads

    atomics = [access for access in done.log if access.kind == "atomic"]
    if len(atomics) > done.blocks:
        of_one = sum(access.block == 0 for access in atomics)
        raise Broken(f"""atomics: {where}, the sum is right, but with {len(atomics):,} atomics, {of_one:,} of them in
            block 0: one for each block is enough. Atomics on one word wait for each other.""")
    for accesses in threads.by_warps(done.log, shared=True):
        if threads.conflicts(accesses):
            bank, words = max(threads.banks(accesses).items(), key=lambda item: len(item[1]))
            a, b = list(words.values())[:2]
            raise Broken(f"""banks: {where}, the sum is right, but in one instruction {a} and thread {b.thread}
                {b.array.name}[{b.element}], both in bank {bank}: the warp takes {1 + threads.conflicts(accesses)} turns
                in place of 1. Word i lies in bank i mod {threads.WARP}: let neighboring threads use neighboring
                words.""")
    if done.barriers > MOST_BARRIERS:
        raise Broken(f"""barriers: {where}, the sum is right, but with {done.barriers} barriers in a block, and
            {MOST_BARRIERS} are enough: the last {ladder.WARP} partial sums belong to one warp, which needs no barrier.
            What can its threads use instead of shared memory?""")


EXERCISES = (Exercise("5.3", "a sum on the GPU", ladder.gpu_sum, 3, _check_gpu_sum),)
