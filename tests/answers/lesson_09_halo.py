"""Answers to halo_exchange of notebook 09 that a check must reject or accept; CI proves both."""

import torch

from hpdl_lab.parallel.tensor.spatial import receiving, sending


def strip_with(comm, x, rows, top, bottom):
    """x between `top` and `bottom`, zeros where they are None."""
    above, below = rows[comm.rank]
    b, c, _, w = x.shape
    top = x.new_zeros(b, c, above, w) if top is None else top
    bottom = x.new_zeros(b, c, below, w) if bottom is None else bottom
    return torch.cat([top, x, bottom], 2)


def swap(comm, up, down, from_above, from_below):
    """Send `up` to the rank above and `down` to the rank below, receive as many rows as named; None for none."""
    r, works, got = comm.rank, [], [None, None]
    for side, (peer, out, n) in enumerate(((r - 1, up, from_above), (r + 1, down, from_below))):
        if 0 <= peer < comm.size:
            got[side] = out.new_empty(*out.shape[:2], n, out.shape[3])
            works += [comm.irecv(got[side], peer), comm.isend(out.contiguous(), peer)]
    for work in works:
        work.wait()
    return got


def asked(comm, rows):
    """How many rows the rank above and the rank below ask for."""
    r = comm.rank
    return rows[r - 1][1] if r > 0 else 0, rows[r + 1][0] if r < comm.size - 1 else 0


def last(x, n):
    return x[:, :, x.shape[2] - n :]


def by_sendrecv(comm, x, rows):
    """First everything goes up, then everything goes down."""
    above, below = rows[comm.rank]
    up, down = asked(comm, rows)
    r, p, (b, c, h, w) = comm.rank, comm.size, x.shape
    y = x.new_zeros(b, c, above + h + below, w)
    y[:, :, above : above + h] = x
    for out, to, n, source, at in (
        (x[:, :, :up], r - 1, below, r + 1, above + h),
        (last(x, down), r + 1, above, r - 1, 0),
    ):
        into = x.new_empty(b, c, n, w)
        works = [comm.irecv(into, source)] if 0 <= source < p and n else []
        works += [comm.isend(out.contiguous(), to)] if 0 <= to < p and out.shape[2] else []
        for work in works:
            work.wait()
        if 0 <= source < p and n:
            y[:, :, at : at + n] = into
    return y


def all_at_once(comm, x, rows):
    up, down = asked(comm, rows)
    return strip_with(comm, x, rows, *swap(comm, x[:, :, :up], last(x, down), *rows[comm.rank]))


