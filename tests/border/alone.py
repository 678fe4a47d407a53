"""The C++ border with nobody on the other side: one rank, who also writes to himself. See run.py."""

import numpy as np
from oneself import Holder, ToOneself
from things import CLEAR, COUNTS, DTYPES, array_of, attempt, flaw, refused, tensor_flaw, values

NUMPY = tuple(dtype for dtype in DTYPES if dtype != "bfloat16")
NUMBERS = (0, 1, -1, 2, 7, 4096, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 70, 1.5,
           float("nan"), "3", None)  # fmt: skip


class Alone(ToOneself):
    """Cases of one kind each, named case_*; each takes its random numbers from `rng`."""

    def __init__(self, core, session, rng, torch):
        self.core, self.rng, self.torch = core, rng, torch
        self.mpi, self.group, self.session = session.mpi, session.control, session
        self.kept = []  # what MPI has not done with: as RealComm does

    def thing(self, count, dtype):
        """(a tensor or array, or something else; what is wrong with it or "")."""
        if self.torch and self.rng.random() < 0.15:
            return tensor_flaw(self.rng, count), "tensor"
        if self.rng.random() < 0.3:
            return flaw(self.rng, count, dtype)
        x = array_of(self.rng, count, dtype)
        return (self.torch.from_numpy(np.asarray(x)) if self.torch and self.rng.random() < 0.5 else x), ""

    # -- sums -------------------------------------------------------------------------------------------------------

    def case_sum(self):
        rng, count, dtype = self.rng, self.rng.choice(COUNTS), self.rng.choice(NUMPY)
        sources = [self.thing(count, dtype) for _ in range(rng.randrange(5))]
        targets = [self.thing(count, dtype) for _ in range(rng.randrange(4))]
        bad = any(refused(what, False, True) for _, what in sources if what)
        bad |= any(refused(what, True, True) for _, what in targets if what) or not sources or not targets
        arrays = [x for x, _ in sources]
        add, error = attempt(self.core.Sum, rng.choice(self.core.instructions()), arrays, [x for x, _ in targets])
        assert bad == (error is not None), (error, sources, targets)
        if add:
            want = sum(np.asarray(x).reshape(-1).astype("float64") for x in arrays)
            add()
            for x, _ in targets:
                assert (np.asarray(x).reshape(-1) == want.astype(dtype)).all()

    def case_sum_overlapping(self):
        memory = np.zeros(64, self.rng.choice(NUMPY))
        a, b, count = self.rng.randrange(33), self.rng.randrange(33), self.rng.randrange(32)
        _, error = attempt(self.core.Sum, "portable", [memory[a : a + count]], [memory[b : b + count]])
        assert (error is not None) == (a != b and abs(a - b) < count)

    # -- shared memory ----------------------------------------------------------------------------------------------

    def case_memory(self):
        rng, SharedMemory = self.rng, self.core.SharedMemory
        size = rng.choice((1, 4095, 4096, 10_000, *NUMBERS))
        memory, error = attempt(SharedMemory.create, size)
        if size in (1, 4095, 4096, 10_000):
            assert error is None
        if memory is None or memory.nbytes > 1 << 20:  # the address space is not the memory
            return
        nbytes = memory.nbytes
        for _ in range(4):
            offset, n = rng.choice((0, 1, nbytes, *NUMBERS)), rng.choice((0, 1, nbytes, nbytes + 1, *NUMBERS))
            whole = type(offset) is int and type(n) is int and offset >= 0 and n >= 0
            inside = whole and offset + n <= nbytes
            for function in (memory.reserve, memory.array):
                got, error = attempt(function, offset, n)
                assert inside == (error is None), (function, offset, n, error)
                if isinstance(got, np.ndarray):
                    got[...] = 7
        name = rng.choice((memory.name, memory.name + "0", "", "/", "/dev/null", "/proc/self/fd/999", "a\0b", None, 3))
        other, error = attempt(SharedMemory.open, name, rng.choice((nbytes, nbytes, nbytes + 1, 1 << 30)))
        if other:
            array = other.array(0, nbytes)
            del other, memory  # the array keeps its memory mapped
            array[...] = 1
            assert array.sum(dtype=np.int64) == nbytes
        else:
            memory.seal()
            assert attempt(memory.reserve, 0, 1)[1]

    def case_group(self):
        rng, ShmGroup = self.rng, self.core.ShmGroup
        size = rng.choice((1, 1, 2, 3, 0, -1, 1024, 1025, 1 << 31, None))
        need, error = attempt(ShmGroup.nbytes_for, size)
        assert (error is None) == (type(size) is int and 1 <= size <= 1024)
        small = size in (1, 2, 3)
        nbytes = max(1, (need if small else 4096) - rng.randrange(2))
        memory = rng.choice((self.core.SharedMemory.create(nbytes), self.core.SharedMemory.create(nbytes), None))
        rank = rng.choice((0, 0, 1, size, -1))
        group, error = attempt(ShmGroup, memory, rank, size)
        fits = small and memory is not None and nbytes >= need and rank is not None and 0 <= rank < size
        assert fits == (error is None), (memory, nbytes, need, rank, size, error)
        if group is None:
            return
        part = rng.choice((0, 1, nbytes // size, nbytes // size + 1, *NUMBERS))
        _, error = attempt(group.add, memory, part)
        assert (error is None) == (type(part) is int and 0 <= part <= nbytes // size), (part, nbytes, size)
        if size > 1:
            assert group.all_reduce(np.zeros(3), 0.0, True) is False  # nobody else is there
            assert group.missing() == [r for r in range(size) if r != rank]
            assert "did not complete" in str(attempt(group.all_reduce, np.zeros(3), 0.0, True)[1])

    def case_progress(self):
        """Tasks that end, that never can, and that nobody holds any more; also after the thread has been ended."""
        rng, core = self.rng, self.core
        size = rng.choice((1, 1, 2))
        group = core.ShmGroup(core.SharedMemory.create(core.ShmGroup.nbytes_for(size)), 0, size)
        progress, tasks, stopped = core.Progress(), [], False
        for _ in range(rng.randrange(1, 7)):
            count, dtype = rng.choice((*COUNTS, 70_000)), rng.choice(NUMPY)
            x, what = self.thing(count, dtype)
            bad = bool(what) and refused(what, True, True)
            before = None if bad else np.array(np.asarray(x).reshape(-1))
            task, error = attempt(progress.all_reduce_in_memory, rng.choice((group, group, group, None)), x)
            assert not (bad or stopped) or error is not None, (what, stopped)
            if task is not None and size == 1 and rng.random() < 0.5:
                assert task.wait(5.0, rng.choice((0.0, 1e-4)), True) and task.ended
                assert (np.asarray(x).reshape(-1) == before).all()
            elif task is not None and size == 2:
                assert not task.wait_among(0.0, 0.0, True, [None, *tasks]) and not task.calls()
                assert stopped or task.missing() == ([] if any(tasks) else [1])
            tasks += [task] if task is not None and rng.random() < 0.5 or size == 2 else []
            if rng.random() < 0.15:
                progress.stop()
                stopped = True
        del group, x
        if rng.random() < 0.5:
            del progress
        self.tasks = tasks  # some die now, some with the next case

    def case_collective_of_one(self):
        """All collectives in memory, of one rank: what comes out is what went in."""
        rng, core = self.rng, self.core
        group = core.ShmGroup(core.SharedMemory.create(core.ShmGroup.nbytes_for(1)), 0, 1)
        for _ in range(8):
            count, dtype = rng.choice((*COUNTS, 70_000)), rng.choice(NUMPY)
            (x, flaw_x), (out, flaw_out) = self.thing(count, dtype), self.thing(count, dtype)
            name = rng.choice(("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce",
                               "gather", "scatter"))  # fmt: skip
            root = rng.choice((0, 0, 0, 1, -1, 1 << 31))
            self.one(group, name, x, flaw_x, out, flaw_out, root)
        self.one(group, "all_reduce", values(rng, 5, "float32"), "", None, "", 0)  # still in step

    def one(self, group, name, x, flaw_x, out, flaw_out, root):
        adds = name in ("all_reduce", "reduce_scatter", "reduce")
        alone = name in ("all_reduce", "broadcast")
        bad = bool(flaw_x) and refused(flaw_x, alone, adds)
        bad |= not alone and bool(flaw_out) and refused(flaw_out, True, adds)
        rooted = name in ("broadcast", "reduce", "gather", "scatter")
        bad |= rooted and root != 0
        args = [x] if alone else [x, out]
        before = None if bad else np.array(np.asarray(x).reshape(-1))
        done, error = attempt(getattr(group, name), *args, *([root] if rooted else []), 5.0, True)
        assert bad == (error is not None), (name, flaw_x, flaw_out, root, error)
        if not bad:
            assert done is True
            assert (np.asarray(args[-1]).reshape(-1) == before).all()

    # -- what all ranks do ---------------------------------------------------------------------------------------------

    def case_call(self):
        name = self.rng.choice(("all_reduce", "", "x" * 300, "\0", None, 3))
        dtype = self.rng.choice((0, 6, 7, -1, 255, 256, 1 << 31, None))
        count, root = self.rng.choice(NUMBERS), self.rng.choice((-1, 0, 5, 1 << 31, None))
        call, _ = attempt(self.core.Call, name, count, dtype, root)
        note = self.rng.choice((b"", b"x" * 120, b"x" * 121, "x", None))
        consensus, error = attempt(self.core.Consensus, self.group, call, note)
        good = call is not None and isinstance(note, bytes) and len(note) <= 120
        assert good == (error is None), (call, note, error)
        if good:
            assert consensus.wait(5.0, 0.0, True) and consensus.notes() == [note]

    def case_rendezvous(self):
        ranks = self.rng.choice(([0], [0], [], [1], [0, 0], [-1, 0], [0, 1], None, ["0"], [1 << 40]))
        number = self.rng.choice((0, 1, 5, 16_382, 16_383, -1, 1 << 31, None))
        rendezvous, error = attempt(self.core.Rendezvous, self.group, ranks, number)
        assert (error is None) == (ranks == [0] and number in (0, 1, 5, 16_382)), (ranks, number, error)
        if rendezvous:
            assert rendezvous.wait(5.0, 0.0, True) and rendezvous.give_up(self.rng.choice((0.0, 1e-3))) is True

    def case_handles(self):
        """A communicator of numbers that make no sense; and constants that were told wrong."""
        rng = self.rng
        comm, inner = (rng.choice((self.group.comm, -1, 1 << 64, None, "x")) for _ in range(2))
        rank, size = rng.choice((0, 1, -1, None)), rng.choice((1, 0, -1, 2, 1 << 31))
        group, error = attempt(self.core.Group, rng.choice((self.mpi, self.mpi, None)), comm, inner, rank, size)
        if group is not None:
            assert type(rank) is int and 0 <= rank < size
        told = dict(self.told())
        key, value = rng.choice(sorted(told)), rng.choice((-1, None, "x", 1 << 65, 61, 65))
        if rng.random() < 0.5:
            del told[key]
        else:
            told = {key: value} if rng.random() < 0.5 else told | {key: value}
        path = rng.choice((self.session.MPI.__file__, "/no/such/file", "", np.__file__, None))
        attempt(self.core.Mpi, path, rng.choice((0, None)), rng.choice((told, told, None, [])))

    def told(self):
        from hpdl_lab.comm.mpi.library import mpi_constants

        return mpi_constants(self.session.MPI)

    def case_ring_of_one(self):
        x, what = self.thing(self.rng.choice(COUNTS), self.rng.choice(NUMPY))
        segment = self.rng.choice((0, 1, 3, 4096, 1 << 31, 1 << 40, (1 << 64) - 1, -1, None))
        ring, error = attempt(self.core.Ring, self.group, x, segment, self.rng.choice((True, False)))
        bad = (bool(what) and refused(what, True, True)) or type(segment) is not int or segment < 0
        assert bad == (error is not None), (what, segment, error)
        if ring:
            assert ring.wait(5.0, 0.0, True) and ring.transfers() == []

    def case_collective_of_mpi(self):
        rng, mpi = self.rng, self.core.mpi
        count, dtype = rng.choice(COUNTS), rng.choice(NUMPY)
        (x, flaw_x), (out, flaw_out) = self.thing(count, dtype), self.thing(count, dtype)
        name = rng.choice(("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "reduce", "gather", "scatter"))
        root = [rng.choice((0, 0, 1, -1))] if name in ("reduce", "gather", "scatter") else []
        adds = "reduce" in name
        bad = root not in ([], [0]) or (adds and dtype == "float16")
        bad |= bool(flaw_x) and refused(flaw_x, False, adds) or bool(flaw_out) and refused(flaw_out, True, adds)
        _, error = attempt(getattr(mpi, name), self.group, x, out, *root)
        assert bool(bad) == (error is not None), (name, flaw_x, flaw_out, root, dtype, error)
        if not error and not flaw_x:
            assert (np.asarray(out).reshape(-1) == np.asarray(x).reshape(-1)).all()

    def case_wrong_types(self):
        """Every bound function, with as many arguments of any kind."""
        core, rng = self.core, self.rng
        things = (None, 0, -1, 1.5, "x", b"x", [], {}, np.zeros(3), Holder(), object())
        functions = (core.Sum, core.Ring, core.Consensus, core.Rendezvous, core.Duplicates, core.Group, core.Mpi,
                     core.ShmGroup, core.Call, core.send, core.receive, core.SharedMemory, core.Operation, core.Message,
                     core.SharedMemory.open, core.mpi.all_reduce, core.mpi.gather, core.mpi.broadcast)  # fmt: skip
        for function in rng.sample(functions, 4):
            args = [rng.choice(things) for _ in range(rng.randrange(7))]
            try:
                function(*args)
            except CLEAR as error:
                assert str(error)


def run(core, session, rng, cases, torch):
    """Run this many cases; returns their number."""
    alone = Alone(core, session, rng, torch)
    kinds = [getattr(alone, name) for name in sorted(dir(Alone)) if name.startswith("case_")]
    for i in range(cases):
        yield f"{kinds[i % len(kinds)].__name__} number {i}"
        kinds[i % len(kinds)]()
