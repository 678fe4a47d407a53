"""Messages of torch.distributed's process groups, as operations that can be waited for without being blocked.

A wait of gloo for a message can only block, and what is under way cannot be asked whether it is done. So a thread for
each direction from and to each peer waits, and the rank looks at what its threads have done. Nor does gloo compare what
is sent with what is expected: a note of count and dtype goes ahead of the elements, and the receiver compares.

    rank 0   note, elements  --->  rank 1: note; as expected? then the elements, otherwise they go into the bin
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..buffers import DTYPES, ITEMSIZE, is_tensor
from ..errors import CommError
from ..status.operation import OfThread, PolledOperation
from ..status.waiting import GRACE
from ..transport import NUMBERS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

    from ..buffers import Array
    from ..transport import Meant

OPINION = struct.Struct("<24sqiiH120s")  # of a consensus: op, count, index of the dtype, root, bytes of the note, note
BROKEN = timedelta(milliseconds=1)
LOOK = 0.05  # s: at a thread that has to end, also where the time for it has passed while this process was stopped


class Messages:
    """The messages of the ranks of one communicator through `group`, apart from all others: by tags of its own.

    number: of the communicator; background: of its double for the background. peers[r]: rank r's rank in `group`.
    """

    def __init__(self, group: ProcessGroup, number: int, peers: tuple[int, ...], background: bool = False) -> None:
        self.group, self.peers = group, peers
        self.tag = 4 * number + 2 * background
        self.consensus_tag = self.tag + 1
        self.threads: dict[tuple[int, str, int], _MessageThread] = {}  # (peer, tag, direction): MessageThread

    def send(self, x: Array, dst: int) -> PendingMessage:
        """Start sending tensor or array `x` to rank `dst`; returns a PendingMessage."""
        data = _as_bytes(x)
        note = torch.tensor([len(data) // ITEMSIZE[_dtype_of(x)], DTYPES.index(_dtype_of(x))])
        works = [self._send(part, dst, self.tag) for part in (note, data) if len(part)]
        return self._give(dst, "send", self.tag, lambda pending: [work.wait() for work in works], len(data))

    def receive(self, x: Array, src: int) -> PendingMessage:
        """Start receiving into `x` from rank `src`; returns a PendingMessage that raises ValueError for another one."""
        into, expected = _as_bytes(x), DTYPES.index(_dtype_of(x))

        def take(pending: PendingMessage) -> None:
            note = torch.zeros(2, dtype=torch.int64)
            self._receive(note, src, self.tag).wait()
            count, dtype = pending.sent = int(note[0]), int(note[1])
            nbytes = count * ITEMSIZE[DTYPES[dtype]]
            fits = (nbytes, dtype) == (len(into), expected)
            if nbytes:
                self._receive(into if fits else into.new_empty(nbytes), src, self.tag).wait()
            if not fits:
                raise ValueError("another message than expected")

        return self._give(src, "recv", self.tag, take, len(into))

    def send_opinion(self, opinion: bytes, to: int) -> PendingMessage:
        """Start sending the bytes of an OPINION."""
        work = self._send(torch.frombuffer(bytearray(opinion), dtype=torch.uint8), to, self.consensus_tag)
        return self._give(to, "send", self.consensus_tag, lambda pending: work.wait(), OPINION.size)

    def receive_opinion(self, source: int) -> PendingMessage:
        """Start receiving an OPINION: its bytes are in `opinion` when it has come."""

        def take(pending: PendingMessage) -> None:
            opinion = torch.empty(OPINION.size, dtype=torch.uint8)
            self._receive(opinion, source, self.consensus_tag).wait()
            pending.opinion = bytes(opinion.numpy())

        return self._give(source, "recv", self.consensus_tag, take, OPINION.size)

    def _send(self, data: Tensor, to: int, tag: int) -> Work:
        return self.group.send([data], self.peers[to], tag)

    def _receive(self, data: Tensor, source: int, tag: int) -> Work:
        return self.group.recv([data], self.peers[source], tag)

    def _give(
        self, peer: int, direction: str, tag: int, job: Callable[[PendingMessage], object], nbytes: int
    ) -> PendingMessage:
        key = (peer, direction, tag)
        if key not in self.threads:
            self.threads[key] = _MessageThread()
        pending = PendingMessage(job, nbytes)
        self.threads[key].jobs.put(pending)
        return pending

    def cut(self, seconds: float) -> None:
        """End the threads. What is still under way after `seconds` ends with an error, and so does the whole group.

        It is what gloo itself does when one of its waits takes too long; nothing else ends a receive.
        """
        for thread in self.threads.values():
            thread.jobs.put(None)
        end = time.monotonic() + seconds
        for thread in self.threads.values():
            thread.join(max(LOOK, end - time.monotonic()))
        left = [thread for thread in self.threads.values() if thread.is_alive()]
        self.threads = {}
        if left:
            break_off(self.group, self.peers)
            for thread in left:
                thread.join(seconds)


class _MessageThread(threading.Thread):
    """Does the jobs of one direction from or to one peer, one after the other: what waits for gloo, and blocks."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="hpdl-messages")
        self.jobs: queue.SimpleQueue[PendingMessage | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (pending := self.jobs.get()) is not None:
            pending.run()


class PendingMessage(OfThread):
    """A message under way. sent, opinion: what has come from its sender."""

    def __init__(self, job: Callable[[PendingMessage], object], nbytes: int) -> None:
        super().__init__()
        self.nbytes = nbytes
        self.sent = 0, 0  # (count, index of the dtype)
        self.opinion = b""
        self._job: Callable[[PendingMessage], object] | None = job
        self._failed: Exception | None = None
        self._since = 0.0

    def run(self) -> None:
        """Do it, in the thread of a MessageThread."""
        try:
            if self._job is not None:
                self._job(self)
        except ValueError as error:  # another message than expected
            self.error = error
        except Exception as error:
            self._failed, self._since = error, time.monotonic()
        self._job = None
        self.ended.set()

    def advance(self) -> bool:
        """True when done. Raises ValueError for a message that was not expected.

        If the connection has broken it goes on for a while: who looks for dead and failed ranks meanwhile can say more
        than gloo.
        """
        if not super().advance():
            return False
        if self._failed is None:
            return True
        if time.monotonic() < self._since + 2 * GRACE:
            return False
        raise CommError(f"the process group has failed: {self._failed}")

    def cancel(self) -> bool:
        """Return True if it is over: a receive cannot be taken back."""
        return self.ended.is_set()


class ConsensusByMessages(PolledOperation):
    """All ranks exchange what they mean, and a note: csrc/consensus.h by way of Messages."""

    def __init__(self, messages: Messages, rank: int, call: Meant, note: bytes) -> None:
        """call: (op, count, index of the dtype, root)."""
        op, count, dtype, root = call
        if len(note) > 120:
            raise ValueError(f"a note of {len(note)} bytes: at most 120 can go along")
        self._opinions = [b""] * len(messages.peers)
        mine = self._opinions[rank] = OPINION.pack(op.encode()[:24], count, dtype, root, len(note), note)
        others = [r for r in range(len(messages.peers)) if r != rank]
        self._coming = {r: messages.receive_opinion(r) for r in others}
        self._leaving = [messages.send_opinion(mine, r) for r in others]

    @property
    def progress(self) -> int:
        """Return the number of opinions that have come."""
        return sum(opinion != b"" for opinion in self._opinions)

    def missing(self) -> tuple[int, ...]:
        """Return the ranks whose opinions have not come."""
        return tuple(self._coming)

    def advance(self) -> bool:
        """True when all opinions have come. Raises ValueError if they differ."""
        for rank, message in list(self._coming.items()):
            if message.advance():
                self._opinions[rank] = message.opinion
                del self._coming[rank]
        self._leaving = [message for message in self._leaving if not message.advance()]
        if self._coming or self._leaving:
            return False
        if len(set(self.calls())) > 1:
            raise ValueError("the ranks make different calls")
        return True

    def rest(self, waited: float, left: float, nap_s: float, oversubscribed: bool) -> None:
        (*self._coming.values(), *self._leaving)[0].rest(waited, left, nap_s, oversubscribed)

    def calls(self) -> list[Meant]:
        """Return what every rank called: [(op, count, index of the dtype, root)]."""
        opened = [OPINION.unpack(opinion) for opinion in self._opinions if opinion]
        return [(op.rstrip(b"\0").decode(), count, dtype, root) for op, count, dtype, root, _, _ in opened]

    def notes(self) -> list[bytes]:
        """Return the note of every rank."""
        return [note[:size] for *_, size, note in map(OPINION.unpack, self._opinions)]


class Completing(Protocol):
    """A Work of torch.distributed, or what does the same (device/host.py)."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object: ...


class GroupWork(PolledOperation):
    """Collectives of the process group itself, begun together, which work in threads or on a device of their own.

    works: of torch.distributed. nap_s: between two looks; 0 spins, which is for a GPU.
    """

    def __init__(self, works: Sequence[Completing | None], nap_s: float = 20e-6) -> None:
        self._works, self._nap_s, self.done = [work for work in works if work is not None], nap_s, False

    def advance(self) -> bool:
        """True when all have ended. Raises CommError if the group has failed."""
        if not self.done and all(work.is_completed() for work in self._works):
            try:
                for work in self._works:
                    work.wait()
            except RuntimeError as error:
                raise CommError(f"the process group has failed: {error}") from None
            self.done = True
        return self.done

    def rest(self, waited: float, left: float, nap_s: float, oversubscribed: bool) -> None:
        if self._nap_s:
            time.sleep(max(nap_s, self._nap_s))
        else:
            super().rest(waited, left, nap_s, oversubscribed)


def _as_bytes(x: Array) -> Tensor:
    """Return the memory of contiguous `x`, a tensor or an array, as a flat uint8 tensor."""
    flat = as_tensor(x).reshape(-1)
    return flat.view(torch.uint8) if len(flat) else torch.empty(0, dtype=torch.uint8)


def as_tensor(x: Array) -> Tensor:
    """Return contiguous `x`, a tensor or an array, as a tensor of the same memory that no gradient flows through."""
    return x.detach() if is_tensor(x) else torch.from_numpy(x)


def _dtype_of(x: Array) -> str:
    return str(x.dtype).removeprefix("torch.")


def break_off(group: ProcessGroup, peers: Sequence[int]) -> None:
    """End all that is under way in `group`, by a receive that is not answered in time."""
    other = next(peer for peer in peers if peer != group.rank())
    try:
        group.recv([torch.empty(1)], other, 4 * NUMBERS - 1).wait(BROKEN)
    except RuntimeError:
        pass  # it took too long, as was meant
