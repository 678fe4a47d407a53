"""Answers to attention_around_ring of notebook 12 that a check must reject or accept; CI proves both."""

import torch


def mirrored_with_both_chunks_at_once(comm, read, attend, causal=True, holds=None):
    """As in libraries: one block of attention per step, in the other direction, with other pairs; merged at the end."""
    p, rank = comm.size, comm.rank
    early, late = p - 1 - rank, p + rank
    q, k, v = (torch.cat(both, 2) for both in zip(read(early), read(late), strict=True))
    n = q.shape[2] // 2
    parts = [attend(q, k, v, True)]
    for step in range(1, p):
        k, v = (comm.sendrecv(x, (rank - 1) % p, torch.empty_like(x), (rank + 1) % p) for x in (k, v))
        source = (rank + step) % p
        if p - 1 - source < early:  # its early chunk comes before both of mine
            parts.append(attend(q, k[:, :, :n].contiguous(), v[:, :, :n].contiguous(), False))
        else:
            out, lse = attend(q[:, :, n:], k, v, False)
            parts.append((torch.cat([torch.zeros_like(out), out], 2), torch.cat([lse - torch.inf, lse], 2)))
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    lse = lses.logsumexp(0)
    out = (outs * (lses - lse).exp().unsqueeze(-1)).sum(0)
    return {early: (out[:, :, :n], lse[:, :, :n]), late: (out[:, :, n:], lse[:, :, n:])}


def with_a_running_maximum(comm, read, attend, causal=True, holds=None):
    """As in the paper: numerator, denominator and maximum; chunks are sent one by one."""
    p, rank = comm.size, comm.rank
    mine = {c: read(c) for c in (rank, 2 * p - 1 - rank)}
    kept = {c: [torch.zeros_like(q), torch.zeros(q.shape[:-1]).double(), None] for c, (q, _, _) in mine.items()}
    travelling = {c: (k, v) for c, (_, k, v) in mine.items()}
    for step in range(p):
        for c, (q, _, _) in mine.items():
            for other, (k, v) in travelling.items():
                if other > c:
                    continue
                out, lse = attend(q, k, v, c == other)
                top, bottom, largest = kept[c]
                now = lse if largest is None else torch.maximum(largest, lse)
                old = torch.zeros_like(now) if largest is None else (largest - now).exp()
                new = (lse - now).exp()
                kept[c] = [top * old[..., None] + out * new[..., None], bottom * old + new, now]
        if step < p - 1:
            source = (rank - step - 1) % p
            arriving, works = {}, []
            for c, (k, v) in zip((source, 2 * p - 1 - source), travelling.values(), strict=True):
                arriving[c] = torch.empty_like(k), torch.empty_like(v)
                works += [comm.irecv(x, (rank - 1) % p) for x in arriving[c]]
                works += [comm.isend(x, (rank + 1) % p) for x in (k, v)]
            for work in works:
                work.wait()
            travelling = arriving
    return {c: (top / bottom[..., None], bottom.log() + largest) for c, (top, bottom, largest) in kept.items()}


