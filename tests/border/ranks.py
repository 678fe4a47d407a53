"""The C++ border between processes: messages, consensus, rendezvous and rings that go well or do not. See run.py."""

import random

import numpy as np
from things import COUNTS, DTYPES, attempt, flaw, refused

NUMPY = tuple(dtype for dtype in DTYPES if dtype != "bfloat16")
SECONDS = 60.0
EVERY = 50  # cases, then a fresh communicator
CLOSED = (
    "barrier split allocate all_reduce ring_all_reduce mpi_all_reduce broadcast all_gather reduce_scatter all_to_all "
    "reduce gather scatter send recv isend irecv agree"
).split()


class Holder:
    """What a message is kept in, with its tensor, as RealWork keeps it."""

    message = x = None


class Ranks:
    """Cases of one kind each. `rng` gives all ranks the same numbers; what differs per rank comes from the rank."""

    def __init__(self, core, session):
        self.core, self.session = core, session
        self.kept = []

    def begin(self, rng, comm):
        self.rng, self.comm, self.group = rng, comm, comm.transport.group
        self.rank, self.size = comm.rank, comm.size

    def x_of(self, rank, count, dtype):
        return ((np.arange(count) % 13 + 3 * rank) % 61).astype(dtype)

    def finish(self, operation):
        """Its error or None; it ends by itself."""
        done, error = attempt(operation.wait, SECONDS, self.rng.choice((0.0, 1e-4)), True)
        assert done or error, f"rank {self.rank} waits for ever"
        return error

    # -- messages ---------------------------------------------------------------------------------------------------

    def case_message(self):
        """Messages from one rank to another, of which one may not be what is expected, or begin with a refusal."""
        rng = self.rng
        source, dest = rng.sample(range(self.size), 2)
        number, odd, oddity = (
            rng.randrange(1, 4),
            rng.randrange(4),
            rng.choice(("", "count", "dtype", "flaw", "cancel")),
        )
        kinds = [(rng.choice(COUNTS), rng.choice(NUMPY)) for _ in range(number)]
        bad, what = flaw(rng, *kinds[-1])
        works = []
        for i, (count, dtype) in enumerate(kinds):
            if i == odd and oddity == "flaw" and self.rank in (source, dest):
                function, writable = (self.core.send, False) if self.rank == source else (self.core.receive, True)
                if refused(what, writable, False):
                    assert attempt(function, Holder(), self.group, bad, dest if self.rank == source else source)[1]
            nobody = next((r for r in range(self.size) if r not in (source, dest)), None)  # sends nothing
            if i == odd and oddity == "cancel" and self.rank == dest and nobody is not None:
                work = Holder()
                work.x = np.zeros(5)
                self.core.receive(work, self.group, work.x, nobody)
                assert work.message.cancel()
            work = Holder()
            if self.rank == source:
                work.x = self.x_of(source, count, dtype)
                self.core.send(work, self.group, work.x, dest)
            elif self.rank == dest:
                count += i == odd and oddity == "count"
                dtype = (
                    {"dtype": "float64" if dtype != "float64" else "int64"}.get(oddity, dtype) if i == odd else dtype
                )
                work.x = np.zeros(count, dtype)
                self.core.receive(work, self.group, work.x, source)
            works.append(work)
        for i, ((count, dtype), work) in enumerate(zip(kinds, works, strict=True)):
            wrong = i == odd and oddity in ("count", "dtype")
            if self.rank == dest:
                error = self.finish(work.message)
                assert wrong == (error is not None), error
                if wrong:
                    assert f"which sent {count:,} {dtype}" in str(error), error
                    assert work.message.sent == (count, DTYPES.index(dtype))
                else:
                    assert np.array_equal(work.x, self.x_of(source, count, dtype))
            if self.rank == source:
                large = np.dtype(dtype).itemsize * count > 2047
                if wrong and large:
                    self.kept.append(work)  # nobody takes its elements
                else:
                    assert self.finish(work.message) is None

    # -- everybody --------------------------------------------------------------------------------------------------

    def case_consensus(self):
        rng = self.rng
        calls = [(rng.choice(("a", "b")), rng.randrange(2), rng.randrange(2), -1) for _ in range(2)]
        odd = rng.randrange(self.size)
        call = calls[self.rank == odd]
        consensus = self.core.Consensus(self.group, self.core.Call(*call), bytes([self.rank]) * rng.randrange(120))
        error = self.finish(consensus)
        assert (calls[0] != calls[1]) == (error is not None), (calls, error)
        assert consensus.calls()[odd] == calls[1]
        assert [set(note) for note in consensus.notes()] in ([{r} for r in range(self.size)], [set()] * self.size)

    def case_rendezvous(self):
        """Some come, perhaps after one of them has given up and come again; the first of them may not."""
        rng, control = self.rng, self.session.control  # where nobody receives any tag
        self.rendezvous_number = (
            8_000 + (getattr(self, "rendezvous_number", 0) + 1) % 8_000
        )  # apart from those of sessions
        members = sorted(rng.sample(range(self.size), rng.randrange(1, self.size + 1)))
        rng.shuffle(members)
        hesitant = rng.choice(members[1:]) if rng.random() < 0.5 and len(members) > 1 else None
        if self.rank not in members:
            return
        rendezvous = self.core.Rendezvous(control, members, self.rendezvous_number)
        if self.rank == hesitant and not rendezvous.wait(rng.random() / 500, 0.0, True):
            if not rendezvous.give_up(0.05):
                rendezvous = self.core.Rendezvous(control, members, self.rendezvous_number)
        assert self.finish(rendezvous) is None

    def case_ring(self):
        rng = self.rng
        count, dtype = rng.choice((*COUNTS, 20_000)), rng.choice(NUMPY)
        segment = rng.choice((0, 1, 7, 64, 4096, 1 << 18, 1 << 40)) if count < 100 else 4096
        traced = rng.choice((True, False))
        bad, what = flaw(rng, count, dtype)
        if refused(what, True, True):
            assert attempt(self.core.Ring, self.group, bad, segment, traced)[1]
        x = self.x_of(self.rank, count, dtype)
        ring = self.core.Ring(self.group, x, segment, traced)
        assert self.finish(ring) is None
        assert np.array_equal(x, sum(self.x_of(r, count, dtype).astype("i8") for r in range(self.size)).astype(dtype))
        assert len(ring.transfers()) == (4 * (self.size - 1) if traced and count else 0)

    def case_ring_beside(self):
        """Two of them, one after the other, of which the first may find that the ranks disagree."""
        rng, core = self.rng, self.core
        count, dtype, odd = rng.choice((*COUNTS, 20_000)), rng.choice(NUMPY), rng.randrange(3 * self.size)
        progress = core.Progress()
        tensors = [self.x_of(self.rank, count + (self.rank == odd), dtype), self.x_of(self.rank, count, dtype)]
        tasks = []
        for x in tensors:
            call = core.Call("all_reduce", x.size, DTYPES.index(dtype), -1)
            tasks.append(progress.all_reduce_by_messages(self.group, call, x, 4096, True))
        want = sum(self.x_of(r, count, dtype).astype("i8") for r in range(self.size)).astype(dtype)
        for number in rng.choice(((0, 1), (1, 0))):
            error = self.finish(tasks[number])
            wrong = number == 0 and odd < self.size
            assert wrong == (error is not None) == (len(tasks[number].calls()) == self.size), error
            assert wrong or np.array_equal(tensors[number], want)
        assert not progress.stop()
        assert len(tasks[1].transfers()) == (4 * (self.size - 1) if count else 0)

    def case_collective_of_mpi(self):
        """What is refused is refused before the message, on the ranks where it is wrong; all others are right."""
        rng, mpi, size = self.rng, self.core.mpi, self.size
        count, dtype, root = (
            rng.choice(COUNTS),
            rng.choice(("float32", "float64", "int32", "uint8")),
            rng.randrange(size),
        )
        name = rng.choice(("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "reduce", "gather", "scatter"))
        rows_in = name in ("reduce_scatter", "all_to_all", "scatter")
        rows_out = name in ("all_gather", "all_to_all", "gather")
        everybodys = [self.x_of(r, count * (size if rows_in else 1), dtype) for r in range(size)]
        x, out = everybodys[self.rank].copy(), np.zeros(count * (size if rows_out else 1), dtype)
        rooted = [root] if name in ("reduce", "gather", "scatter") else []
        bad, what = flaw(rng, count, dtype)
        if refused(what, False, "reduce" in name) and (not rooted or name != "scatter" or self.rank == root):
            assert attempt(getattr(mpi, name), self.group, bad, out, *rooted)[1]
        elsewhere = rooted and self.rank != root
        getattr(mpi, name)(self.group, None if elsewhere and name == "scatter" else x,
                           None if elsewhere and name != "scatter" else out, *rooted)  # fmt: skip
        if "reduce" in name:
            want = sum(each.astype("i8") for each in everybodys).astype(dtype)
        elif name == "scatter":
            want = everybodys[root]
        else:
            want = np.concatenate([e.reshape(size, -1)[self.rank] if rows_in else e for e in everybodys])
        if name in ("reduce_scatter", "scatter"):
            want = want.reshape(size, -1)[self.rank]
        assert (elsewhere and name != "scatter") or np.array_equal(out, want), (name, out, want)

    def case_closed(self):
        """A communicator whose run has ended says so, whatever is asked of it."""
        comm = self.session.comm(1_000_000 + self.session.worlds, deadline=SECONDS)
        self.session.worlds += 1
        comm.all_reduce(np.ones(3))
        comm.close()
        x = np.zeros((self.size, 3))
        arguments = {"send": (x, 1 - min(self.rank, 1)), "isend": (x, 1 - min(self.rank, 1)), "scatter": (x, x[0]),
                     "recv": (x, 1 - min(self.rank, 1)), "irecv": (x, 1 - min(self.rank, 1)), "split": (0,),
                     "allocate": (3,), "barrier": (), "agree": ("nothing",)}  # fmt: skip
        for name in CLOSED:
            try:
                getattr(comm, name)(*arguments.get(name, (x,)))
                raise AssertionError(f"{name} of a closed communicator does something")
            except RuntimeError as error:
                assert "closed" in str(error), (name, error)


def run(core, session, seed, cases):
    """Run this many cases, all ranks in step; yields what it is at."""
    ranks = Ranks(core, session)
    kinds = [getattr(ranks, name) for name in sorted(dir(Ranks)) if name.startswith("case_")]
    for i in range(cases):
        if i % EVERY == 0:
            session.worlds += 1
            comm = session.comm(session.worlds, deadline=SECONDS, trace=False)
        yield f"rank {session.rank}, {kinds[i % len(kinds)].__name__} number {i}"
        ranks.begin(random.Random(f"{seed} {i}"), comm)
        kinds[i % len(kinds)]()
        if i % EVERY == EVERY - 1 or i == cases - 1:
            comm.close()
