"""Notebook 15: a sharded checkpoint, by killing the job at every operation and loading what it leaves."""

from __future__ import annotations

import random
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from ...collectives.chunks import bounds
from ...comm import Results
from ...comm.base import Comm
from ...resilience.shards import ITEM, LATEST, Disk, Killed, load_range, read_latest, save_sharded
from ...units import counted
from ..layer import drawn
from ..ranks import Ledger, capital, simulate
from ..record import Answer, Broken, Exercise, Passed

FACTS = 1000  # bytes that a rank may write or receive in a save, besides its shard
STEPS = (20, 30, 45)  # that are saved before the kill
AGAIN = 10  # steps from the loaded one to the first that is saved after it, and to the second
SLOWEST = 9e-3  # s of an operation on the disk; the fastest takes a ninth
DONE = {"write": "writes {}", "finish": "is in the middle of writing {}", "rename": "renames to {}"}


class _Layout(NamedTuple):
    """The shard of each rank: (start, number of elements)."""

    spans: tuple[tuple[int, int], ...]

    @property
    def total(self) -> int:
        return sum(n for _, n in self.spans)


WHOLE, TWO = _Layout(((0, 700),)), _Layout(((450, 250), (0, 450)))
THREE, FOUR = _Layout(((200, 180), (380, 320), (0, 200))), _Layout(((0, 120), (430, 270), (120, 310), (430, 0)))
CASES = ((WHOLE, THREE), (THREE, FOUR), (FOUR, TWO))  # of the job that is killed, of the one after it


class _Saved(NamedTuple):
    """An act of a rank: it began to save a step, or returned; committed: the step that LATEST named then."""

    step: int
    returned: bool
    committed: int | None


def _saving(
    comm: Comm, fn: Answer, disk: Disk, layout: _Layout, steps: tuple[int, ...], life: int, ledger: Ledger
) -> None:
    """Save each step with the answer on every rank, on a disk that is slow for some ranks, and note it in `ledger`."""
    start, n = layout.spans[comm.rank]
    rng = random.Random(15 + 10 * life + comm.rank)
    notes = ledger.setdefault(comm.rank, [])
    for step in steps:
        mine = disk.of(comm, SLOWEST / rng.choice((1, 3, 9)))
        notes.append(_Saved(step, False, None))
        fn(comm, mine, step, _state(step, life, layout.total)[start : start + n].clone(), start, layout.total)
        notes.append(_Saved(step, True, _committed(disk)))


def _state(step: int, life: int, total: int) -> Tensor:
    """Return all elements after a step; a job that has been restarted comes to other ones."""
    return drawn(1000 * life + step, total)


def _committed(disk: Disk) -> int | None:
    """Return the step that LATEST names, or None."""
    try:
        return read_latest(disk.files[LATEST])[0]
    except (KeyError, ValueError):
        return None


def _check_save_sharded(fn: Answer) -> Passed:
    *_, run = [_check_undisturbed(fn, layout) for layout, _ in CASES]
    kills = sum(_check_killed(fn, *case, k) for case in CASES for k in _operations(fn, case[0]))
    return Passed(
        f"{counted(len(STEPS), 'save')} on 1, 3 and 4 simulated ranks, with uneven shards: loaded on another number",
        f"{kills} kills, one at each operation and in the middle of each write: a whole checkpoint, each time",
        "saved again after each kill, on another number of ranks: nothing is left of the killed job",
        f"bytes: each rank writes its shard, and {FACTS} bytes more at most",
        run=run,
    )