WRONG = {
    "9.6": """
zeros: Only the image has an edge, a strip has none
    return strip_with(comm, x, rows, None, None)
side @all_at_once: which are farthest away
    x[:, :, :up], last(x, down) => last(x, up), x[:, :, :down]
neighbor: Those are rows of rank 2
    above, below = rows[comm.rank]
    up, down = asked(comm, rows)
    top, bottom = swap(comm, x[:, :, :up], last(x, down), above, below)
    if top is not None and bottom is not None and above == below:
        top, bottom = bottom, top
    return strip_with(comm, x, rows, top, bottom)
edge: no ring: zeros, not the rows of rank 2
    above, below = rows[comm.rank]
    p, r, (b, c, _, w) = comm.size, comm.rank, x.shape
    if p == 1:
        return torch.cat([last(x, above), x, x[:, :, :below]], 2)
    top, bottom = x.new_empty(b, c, above, w), x.new_empty(b, c, below, w)
    works = [comm.irecv(top, (r - 1) % p), comm.irecv(bottom, (r + 1) % p)]
    works.append(comm.isend(last(x, rows[(r + 1) % p][0]).contiguous(), (r + 1) % p))
    works.append(comm.isend(x[:, :, : rows[(r - 1) % p][1]].contiguous(), (r - 1) % p))
    for work in works:
        work.wait()
    return torch.cat([top, x, bottom], 2)
edge: outside the image are zeros
    above, below = rows[comm.rank]
    up, down = asked(comm, rows)
    top, bottom = swap(comm, x[:, :, :up], last(x, down), above, below)
    top = x[:, :, :1].expand(-1, -1, above, -1) if top is None else top
    bottom = last(x, 1).expand(-1, -1, below, -1) if bottom is None else bottom
    return torch.cat([top, x, bottom], 2)
asks: as many rows as the rank above needs, rows[rank - 1][1]
    above, below = rows[comm.rank]
    return strip_with(comm, x, rows, *swap(comm, x[:, :, :above], last(x, below), above, below))
everything: You send all 4 rows, but 0 are needed
    above, below = rows[comm.rank]
    b, c, _, w = x.shape
    r, works, top, bottom = comm.rank, [], x.new_zeros(b, c, above, w), x.new_zeros(b, c, below, w)
    if r > 0:
        works += sending(comm, x[:, :, : rows[r - 1][1]], r - 1) + receiving(comm, top, r - 1)
    if r < comm.size - 1:
        works += sending(comm, x[:, :, -rows[r + 1][0] :], r + 1) + receiving(comm, bottom, r + 1)
    for work in works:
        work.wait()
    return torch.cat([top, x, bottom], 2)
everything @all_at_once: Rank 0 sends them to rank 1 with 3 ranks
    last(x, down) => x[:, :, -down:]
zeros: The rows below the strip of rank 0 are zeros
    above, _ = rows[comm.rank]
    _, down = asked(comm, rows)
    works, top = [], None
    if comm.rank < comm.size - 1:
        works.append(comm.isend(last(x, down).contiguous(), comm.rank + 1))
    if comm.rank > 0:
        top = x.new_empty(*x.shape[:2], above, x.shape[3])
        works.append(comm.irecv(top, comm.rank - 1))
    for work in works:
        work.wait()
    return strip_with(comm, x, rows, top, None)
upside down: the right rows of rank 1 upside down
    up, down = asked(comm, rows)
    top, bottom = swap(comm, x[:, :, :up], last(x, down), *rows[comm.rank])
    return strip_with(comm, x, rows, *(None if part is None else part.flip(2) for part in (top, bottom)))
raises: Sizes of tensors must match
    c, b, _, w = x.shape
    above, below = rows[comm.rank]
    up, down = asked(comm, rows)
    got = swap(comm, x[:, :, :up], last(x, down), above, below)
    ends = [x.new_zeros(b, c, n, w) if part is None else part for n, part in zip((above, below), got, strict=True)]
    return torch.cat([ends[0], x, ends[1]], 2)
shape: 1 + 3 + 1 rows
    up, down = asked(comm, rows)
    swap(comm, x[:, :, :up], last(x, down), *rows[comm.rank])
    return x
bytes: only the rows next to its own
    most = max(map(max, rows))
    above, below = rows[comm.rank]
    top, bottom = swap(comm, x[:, :, :most], last(x, most), most, most)
    top = None if top is None else last(top, above)
    return strip_with(comm, x, rows, top, None if bottom is None else bottom[:, :, :below])
bytes: only the rows next to its own
    height = torch.tensor([x.shape[2]])
    heights = comm.all_gather(height).flatten().tolist()
    most = max(heights)
    padded = torch.cat([x, x.new_zeros(*x.shape[:2], most - x.shape[2], x.shape[3])], 2)
    image = torch.cat([s[:, :, :n] for s, n in zip(comm.all_gather(padded), heights, strict=True)], 2)
    above, below = rows[comm.rank]
    first = sum(heights[: comm.rank])
    padded = torch.nn.functional.pad(image, (0, 0, above, below))
    return padded[:, :, first : first + above + x.shape[2] + below].contiguous()
bytes: 6 messages with something in them, and 4 would do
    above, below = rows[comm.rank]
    up, down = asked(comm, rows)
    got = swap(comm, x[:, :, :up], last(x, down), above, below)
    swap(comm, x[:, :, :up], last(x, 0), 0, below)
    return strip_with(comm, x, rows, *got)
deadlock: there is a deadlock
    above, below = rows[comm.rank]
    up, down = asked(comm, rows)
    top = bottom = None
    if comm.rank > 0:
        top = comm.recv(x.new_empty(*x.shape[:2], above, x.shape[3]), comm.rank - 1)
        comm.send(x[:, :, :up].contiguous(), comm.rank - 1)
    if comm.rank < comm.size - 1:
        bottom = comm.recv(x.new_empty(*x.shape[:2], below, x.shape[3]), comm.rank + 1)
        comm.send(last(x, down).contiguous(), comm.rank + 1)
    return strip_with(comm, x, rows, top, bottom)
steps: the time of 14 messages one after another
    above, below = rows[comm.rank]
    up, down = asked(comm, rows)
    r, p, top, bottom = comm.rank, comm.size, None, None
    if r > 0:
        top = comm.recv(x.new_empty(*x.shape[:2], above, x.shape[3]), r - 1)
    if r < p - 1:
        comm.send(last(x, down).contiguous(), r + 1)
        bottom = comm.recv(x.new_empty(*x.shape[:2], below, x.shape[3]), r + 1)
    if r > 0:
        comm.send(x[:, :, :up].contiguous(), r - 1)
    return strip_with(comm, x, rows, top, bottom)
steps: a rank waits in 1 barrier, and none is needed
    y = by_sendrecv(comm, x, rows)
    comm.barrier()
    return y
wait: did not wait for 1 of its sends
    up, down = asked(comm, rows)
    top, bottom = (torch.zeros_like(x[:, :, :1]).repeat(1, 1, n, 1) for n in rows[comm.rank])
    coming = []
    for out, peer, halo in ((x[:, :, :up], comm.rank - 1, top), (last(x, down), comm.rank + 1, bottom)):
        if 0 <= peer < comm.size:
            coming.append(comm.irecv(halo, peer))
            comm.isend(out.contiguous(), peer)
    for work in coming:
        work.wait()
    return torch.cat([top, x, bottom], 2)
input: rank 0 has changed x
    up, down = asked(comm, rows)
    y = strip_with(comm, x, rows, *swap(comm, x[:, :, :up], last(x, down), *rows[comm.rank]))
    x.zero_()
    return y
""",
}
RIGHT = {
    "9.6": (by_sendrecv, all_at_once),
}
COMPLETED = {
    "9.6": [
        "if r < comm.size - 1:\n"
        "    down = h - rows[r + 1][0]\n"
        "    works += sending(comm, x[:, :, down:], r + 1) + receiving(comm, bottom, r + 1)"
    ],
}
