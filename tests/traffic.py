"""What ranks post: by the schedule of a collective, and by its events."""


def calls(rounds, p, itemsize):
    """What every rank posts, in its order: p lists of ("send" or "recv", peer, bytes). `posted` says what it did."""
    lists = [[] for _ in range(p)]
    for round_ in rounds:
        nbytes = (round_.last - round_.first) * itemsize
        for op, mine, peers in (("recv", round_.dest, round_.source), ("send", round_.source, round_.dest)):
            for rank, peer, size in zip(mine.tolist(), peers.tolist(), nbytes.tolist(), strict=True):
                lists[rank].append((op, peer, size))
    return lists


def posted(events, p):
    """What every rank posted, from its events: the same lists as `calls`."""
    lists = [[] for _ in range(p)]
    for e in sorted(events, key=lambda e: (e.rank, e.step)):
        if e.op in ("send", "recv"):
            lists[e.rank].append((e.op, e.peer, e.nbytes))
    return lists
