"""Answers to exercise 15.3 that the check must reject or accept; CI proves both."""

import itertools

import torch

from hpdl_lab.collectives.chunks import bounds
from hpdl_lab.resilience.elastic import assembled
from hpdl_lab.resilience.shards import LATEST, load_range, read_latest, save_sharded


def with_a_stream(comm, disk, task, until, every):
    """Examples from an endless iterator, in turn, one gradient each; weights and moments in three tensors."""
    n = len(task.start)
    a, b = bounds(n, comm.size, comm.rank)
    done, (w, m, v) = 0, (task.start[a:b].clone(), torch.zeros(b - a).double(), torch.zeros(b - a).double())
    if LATEST in disk.names():
        done, (w, m, v) = read_latest(disk.read(LATEST))[0], load_range(disk, 3 * a, 3 * b).reshape(b - a, 3).T.clone()
    stream = itertools.chain.from_iterable(map(task.order, itertools.count()))
    stream = itertools.islice(stream, done * task.batch, None)
    for step in range(done + 1, until + 1):
        weights, total = assembled(comm, w, a, n), torch.zeros(n).double()
        for i in list(itertools.islice(stream, task.batch))[comm.rank :: comm.size]:
            total += task.gradient(weights, [i])
        rows = torch.stack([w, m, v], dim=1)
        task.update(rows, comm.all_reduce(total)[a:b] / task.batch, step)
        w, m, v = rows.T.clone()
        if step % every == 0 or step == until:
            save_sharded(comm, disk, step, rows.reshape(-1), 3 * a, 3 * n)
    return assembled(comm, w, a, n)


