"""Answers to exercise 15.2 that the check must reject or accept; CI proves both."""

import zlib

import torch

from hpdl_lab.resilience.shards import LATEST, PART, manifest, packed, read_latest, shard_name


def with_barriers(comm, disk, step, shard, start, total):
    """Barriers, facts on every rank, a commit by the last rank, and files removed by all ranks."""
    data = shard.numpy().tobytes()
    name = shard_name(step, comm.rank, comm.size)
    disk.write(name, data)
    comm.barrier()
    table = torch.zeros(comm.size, 3, dtype=torch.int64)
    table[comm.rank] = torch.tensor([start, len(data) // 8, zlib.crc32(data)])
    comm.all_reduce(table)
    names = [shard_name(step, r, comm.size) for r in range(comm.size)]
    older = [name for name in disk.names() if name not in (LATEST, "next", *names)][comm.rank :: comm.size]
    comm.barrier()
    if comm.rank == comm.size - 1:
        disk.write("next", manifest(step, total, [(n, *row) for n, row in zip(names, table.tolist(), strict=True)]))
        disk.rename("next", LATEST)
    comm.barrier()
    for name in older:
        disk.remove(name)
    comm.barrier()


def removing_first(comm, disk, step, shard, start, total):
    """What is not in the last checkpoint is removed before the next is written, so that two stay on the disk."""
    if comm.rank == 0:
        names = disk.names()
        needed = [LATEST, *(name for name, *_ in read_latest(disk.read(LATEST))[2])] if LATEST in names else []
        for name in names:
            if name not in needed:
                disk.remove(name)
    comm.barrier()
    disk.write(f"{step}-{comm.rank}", packed(shard))
    facts = comm.all_gather(torch.tensor([start, shard.numel(), zlib.crc32(packed(shard))])).tolist()
    if comm.rank == 0:
        disk.write(f"{step}.new", manifest(step, total, [[f"{step}-{r}", *fact] for r, fact in enumerate(facts)]))
        disk.rename(f"{step}.new", LATEST)
    comm.barrier()


def with_messages(comm, disk, step, shard, start, total):
    """Sends and receives, a read of what was written, and a shard file that gets its name by a rename."""
    name = shard_name(step, comm.rank, comm.size)
    disk.write(name + ".part", packed(shard))
    disk.rename(name + ".part", name)
    fact = torch.tensor([start, len(shard), zlib.crc32(disk.read(name))])
    done = torch.zeros(1)
    if comm.rank:
        comm.send(fact, 0)
        comm.recv(done, 0)
        return
    facts = [fact, *(comm.recv(torch.zeros_like(fact), r) for r in range(1, comm.size))]
    shards = [(shard_name(step, r, comm.size), *map(int, f)) for r, f in enumerate(facts)]
    disk.write(PART, manifest(step, total, shards))
    disk.rename(PART, LATEST)
    keep = {LATEST, *(n for n, *_ in shards)}
    for old in set(disk.names()) - keep:
        disk.remove(old)
    for r in range(1, comm.size):
        comm.send(done, r)


WRONG = {
    "15.2": """
overwrite: another save has written over it
    -     disk.write(shard_name(step, comm.rank, comm.size), data)
    +     disk.write(shard_name(0, comm.rank, comm.size), data)
    -         names = [shard_name(step, rank, comm.size) for rank in range(comm.size)]
    +         names = [shard_name(0, rank, comm.size) for rank in range(comm.size)]
wait: Who may still be writing at the commit
    -     disk.write(shard_name(step, comm.rank, comm.size), data)
    -     written = comm.gather(torch.tensor([start, len(shard), zlib.crc32(data)]))
    +     written = comm.gather(torch.tensor([start, len(shard), zlib.crc32(data)]))
    +     disk.write(shard_name(step, comm.rank, comm.size), data)
commit: Which operation of the disk is never half done
    -         disk.write(PART, manifest(step, total, shards))
    -         disk.rename(PART, LATEST)
    +         disk.write(LATEST, manifest(step, total, shards))
commit: nothing can be loaded
    -         disk.rename(PART, LATEST)
    +         if LATEST in disk.names():
    +             disk.remove(LATEST)
    +         disk.rename(PART, LATEST)
commit: nothing can be loaded
    not in (LATEST, *names) => not in names
commit: How many renames does a save need
    written = comm.gather => written = comm.all_gather
    if comm.rank == 0: => if True:
    disk.write(PART, => disk.write(f'{PART}.{comm.rank}',
    disk.rename(PART, => disk.rename(f'{PART}.{comm.rank}',
    in disk.names(): => in disk.names() if comm.rank == 0 else ():
    not in (LATEST, *names) => not in (LATEST, *names) and PART not in name
raises: there is no file
    written = comm.gather => written = comm.all_gather
    if comm.rank == 0: => if True:
commit: Which operation of the disk is never half done
    -     if comm.rank == 0:
    +     disk.rename(PART, LATEST) if comm.rank == 0 and PART in disk.names() else None
    +     if comm.rank == 0:
    -         disk.rename(PART, LATEST)
    +         disk.write(LATEST, disk.read(PART))
old: When may you remove the last checkpoint
    -         disk.write(PART, manifest(step, total, shards))
    -         disk.rename(PART, LATEST)
    -         for name in disk.names():
    -             if name not in (LATEST, *names):
    -                 disk.remove(name)
    +         for name in disk.names():
    +             if name not in (LATEST, *names):
    +                 disk.remove(name)
    +         disk.write(PART, manifest(step, total, shards))
    +         disk.rename(PART, LATEST)
old: When may you remove the last checkpoint
    -     data = packed(shard)
    +     data = packed(shard)
    +     for name in disk.names():
    +         if name.endswith(f'rank-{comm.rank}-of-{comm.size}'):
    +             disk.remove(name)
old: which you have removed
    not in (LATEST, *names) => != LATEST
space: Which files are not needed
    -             if name not in (LATEST, *names):
    -                 disk.remove(name)
    +             pass
leftover: Who removes it
    -         disk.write(PART, manifest(step, total, shards))
    +         older = [name for name, *_ in read_latest(disk.read(LATEST))[2]] if LATEST in disk.names() else []
    +         disk.write(PART, manifest(step, total, shards))
    -             if name not in (LATEST, *names):
    +             if name in older:
leftover: Who removes it
    not in (LATEST, *names) => not in (LATEST, *names) and name.endswith(f'-of-{comm.size}')
race: Which ranks may already be in the next save
    -         for name in disk.names():
    -             if name not in (LATEST, *names):
    -                 disk.remove(name)
    -     comm.barrier()
    +     comm.barrier()
    +     if comm.rank == 0:
    +         for name in disk.names():
    +             if name not in (LATEST, *names):
    +                 disk.remove(name)
early: still names no step
    -     comm.barrier()
early: still names no step
    -     comm.barrier()
    +     pass
    -     if comm.rank == 0:
    +     comm.barrier()
    +     if comm.rank == 0:
memory: Which rank can do this part instead
    longest = torch.tensor([len(shard)])
    longest = int(comm.all_gather(longest).max())
    sizes = comm.gather(torch.tensor([start, len(shard)]))
    whole = comm.gather(torch.cat([shard, torch.zeros(longest - len(shard), dtype=shard.dtype)]))
    if comm.rank == 0:
        out = torch.zeros(total, dtype=shard.dtype)
        for (begin, n), part in zip(sizes.tolist(), whole):
            out[begin:begin + n] = part[:n]
        name = shard_name(step, 0, 1)
        disk.write(name, packed(out))
        disk.write(PART, manifest(step, total, [(name, 0, total, zlib.crc32(packed(out)))]))
        disk.rename(PART, LATEST)
        for old in disk.names():
            if old not in (LATEST, name):
                disk.remove(old)
    comm.barrier()
memory: rank 0 reads
    -         shards = [(name, *facts) for name, facts in zip(names, written.tolist(), strict=True)]
    +         facts = written.tolist()
    +         shards = [(name, *fact[:2], zlib.crc32(disk.read(name))) for name, fact in zip(names, facts)]
start: some elements are there twice, or never
    torch.tensor([start, => torch.tensor([comm.rank * len(shard),
start: Which element does each shard begin with
    -         shards = [(name, *facts) for name, facts in zip(names, written.tolist(), strict=True)]
    +         starts = [0, *written[:, 1].cumsum(0).tolist()]
    +         shards = [(name, at, *facts[1:]) for name, at, facts in zip(names, starts, written.tolist())]
start: begin with elements 0
    torch.tensor([start, => torch.tensor([0,
missing: hold
    zip(names, written.tolist(), strict=True)] => list(zip(names, written.tolist()))[:2]]
wait: which is not there
    -     disk.write(shard_name(step, comm.rank, comm.size), data)
    +     if comm.rank == 0:
    +         disk.write(shard_name(step, comm.rank, comm.size), data)
crc: does not fit its bytes
    zlib.crc32(data) => 0
crc: does not fit its bytes
    comm.size), data) => comm.size), data[::-1])
crc: does not fit its bytes
    zlib.crc32(data) => zlib.crc32(packed(shard.float()))
length: and latest says
    len(shard), zlib => len(data), zlib
dtype: has 4 bytes for each element
    packed(shard) => packed(shard.float())
dtype: are right to 7 digits
    packed(shard) => packed(shard.float().double())
value: is not the one of step 45
    packed(shard) => packed(2 * shard)
step: names step 46
    manifest(step, => manifest(step + 1,
total: and there are 700
    manifest(step, total, => manifest(step, len(shard) * comm.size,
commit: nothing can be loaded
    -         disk.rename(PART, LATEST)
raises: there is no file
    disk.rename(PART, LATEST) => disk.rename(LATEST, PART)
""",
}
RIGHT = {"15.2": (with_barriers, removing_first, with_messages)}
COMPLETED = {
    "15.2": [
        *("zlib.crc32(data)", "manifest(step, total, shards)", "disk.rename(PART, LATEST)", "(LATEST, *names)"),
        "comm.barrier()",
    ],
}