WRONG = {
    "12.3": """
work: All wait for the slowest: 60% of the time
    (rank, 2 * p - 1 - rank) => (2 * rank, 2 * rank + 1)
work: do not compute blocks that are masked as a whole
    -                 if other <= c or not causal:
    +                 if True:
    -                     out, lse = merged[c]
    +                     weight = weight if other <= c else weight - torch.inf
    +                     out, lse = merged[c]
causal: Chunk 4 attends to all chunks
    other <= c or not causal => True
causal: In its own chunk a query attends to later keys
    causal and other == c => False
ring: attends only to keys of its own rank
    for step in range(p): => for step in range(1):
    if step < p - 1 => if False
ring: They come last: one step too few
    for step in range(p): => for step in range(p - 1):
    if step < p - 1 => if step < p - 2
    return merged => return merged if p > 1 else attention_around_ring(comm, read, attend)
chunks: Ranks were compared, not chunks
    other <= c or not causal => (comm.rank - step) % p < comm.rank or (step == 0 and other <= c)
merge: The parts were added
    out * (lse - both).exp().unsqueeze(-1) + more * (weight - both).exp().unsqueeze(-1) => out + more
merge: each part has replaced the parts before
    out * (lse - both).exp().unsqueeze(-1) + more * (weight - both).exp().unsqueeze(-1) => more
    merged[c] = (out, both) => merged[c] = (out, weight)
merge: lse[0, 0, 0] should be
    return merged => return {c: (out, lse.exp()) for c, (out, lse) in merged.items()}
overflow: exp of such a number is infinite
    out * (lse - both).exp().unsqueeze(-1) => out * (lse.exp() / both.exp()).unsqueeze(-1)
    more * (weight - both).exp().unsqueeze(-1) => more * (weight.exp() / both.exp()).unsqueeze(-1)
bytes: one hop too many
    if step < p - 1 else (kv, []) => if p > 1 else (kv, [])
bytes: queries stay, only keys and values travel
    torch.cat([k, v], -1) for _, k, v in => torch.cat([k, v, q], -1) for q, k, v in
    theirs.split([k.shape[-1], v.shape[-1]], -1) => theirs.split(k.shape[-1], -1)[:2]
memory: rank 0 has read chunk 1, which belongs to rank 1
    def far(c):
        q = read(c)[0]
        parts = [attend(q, *read(o)[1:], o == c) for o in range(c + 1)]
        outs, lses = (torch.stack(x) for x in zip(*parts))
        lse = lses.logsumexp(0)
        return (outs * (lses - lse).exp().unsqueeze(-1)).sum(0), lse
    return {c: far(c) for c in (comm.rank, 2 * comm.size - 1 - comm.rank)}
chunks: no rank has computed chunk 3
    return merged => return {min(merged): merged[min(merged)]}
chunks: have both computed chunk
    (rank, 2 * p - 1 - rank) => (0, 1)
chunks: the chunks have changed places
    return merged => return dict(zip(merged, [*merged.values()][::-1]))
wait: did not wait for 2 of its sends
    -         for work in works:
    -             work.wait()
    +         for work in works[:1]:
    +             work.wait()
peers: sends to rank 2: on a ring of 4
    -         following, works = pass_on(comm, kv) if step < p - 1 else (kv, [])
    +         if step == 0:
    +             others = [r for r in range(p) if r != comm.rank]
    +             came = {r: torch.empty_like(kv) for r in others}
    +             for w in [comm.irecv(came[r], r) for r in others] + [comm.isend(kv, r) for r in others]:
    +                 w.wait()
    +         following, works = came.get((comm.rank - step - 1) % p, kv), []
deadlock: there is a deadlock
    -         following, works = pass_on(comm, kv) if step < p - 1 else (kv, [])
    +         following, works = torch.empty_like(kv), []
    +         if step < p - 1:
    +             comm.recv(following, (comm.rank - 1) % p)
    +             comm.send(kv, (comm.rank + 1) % p)
raises: chunks are numbered 0 to 5
    2 * p - 1 - rank => 2 * p - rank
shape: has shape
    merged[c] = (out, both) => merged[c] = (out, both.unsqueeze(-1)) if step == p - 1 and other == c else (out, both)
returns: return {chunk: (out, lse)}
    return merged => return [*merged.values()]
returns: (out, lse) is needed
    return merged => return {c: out for c, (out, _) in merged.items()}
""",
}
RIGHT = {"12.3": (mirrored_with_both_chunks_at_once, with_a_running_maximum)}
COMPLETED = {
    "12.3": [
        "2 * p - 1 - comm.rank",
        "2 * p - 1 - source",
        "out * (lse - total).exp().unsqueeze(-1) + more * (weight - total).exp().unsqueeze(-1)",
    ],
}