def with_gathered_parts(comm, disk, task, until, every):
    """Padded shards in an all-gather, no gradient for no examples, and another cut of the elements."""
    n, p, r, names = len(task.start), comm.size, comm.rank, disk.names()
    width = -(-n // p)
    a, b = min(n, r * width), min(n, (r + 1) * width)
    step, rows = 0, torch.nn.functional.pad(task.start[a:b, None], (0, 2))
    if LATEST in names:
        step, rows = read_latest(disk.read(LATEST))[0], load_range(disk, 3 * a, 3 * b).reshape(b - a, 3)

    def everything():
        return comm.all_gather(torch.nn.functional.pad(rows[:, 0], (0, width - b + a))).flatten()[:n]

    while step < until:
        places = range(step * task.batch, (step + 1) * task.batch)
        ids = [task.order(k // task.examples)[k % task.examples] for k in places if k % p == r]
        weights = everything()
        gradient = comm.all_reduce(task.gradient(weights, ids) if ids else torch.zeros_like(weights))
        step += 1
        task.update(rows, gradient[a:b] / task.batch, step)
        if step == until or not step % every:
            save_sharded(comm, disk, step, rows.flatten(), 3 * a, 3 * n)
    return everything()


def with_moments_first(comm, disk, task, until, every):
    """Rows [v, m, w] on the disk, shards in the other direction, and all means computed before the update."""
    n = len(task.start)
    a, b = bounds(n, comm.size, comm.size - 1 - comm.rank)
    rows, begun = torch.stack([0 * task.start, 0 * task.start, task.start], dim=1)[a:b], 0
    if LATEST in disk.names():
        begun, rows = read_latest(disk.read(LATEST))[0], load_range(disk, 3 * a, 3 * b).reshape(b - a, 3)
    weights = assembled(comm, rows[:, 2], a, n)
    for t in range(begun, until):
        epochs = [i for e in range((t + 1) * task.batch // task.examples + 1) for i in task.order(e)]
        ids = epochs[t * task.batch : (t + 1) * task.batch]
        mean = comm.all_reduce(task.gradient(weights, ids[slice(*bounds(len(ids), comm.size, comm.rank))]) / len(ids))
        rows = rows.flip(1)
        task.update(rows, mean[a:b], t + 1)
        rows = rows.flip(1)
        weights = assembled(comm, rows[:, 2], a, n)
        if (t + 1) % every == 0 or t + 1 == until:
            save_sharded(comm, disk, t + 1, rows.flatten(), 3 * a, 3 * n)
    return weights


WRONG = {
    "15.3": """
moments: both moments are zero
    -         shard = load_range(disk, 3 * first, 3 * last).reshape(-1, 3)
    +         shard[:, 0] = load_range(disk, 3 * first, 3 * last).reshape(-1, 3)[:, 0]
moments: the first is zero
    -         shard = load_range(disk, 3 * first, 3 * last).reshape(-1, 3)
    +         shard = load_range(disk, 3 * first, 3 * last).reshape(-1, 3)
    +         shard[:, 1] = 0
moved: Whose moments does each rank have now
    -         shard = load_range(disk, 3 * first, 3 * last).reshape(-1, 3)
    +         shard = load_range(disk, 3 * first, 3 * last).reshape(-1, 3)
    +         files = read_latest(disk.read(LATEST))[2]
    +         _, start, size, _ = files[comm.rank % len(files)]
    +         shard[-1, 1:] = load_range(disk, start, start + size).reshape(-1, 3)[-1, 1:]
moved: Which elements does each rank need now
    -         save_sharded(comm, disk, step, shard.flatten(), 3 * first, 3 * n)
    +         save_sharded(comm, disk, step, shard.T.flatten(), 3 * first, 3 * n)
    reshape(-1, 3) => reshape(3, -1).T.clone()
moved: Which elements does each rank need now
    -         shard = load_range(disk, 3 * first, 3 * last).reshape(-1, 3)
    +         files = read_latest(disk.read(LATEST))[2]
    +         _, start, size, _ = files[comm.rank % len(files)]
    +         rows = load_range(disk, start, start + size).reshape(-1, 3)[:last - first]
    +         shard[:len(rows)] = rows
place: Killed on 3 ranks (gradient begins)
    step = read_latest(disk.read(LATEST))[0] => step = int(disk.read('step')) if 'step' in disk.names() else 0
    -             save_sharded(comm, disk, step, shard.flatten(), 3 * first, 3 * n)
    +             save_sharded(comm, disk, step, shard.flatten(), 3 * first, 3 * n)
    +             disk.write('step', str(step).encode()) if comm.rank == 0 else None
load: They are the weights of no step
    3 * last).reshape(-1, 3) => 3 * last).reshape(3, -1).T.clone()
load: What is on the disk
    -         shard = load_range(disk, 3 * first, 3 * last).reshape(-1, 3)
count: What is it after a restart
    -     while step < until:
    +     begun = step
    +     while step < until:
    gradient[first:last], step) => gradient[first:last], step - begun)
count: and 2 was given
    gradient[first:last], step) => gradient[first:last], step + 1)
place: At which place was the job
    -     while step < until:
    +     begun = step
    +     while step < until:
    range(step * task.batch + low, => range((step - begun) * task.batch + low,
    low, step * task.batch + high) => low, (step - begun) * task.batch + high)
order: Which order has each rank
    task.order(k // task.examples) => task.order(k // task.examples + comm.rank)
order: What is different
    task.order(k // task.examples) => task.order(k // task.examples + comm.size - 1)
batch: Does its size depend on the number of ranks
    -     low, high = bounds(task.batch, comm.size, comm.rank)
    +     low, high = (comm.rank * task.batch, (comm.rank + 1) * task.batch)
remainder: Which rank computes the others
    -     low, high = bounds(task.batch, comm.size, comm.rank)
    +     share = task.batch // comm.size
    +     low, high = (comm.rank * share, (comm.rank + 1) * share)
share: Each rank computes all of them
    -     low, high = bounds(task.batch, comm.size, comm.rank)
    +     low, high = (0, task.batch)
    / task.batch => / task.batch / comm.size
share: even shares have 3 at most
    -     low, high = bounds(task.batch, comm.size, comm.rank)
    +     low, high = (0, task.batch) if comm.rank == 0 else (0, 0)
mean: the ranks' means
    task.gradient(weights, ids)) / task.batch => task.gradient(weights, ids) / max(1, len(ids))) / comm.size
mean: the sum of the gradients was used
    task.gradient(weights, ids)) / task.batch => task.gradient(weights, ids))
mean: a part of it was used
    / task.batch => / task.batch / comm.size
reduced: of its own examples only
    comm.all_reduce(task.gradient(weights, ids)) => task.gradient(weights, ids)
epoch: What fills the batch
    -         ids = [task.order(k // task.examples)[k % task.examples] for k in places]
    +         epoch = step * task.batch // task.examples
    +         ids = [task.order(epoch)[k % task.examples] for k in places if k // task.examples == epoch]
epoch: Which examples of the last epoch were left over
    -         places = range(step * task.batch + low, step * task.batch + high)
    -         ids = [task.order(k // task.examples)[k % task.examples] for k in places]
    +         epoch, at = divmod(step, task.examples // task.batch)
    +         ids = task.order(epoch)[at * task.batch + low:at * task.batch + high]
again: Is this step in the checkpoint already
    step = read_latest(disk.read(LATEST))[0] => step = read_latest(disk.read(LATEST))[0] - 1
skipped: When is step
    step = read_latest(disk.read(LATEST))[0] => step = read_latest(disk.read(LATEST))[0] + 1
saved: When was the checkpoint saved
    -         task.update(shard, gradient[first:last], step)
    -         weights = assembled(comm, shard[:, 0], first, n)
    -         if step % every == 0 or step == until:
    -             save_sharded(comm, disk, step, shard.flatten(), 3 * first, 3 * n)
    +         if step % every == 0 or step == until:
    +             save_sharded(comm, disk, step, shard.flatten(), 3 * first, 3 * n)
    +         task.update(shard, gradient[first:last], step)
    +         weights = assembled(comm, shard[:, 0], first, n)
saves: it saves steps [3], and should
    if step % every == 0 or step == until: => if step % every == 0:
saves: it saves steps [2, 4], and should
    comm, disk, step, shard => comm, disk, step - 1, shard
saves: and should save []
    -         if step % every == 0 or step == until:
    -             save_sharded(comm, disk, step, shard.flatten(), 3 * first, 3 * n)
    +         if step % every == 0:
    +             save_sharded(comm, disk, step, shard.flatten(), 3 * first, 3 * n)
    -     return weights
    +     save_sharded(comm, disk, step, shard.flatten(), 3 * first, 3 * n)
    +     return weights
memory: No rank has room
    -             save_sharded(comm, disk, step, shard.flatten(), 3 * first, 3 * n)
    +             whole = torch.stack([assembled(comm, x, first, n) for x in shard.T], dim=1).flatten()
    +             one = comm.rank == 0
    +             save_sharded(comm, disk, step, whole if one else whole[:0], 0 if one else 3 * n, 3 * n)
assembled: How does it get the other shards
    -         weights = assembled(comm, shard[:, 0], first, n)
    +         weights[first:last] = shard[:, 0]
assembled: They have shape (6,)
    -     weights = assembled(comm, shard[:, 0], first, n)
    -     while step < until:
    +     weights = shard[:, 0]
    +     while step < until:
    return weights => return assembled(comm, shard[:, 0], first, n)
returns: rank 0 returned something of shape
    return weights => return shard[:, 0]
returns: rank 0 returned nothing
    -     return weights
dtype: They are right to 7 digits
    comm.all_reduce(task.gradient(weights, ids)) => comm.all_reduce(task.gradient(weights, ids).float()).double()
dtype: They are right to 7 digits
    comm, disk, step, shard.flatten() => comm, disk, step, shard.float().double().flatten()
until: Which step is the last one
    while step < until: => while step < until + 1:
until: the job ends after 4 steps
    while step < until: => while step < until - 1:
""",
}
RIGHT = {"15.3": (with_a_stream, with_gathered_parts, with_moments_first)}
COMPLETED = {
    "15.3": [
        "step, shard = 0, torch.zeros(last - first, 3, dtype=torch.float64)\nshard[:, 0] = task.start[first:last]",
        *("3 * last", "step * task.batch + high", "k // task.examples", "k % task.examples"),
        *("task.gradient(weights, ids)", "step"),
        "weights = assembled(comm, shard[:, 0], first, n)\n"
        "if step % every == 0 or step == until:\n"
        "    save_sharded(comm, disk, step, shard.flatten(), 3 * first, 3 * n)",
    ],
}
