"""Answers to exercise 5.4 that the check must reject or accept; CI proves both."""

from collections import deque

import torch  # noqa: F401  in the texts below


def with_three_buffers(comm, x, src, dst, device, block):
    """Copies are not waited for at once, but when their block is needed."""
    if comm.rank not in (src, dst) or not len(x):
        return
    free, leaving = deque(device.pinned(block, x.dtype) for _ in range(3)), deque()
    for first in range(0, len(x), block):
        piece = x[first : first + block]
        if not free:
            works, buffer = leaving.popleft()
            works.wait()
            free.append(buffer)
        buffer = free.popleft()
        if comm.rank == src:
            device.copy_out(piece, buffer[: len(piece)]).wait()
            leaving.append((comm.isend(buffer[: len(piece)], dst), buffer))
        else:
            comm.recv(buffer[: len(piece)], src)
            leaving.append((device.copy_in(buffer[: len(piece)], piece), buffer))
    for works, _ in leaving:
        works.wait()


def one_buffer(comm, x, src, dst, device, block):
    """A block after the other through all stages."""
    buffer = device.pinned(block, x.dtype)
    for first in range(0, len(x), block):
        piece = x[first : first + block]
        staged = buffer[: len(piece)]
        if comm.rank == src:
            device.copy_out(piece, staged).wait()
            comm.send(staged, dst)
        elif comm.rank == dst:
            comm.recv(staged, src)
            device.copy_in(staged, piece).wait()


WRONG = {
    "5.4": """
reuse: on rank 0 a buffer gets the next block while its send has not ended
    -             if k >= 2:
    -                 works[k - 2].wait()
    +             pass
overlap: if a copy takes as long as a message
    -             if k >= 2:
    -                 works[k - 2].wait()
    +             if k >= 1:
    +                 works[k - 1].wait()
overlap: never copies the next block out
    works.append(comm.isend(staged[k], dst)) => works.append(comm.isend(staged[k], dst)); works[-1].wait()
missing: The last block is shorter than the others
    range(0, len(x), block) => range(0, len(x) - block + 1, block)
memory: 10 blocks: two are enough
    buffer = device.pinned(len(x), x.dtype)
    for first in range(0, len(x), block):
        piece, staged = x[first : first + block], buffer[first : first + block]
        if comm.rank == src:
            device.copy_out(piece, staged).wait()
            comm.send(staged, dst)
        elif comm.rank == dst:
            comm.recv(staged, src)
            device.copy_in(staged, piece).wait()
memory: is 6 blocks
    pipelined_copy(comm, x, src, dst, device, len(x))
early: sends a block before its copy has ended
    -             device.copy_out(piece, staged[k]).wait()
    -             works.append(comm.isend(staged[k], dst))
    +             copying = device.copy_out(piece, staged[k])
    +             works.append(comm.isend(staged[k], dst))
    +             copying.wait()
early: never waited for device.copy_out
    device.copy_out(piece, staged[k]).wait() => device.copy_out(piece, staged[k])
reuse: never waited for device.copy_in
    device.copy_in(staged[k], piece).wait() => device.copy_in(staged[k], piece)
arrival: never waited for its receive
    -             works[k].wait()
    -             device.copy_in(staged[k], piece).wait()
    +             device.copy_in(staged[k], piece).wait()
arrival: before the message has arrived
    -             works[k].wait()
    -             device.copy_in(staged[k], piece).wait()
    +             device.copy_in(staged[k], piece).wait()
    +             works[k].wait()
reuse: on rank 1 a buffer gets the next block while its copy to the device has not ended
    -             device.copy_in(staged[k], piece).wait()
    +             copies = copies + [device.copy_in(staged[k], piece)] if k else [device.copy_in(staged[k], piece)]
    -             if k + 2 < len(pieces):
    -                 works.append(comm.irecv(staged[k + 2], src))
    +             if k + 2 < len(pieces):
    +                 works.append(comm.irecv(staged[k + 2], src))
    +             if k + 1 == len(pieces):
    +                 for copy in copies:
    +                     copy.wait()
overlap: a rank waits in 16 barriers
    buffer = device.pinned(block, x.dtype)
    for first in range(0, len(x), block):
        piece = x[first : first + block]
        staged = buffer[: len(piece)]
        if comm.rank == src:
            device.copy_out(piece, staged).wait()
            comm.send(staged, dst)
        elif comm.rank == dst:
            comm.recv(staged, src)
            device.copy_in(staged, piece).wait()
        comm.barrier()
overlap @one_buffer: goes through all three stages before the next one begins
    -             device.copy_out(piece, staged).wait()
    -             comm.send(staged, dst)
    +             device.copy_out(piece, staged).wait()
    +             comm.send(staged, dst)
    +             comm.recv(staged, dst)
    -             device.copy_in(staged, piece).wait()
    +             device.copy_in(staged, piece).wait()
    +             comm.send(staged, src)
overlap @one_buffer: never copies the next block out
    device.pinned => device.pinned
wait: did not wait for 2 of its sends
    -         for work in works[-2:]:
    -             work.wait()
    +         works.clear()
blocks: rank 1 receives 1 message
    -     pieces = [x[first:first + block] for first in range(0, len(x), block)]
    -     buffers = [device.pinned(block, x.dtype), device.pinned(block, x.dtype)]
    +     size = min(3 * block, len(x)) or block
    +     pieces = [x[first:first + size] for first in range(0, len(x), size)]
    +     buffers = [device.pinned(size, x.dtype)] * 2
    works[k - 2].wait() => works[k - 1].wait()
    k >= 2 => k >= 1
source: only rank 1, the destination
    device.copy_out(piece, staged[k]) => device.copy_in(staged[k], piece)
deadlock: in blocks of 64, from rank 2 to rank 0 of 3
    elif comm.rank == dst: => else:
raises: rank 0 sends to itself
    comm.rank == src => comm.rank == 0
raises: is not pinned
    staged = [torch.empty(block), torch.empty(block)]
    device.copy_out(x[:block], staged[0]).wait()
raises: a message is a torch tensor
    if comm.rank == src:
        comm.send(x, dst)
    elif comm.rank == dst:
        comm.recv(x, src)


""",
}
RIGHT = {
    "5.4": (with_three_buffers,),
}
COMPLETED = {
    "5.4": [
        "for work in works[-2:]:\n    work.wait()",
        "works[k].wait()\ndevice.copy_in(staged[k], piece).wait()",
        "if k + 2 < len(pieces):\n    works.append(comm.irecv(staged[k + 2], src))",
    ],
}
