"""Messages of torch.distributed's process groups, as operations that can be waited for without being blocked.

A wait of gloo for a message can only block, and what is under way cannot be asked whether it is done. So a thread for
each direction from and to each peer waits, and the rank looks at what its threads have done. Nor does gloo compare what
is sent with what is expected: a note of count and dtype goes ahead of the elements, and the receiver compares.

    rank 0   note, elements  --->  rank 1: note; as expected? then the elements, otherwise they go into the bin
"""

import queue
import struct
import threading
import time
from datetime import timedelta

import torch

from ..buffers import DTYPES, ITEMSIZE, is_tensor
from ..errors import CommError
from ..status.waiting import GRACE

NUMBERS = 1 << 29  # of communicators: four tags each, below 2^31
LETTER = struct.Struct("<24sqiiH120s")  # of an agreement: op, count, index of the dtype, root, bytes of the note, note
BROKEN = timedelta(milliseconds=1)
LOOK = 0.05  # s: at a thread that has to end, also where the time for it has passed while this process was stopped


class Wire:
    """What the ranks of one communicator send each other through `group`, apart from all others: by tags of its own.

    number: of the communicator; beside: the wire of its double for the background. peers[r]: rank r's rank in `group`.
    """

    def __init__(self, group, number, peers, beside=False):
        self.group, self.peers = group, peers
        self.tag = 4 * number + 2 * beside
        self.letter_tag = self.tag + 1
        self.carriers = {}  # (peer, tag, direction): Carrier

    def send(self, x, dst):
        """Start sending tensor or array `x` to rank `dst`; returns Carried."""
        data = as_bytes(x)
        note = torch.tensor([len(data) // ITEMSIZE[dtype_of(x)], DTYPES.index(dtype_of(x))])
        works = [self._send(part, dst, self.tag) for part in (note, data) if len(part)]
        return self._carry(dst, "send", self.tag, lambda carried: [work.wait() for work in works], len(data))

    def receive(self, x, src):
        """Start receiving into `x` from rank `src`; returns Carried. Its wait raises ValueError for another one."""
        into, expected = as_bytes(x), DTYPES.index(dtype_of(x))

        def take(carried):
            note = torch.zeros(2, dtype=torch.int64)
            self._receive(note, src, self.tag).wait()
            count, dtype = carried.sent = tuple(note.tolist())
            nbytes = count * ITEMSIZE[DTYPES[dtype]]
            fits = (nbytes, dtype) == (len(into), expected)
            if nbytes:
                self._receive(into if fits else into.new_empty(nbytes), src, self.tag).wait()
            if not fits:
                raise ValueError("another message than expected")

        return self._carry(src, "recv", self.tag, take, len(into))

    def send_letter(self, letter, to):
        """Start sending the bytes of a LETTER."""
        work = self._send(torch.frombuffer(bytearray(letter), dtype=torch.uint8), to, self.letter_tag)
        return self._carry(to, "send", self.letter_tag, lambda carried: work.wait(), LETTER.size)

    def receive_letter(self, source):
        """Start receiving a LETTER: its bytes are in `sent` when it has come."""

        def take(carried):
            letter = torch.empty(LETTER.size, dtype=torch.uint8)
            self._receive(letter, source, self.letter_tag).wait()
            carried.sent = bytes(letter.numpy())

        return self._carry(source, "recv", self.letter_tag, take, LETTER.size)

    def _send(self, data, to, tag):
        return self.group.send([data], self.peers[to], tag)

    def _receive(self, data, source, tag):
        return self.group.recv([data], self.peers[source], tag)

    def _carry(self, peer, direction, tag, job, nbytes):
        key = (peer, direction, tag)
        if key not in self.carriers:
            self.carriers[key] = Carrier()
        carried = Carried(job, nbytes)
        self.carriers[key].jobs.put(carried)
        return carried

    def cut(self, seconds):
        """End the threads. What is still under way after `seconds` ends with an error, and so does the whole group.

        It is what gloo itself does when one of its waits takes too long; nothing else ends a receive.
        """
        for carrier in self.carriers.values():
            carrier.jobs.put(None)
        end = time.monotonic() + seconds
        for carrier in self.carriers.values():
            carrier.join(max(LOOK, end - time.monotonic()))
        left = [carrier for carrier in self.carriers.values() if carrier.is_alive()]
        self.carriers = {}
        if left:
            break_off(self.group, self.peers)
            for carrier in left:
                carrier.join(seconds)


class Carrier(threading.Thread):
    """Does the jobs of one direction from or to one peer, one after the other: what waits for gloo, and blocks."""

    def __init__(self):
        super().__init__(daemon=True, name="hpdl-carrier")
        self.jobs = queue.SimpleQueue()
        self.start()

    def run(self):
        while (carried := self.jobs.get()) is not None:
            carried.carry()


class Carried:
    """A message under way, as an operation: see csrc/progress.h. sent: what its sender has said of it."""

    progress = 0

    def __init__(self, job, nbytes):
        self.nbytes, self.sent = nbytes, None
        self._job, self._error, self._since = job, None, 0.0
        self._done = threading.Event()

    def carry(self):
        """Do it, in the thread of a Carrier."""
        try:
            self._job(self)
        except Exception as error:
            self._error, self._since = error, time.monotonic()
        self._job = None
        self._done.set()

    def wait(self, seconds, nap_s, crowded):
        """True when done. Raises ValueError for a message that was not expected.

        Where the connection has broken it waits on for a while: who looks for dead and failed ranks meanwhile can say
        more than gloo.
        """
        if not self._done.wait(seconds):
            return False
        if isinstance(self._error, ValueError):
            raise self._error
        if self._error is not None:
            if time.monotonic() < self._since + 2 * GRACE:
                time.sleep(seconds)
                return False
            raise CommError(f"the process group has failed: {self._error}")
        return True

    def wait_among(self, seconds, nap_s, crowded, others):
        """The same: `others` are carried by threads of their own."""
        return self.wait(seconds, nap_s, crowded)

    def cancel(self):
        """A receive cannot be taken back: true only when it is over."""
        return self._done.is_set()


class Letters:
    """All ranks exchange what they mean, and a note: csrc/consensus.h by way of a Wire. An operation."""

    def __init__(self, wire, rank, call, note):
        """call: (op, count, index of the dtype, root)."""
        op, count, dtype, root = call
        if len(note) > 120:
            raise ValueError(f"a note of {len(note)} bytes: at most 120 can go along")
        self._letters = [None] * len(wire.peers)
        self._letters[rank] = LETTER.pack(op.encode()[:24], count, dtype, root, len(note), note)
        others = [r for r in range(len(wire.peers)) if r != rank]
        self._coming = {r: wire.receive_letter(r) for r in others}
        self._leaving = [wire.send_letter(self._letters[rank], r) for r in others]

    @property
    def progress(self):
        """How many letters have come."""
        return sum(letter is not None for letter in self._letters)

    def missing(self):
        """The ranks whose letters have not come."""
        return tuple(self._coming)

    def wait(self, seconds, nap_s, crowded):
        """True when all letters have come. Raises ValueError where they do not mean the same."""
        end = time.monotonic() + seconds
        for rank, letter in list(self._coming.items()):
            if letter.wait(max(0.0, end - time.monotonic()), nap_s, crowded):
                self._letters[rank] = letter.sent
                del self._coming[rank]
        if self._coming:
            return False
        self._leaving = [m for m in self._leaving if not m.wait(max(0.0, end - time.monotonic()), nap_s, crowded)]
        if self._leaving:
            return False
        if len(set(self.calls())) > 1:
            raise ValueError("the ranks do not mean the same")
        return True

    def wait_among(self, seconds, nap_s, crowded, others):
        return self.wait(seconds, nap_s, crowded)

    def calls(self):
        """What every rank meant: [(op, count, index of the dtype, root)]."""
        opened = [LETTER.unpack(letter) for letter in self._letters if letter is not None]
        return [(op.rstrip(b"\0").decode(), count, dtype, root) for op, count, dtype, root, _, _ in opened]

    def notes(self):
        """What every rank had to tell besides."""
        return [note[:size] for *_, size, note in map(LETTER.unpack, self._letters)]


class GroupWork:
    """A collective of the process group itself, which works in threads of its own and can be asked. An operation."""

    progress = 0

    def __init__(self, work):
        self._work = work

    def wait(self, seconds, nap_s, crowded):
        end = time.monotonic() + seconds
        while not self._work.is_completed():
            if time.monotonic() >= end:
                return False
            time.sleep(max(nap_s, 20e-6))
        try:
            self._work.wait()
        except RuntimeError as error:
            raise CommError(f"the process group has failed: {error}") from None
        return True

    def wait_among(self, seconds, nap_s, crowded, others):
        return self.wait(seconds, nap_s, crowded)


def as_bytes(x):
    """The memory of contiguous `x`, a tensor or an array, as a flat uint8 tensor."""
    flat = as_tensor(x).reshape(-1)
    return flat.view(torch.uint8) if len(flat) else torch.empty(0, dtype=torch.uint8)


def as_tensor(x):
    """Contiguous `x`, a tensor or an array, as a tensor of the same memory that no gradient flows through."""
    return x.detach() if is_tensor(x) else torch.from_numpy(x)


def dtype_of(x):
    return str(x.dtype).removeprefix("torch.")


def break_off(group, peers):
    """End all that is under way in `group`, by a receive that nobody answers in time."""
    other = next(peer for peer in peers if peer != group.rank())
    try:
        group.recv([torch.empty(1)], other, 4 * NUMBERS - 1).wait(BROKEN)
    except RuntimeError:
        pass  # it took too long, as was meant