def _check_undisturbed(fn: Answer, layout: _Layout) -> Results:
    """Raise Broken unless several saves one after the other do what they should without a kill."""
    p, ledger, disk = len(layout.spans), Ledger(), Disk()
    where = f"with {counted(p, 'rank')}"
    try:
        run = simulate(p, _saving, fn, disk, layout, STEPS, 0, ledger, where=where)
    finally:
        _check_returns(ledger, where)
        _check_races(disk, where)
    _check_loaded(disk, layout, {STEPS[-1]: 0}, where)
    renames = [done for done in disk.log if done.what == "rename" and done.name == LATEST]
    if len(renames) > len(STEPS):
        ranks = len({done.rank for done in renames})
        raise Broken(f"""commit: {capital(where)}, {counted(ranks, "rank")} put {LATEST} in place, {len(renames)} times
            in {len(STEPS)} saves. How many renames does a save need?""")
    for r, (_, n) in enumerate(layout.spans):
        moved = {"receives": sum(e.nbytes for e in run.events if e.op == "recv" and e.rank == r)}
        for what in ("write", "read"):
            moved[f"{what}s"] = sum(done.nbytes for done in disk.log if done.rank == r and done.what == what)
        for what, nbytes in moved.items():
            if nbytes > len(STEPS) * (n * ITEM + FACTS):
                raise Broken(f"""memory: {capital(where)}, rank {r} {what} {nbytes // len(STEPS):,} bytes in a save, and
                    its shard has {n * ITEM:,}. No rank has room for all shards. Which rank can do this part
                    instead?""")
    there: dict[str, int] = {}
    for done in disk.log:
        if done.what == "write":
            there[done.name] = done.nbytes
        elif done.what == "rename":
            there[done.name] = there.pop(done.old, 0)
        elif done.what == "remove":
            there.pop(done.name, None)
        if sum(there.values()) > 2 * layout.total * ITEM + 3 * FACTS:
            raise Broken(f"""space: {capital(where)}, more than two checkpoints are on the disk at once. There is
                room for two. Which files are not needed any more, and from when on?""")
    return run


def _check_returns(ledger: Ledger, where: str) -> None:
    for r, notes in ledger.items():
        for note in notes:
            if note.returned and (note.committed or 0) < note.step and any(n.committed for n in notes):
                raise Broken(f"""early: {capital(where)}, the save of step {note.step} returns on rank {r}, and
                    {LATEST} still names {f"step {note.committed}" if note.committed else "no step"}.""")


def _check_races(disk: Disk, where: str) -> None:
    """Raise Broken if a file was removed between its writing and the commit that lists it."""
    commits = [i for i, done in enumerate(disk.log) if done.name == LATEST and done.what == "rename"]
    manifests = {LATEST, *(disk.log[i].old for i in commits)}
    for i, done in enumerate(disk.log):
        before = max([0, *(c for c in commits if c < i)])
        if done.what == "remove" and any(o.name == done.name and o.what == "write" for o in disk.log[before:i]):
            if done.name not in manifests and any(c > i for c in commits):
                raise Broken(f"""race: {capital(where)}, rank {done.rank} removes {done.name} just after it was written
                    for the next checkpoint. Which ranks may already be in the next save when you remove files?""")


def _operations(fn: Answer, layout: _Layout) -> list[int]:
    """Return the numbers of operations after which a kill may leave another disk."""
    disk = Disk()
    simulate(len(layout.spans), _saving, fn, disk, layout, STEPS, 0, Ledger(), evidence=False)
    return [k for k, done in enumerate(disk.log) if done.what != "read"]


def _check_killed(fn: Answer, layout: _Layout, then: _Layout, k: int) -> bool:
    """Raise Broken unless a job that dies after k operations can go on, with another number of ranks."""
    p, q, ledger, disk = len(layout.spans), len(then.spans), Ledger(), Disk(kill_at=k)
    try:
        simulate(p, _saving, fn, disk, layout, STEPS, 0, ledger, where=f"with {counted(p, 'rank')}", evidence=False)
    except Broken as broken:
        if not isinstance(broken.__cause__, Killed) and not disk.killed:
            raise
    if not disk.killed:
        return False
    last = disk.killed[0]
    does = DONE.get(last.what, "removes {}").format(last.name)
    where = f"with {counted(p, 'rank')}, and a kill when rank {last.rank} {does}"
    returned = max([note.step for notes in ledger.values() for note in notes if note.returned], default=0)
    begun = max(notes[-1].step for notes in ledger.values())
    found = _check_loaded(disk, then, {returned: 0, begun: 0}, where)
    again = Disk(disk.files)
    steps = (found + AGAIN, found + 2 * AGAIN)
    where = f"{where}, and then with {counted(q, 'rank')}"
    simulate(q, _saving, fn, again, then, steps, 1, Ledger(), where=where, evidence=False)
    _check_loaded(again, layout, {steps[-1]: 1}, where)
    if left := sorted({*disk.files} & {*again.files} - {done.name for done in again.log}):
        raise Broken(f"""leftover: {capital(where)}, {left[0]} is still on the disk after two more saves. The killed job
            has written it. Who removes it, and how is it found?""")
    return True


