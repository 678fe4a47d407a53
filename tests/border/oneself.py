"""Cases of messages that a rank sends to itself, and of waits for them. See alone.py."""

import numpy as np
from things import COUNTS, DTYPES, attempt, refused

NUMPY = tuple(dtype for dtype in DTYPES if dtype != "bfloat16")
SECONDS = (0, 0.0, -1, 1e-4, float("nan"), float("-inf"), -1e300, None, "1")


class Holder:
    """What a message is kept in, with its tensor, as RealWork keeps it."""

    message = x = None


class ToOneself:
    """The part of alone.Alone about messages."""

    def case_message(self):
        rng, core = self.rng, self.core
        count, dtype = rng.choice(COUNTS), rng.choice(NUMPY)
        (x, flaw_x), (y, flaw_y) = self.thing(count, dtype), self.thing(count, dtype)
        sent, received = Holder(), Holder()
        _, error = attempt(core.send, sent, self.group, x, 0)
        assert (bool(flaw_x) and refused(flaw_x, False, False)) == (error is not None), (flaw_x, error)
        _, error = attempt(core.receive, received, self.group, y, 0)
        assert (bool(flaw_y) and refused(flaw_y, True, False)) == (error is not None), (flaw_y, error)
        if sent.message and received.message:
            assert received.message.wait(5.0, 0.0, True) and sent.message.wait(5.0, 0.0, True)
            if not flaw_x:
                assert (np.asarray(x).reshape(-1) == np.asarray(y).reshape(-1)).all()
        elif received.message:
            assert received.message.cancel()
        elif sent.message:  # somebody has to receive it
            received.x = np.zeros(np.shape(x), np.asarray(x).dtype)
            core.receive(received, self.group, received.x, 0)
            assert received.message.wait(5.0, 0.0, True) and sent.message.wait(5.0, 0.0, True)

    def case_message_of_another_kind(self):
        """Count or dtype differ: both numbers, on the receiving side, and the next message arrives."""
        rng, core = self.rng, self.core
        kinds = [(rng.choice(COUNTS), rng.choice(("float32", "uint8", "int64"))) for _ in range(2)]
        # 2^25 + 3 and 3 elements have the same tag but for one bit
        x, y = (np.zeros(count, dtype) for count, dtype in kinds)
        sent, received = Holder(), Holder()
        core.send(sent, self.group, x, 0)
        core.receive(received, self.group, y, 0)
        done, error = attempt(received.message.wait, 5.0, 0.0, True)
        assert (error is None) == (kinds[0] == kinds[1])
        if error:
            assert f"expects {kinds[1][0]:,} {kinds[1][1]}" in str(error) and kinds[0][1] in str(error), error
            self.kept.append((sent, x))  # its elements are never received
            return
        assert done and sent.message.wait(5.0, 0.0, True)

    def case_peer(self):
        to = self.rng.choice((-2, -1, 1, 2, 1 << 30, -(1 << 31), 1 << 31, None, "0", 0.0))
        holder = self.rng.choice((Holder(), Holder(), None, 3, object()))
        for function in (self.core.send, self.core.receive):
            assert attempt(function, holder, self.group, np.zeros(3), to)[1]
        if not isinstance(holder, Holder):  # what cannot hold a message is found out before MPI has it
            assert attempt(self.core.send, holder, self.group, np.zeros(3), 0)[1]

    # -- what waits ---------------------------------------------------------------------------------------------------

    def case_wait(self):
        rng, core = self.rng, self.core
        work = Holder()
        work.x = np.zeros(rng.choice((1, 1000)))
        core.receive(work, self.group, work.x, 0)
        args = rng.choice(SECONDS), rng.choice((*SECONDS[:-2], 0.001)), rng.choice((True, False))
        done, error = attempt(work.message.wait, *args)
        numbers = all(isinstance(a, (int, float)) for a in args) and not any(a != a for a in args)
        assert (error is None) == numbers and not done, (args, error)
        assert work.message.cancel() and work.message.cancel() and work.message.wait(0.0, 0.0, False)

    def case_wait_among(self):
        """A message to oneself, while others are looked after that end, do not end, end badly, or are none."""
        rng, core = self.rng, self.core
        works = []
        kinds = [(rng.choice((1, 3, 1000)), rng.choice((1, 3, 1000))) for _ in range(rng.randrange(1, 4))]
        for sent, expected in kinds:
            for function, count in ((core.send, sent), (core.receive, expected)):
                work = Holder()
                work.x = np.zeros(count)
                function(work, self.group, work.x, 0)
                works.append(work)
        others = [work.message for work in works[1:]] + ([rng.choice((None, 3, "x"))] if rng.random() < 0.3 else [])
        rng.shuffle(others)
        arguments = rng.choice((0.0, 1e-3)), rng.choice((0.0, 1e-4)), True
        _, error = attempt(works[0].message.wait_among, *arguments, rng.choice((others, others, tuple(others), None)))
        for (sent, expected), (to, here) in zip(kinds, zip(works[::2], works[1::2], strict=True), strict=True):
            _, error = attempt(here.message.wait, 5.0, 0.0, True)
            assert (error is None) == (sent == expected), (kinds, error)
            if error is None or sent < 256:
                assert to.message.wait(5.0, 0.0, True)
            else:
                self.kept.append(to)  # its elements are never received