def _check_loaded(disk: Disk, ranks: _Layout, right: dict[int, int], where: str) -> int:
    """Return the step of what is loaded on so many ranks; raise Broken unless it is one of right, {step: life}."""
    p, total, files = len(ranks.spans), ranks.total, Disk(disk.files)
    if LATEST not in disk.files and 0 in right:
        return 0
    try:
        step, said, _ = read_latest(files.read(LATEST))
        got = torch.cat([load_range(files, *bounds(total, p, r)) for r in range(p)])
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        failed, _, sentence = _why_not(disk, total).partition(": ")
        raise Broken(f"{failed}: {capital(where)}, {sentence}") from error
    if said != total:
        raise Broken(f"total: {capital(where)}, {LATEST} says that there are {said} elements, and there are {total}.")
    if step not in right:
        steps = " or ".join(map(str, sorted(right)))
        raise Broken(f"step: {capital(where)}, {LATEST} names step {step}, and it has to be step {steps}.")
    wanted = _state(step, right[step], total)
    if torch.equal(got, wanted):
        return step
    if torch.allclose(got, wanted, rtol=1e-5, atol=1e-5):
        raise Broken(f"dtype: {capital(where)}, the elements of step {step} are right to 7 digits, and float64 has 16.")
    i = int((got != wanted).int().argmax())
    j = int((got[i] == wanted).int().argmax())
    if got[i] == wanted[j]:
        raise Broken(f"""start: {capital(where)}, element {i} of the loaded state is element {j} of the saved one.
            Which element does each shard begin with?""")
    raise Broken(f"value: {capital(where)}, element {i} of the loaded state is not the one of step {step}.")


def _why_not(disk: Disk, total: int) -> str:
    """Return the reason, "invariant: sentence", for which the checkpoint on the disk cannot be loaded."""
    data, log = disk.files.get(LATEST), disk.log
    if data is None:
        return f"commit: there is no file {LATEST}: nothing can be loaded."
    try:
        _, _, shards = read_latest(data)
    except ValueError:
        return f"commit: {LATEST} is not whole. Which operation of the disk is never half done?"
    for name, _, n, crc in shards:
        bytes_there = disk.files.get(name)
        if bytes_there is None and any(done.name == name and done.what == "remove" for done in log):
            return f"old: {LATEST} lists {name}, which you have removed. When may you remove the last checkpoint?"
        if bytes_there is None:
            return f"wait: {LATEST} lists {name}, which is not there. When may a file be listed?"
        if zlib.crc32(bytes_there) != crc:
            writes = sum(done.name == name and done.what == "write" for done in log)
            if disk.killed and writes > 1:
                return f"overwrite: {LATEST} lists {name}, and another save has written over it."
            if disk.killed and len(bytes_there) == ITEM * n // 2:
                return f"wait: {LATEST} lists {name}, which is half written. Who may still be writing at the commit?"
            return f"crc: the CRC that {LATEST} has for {name} does not fit its bytes."
        if len(bytes_there) == 4 * n and n:
            return f"dtype: {name} has 4 bytes for each element, and the state is float64."
        if len(bytes_there) != ITEM * n:
            return f"length: {name} has {len(bytes_there):,} bytes, and {LATEST} says {counted(n, 'element')}."
    if sum(n for *_, n, _ in shards) < total:
        return f"missing: the files in {LATEST} hold {sum(n for *_, n, _ in shards)} of {total} elements."
    starts = ", ".join(str(start) for _, start, *_ in shards)
    return f"start: the shards in {LATEST} begin with elements {starts}: some elements are there twice, or never."


EXERCISES = (Exercise("15.2", "a sharded checkpoint that survives", save_sharded, 2, _check_save_sharded),)
