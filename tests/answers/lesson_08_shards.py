"""Answers to exercises 8.3 and 8.4 that a check must reject or accept; CI proves both."""

import torch
from torch.nn.functional import pad

from hpdl_lab.collectives.chunks import bounds, chunk
from hpdl_lab.collectives.ring import all_gather, reduce_scatter


def in_the_background(comm, params, grad, state, update):
    """The mean first, and a reduce-scatter that is waited for."""
    grad /= comm.size
    adding = comm.background(reduce_scatter, grad)
    mine = chunk(params, comm.size, comm.rank)
    update(mine, adding.wait(), state)
    comm.background(all_gather, params).wait()


def with_its_own_cut(comm, params, grad, state, update):
    """Another way to the same: slices, and a copy that is written back."""
    reduce_scatter(comm, grad)
    first, last = bounds(len(params), comm.size, comm.rank)
    update(params[first:last], grad[first:last] / comm.size, state)
    all_gather(comm, params)


def of_equal_length(comm, x):
    """x, padded with zeros to the same length on every rank."""
    longest = int(comm.all_gather(torch.tensor([len(x)])).max())
    return pad(x, (0, longest - len(x)))


def by_rows(comm, layers, use):
    """With the communicator's own all_gather, which takes rows of one length, as FSDP does."""

    def gather(comm, layer):
        p, longest = comm.size, -(-layer.n // comm.size)
        rows = comm.all_gather(pad(layer.shard, (0, longest - len(layer.shard))))
        parts = [row[: bounds(layer.n, p, r)[1] - bounds(layer.n, p, r)[0]] for r, row in enumerate(rows)]
        layer.whole.copy_(torch.cat(parts))

    def begin(layer):
        layer.allocate()
        return comm.background(gather, layer)

    works = [begin(layers[0])]
    for i, layer in enumerate(layers):
        works[i].wait()
        works += [begin(following) for following in layers[i + 1 : i + 2]]
        use(layer)
        layer.release()


def looking_back(comm, layers, use):
    """The loop is over gathers, and one behind are the uses."""
    before = None
    for layer in layers:
        gathering = comm.background(all_gather, layer.allocate())
        if before is not None:
            use(before)
            before.release()
        gathering.wait()
        before = layer
    use(before)
    before.release()


def taken_in_the_background(comm, layers, use):
    """Memory is taken when the gather begins, and all gathers are functions."""

    def gather(comm, layer):
        all_gather(comm, layer.allocate())

    works = {0: comm.background(gather, layers[0])}
    for i, layer in enumerate(layers):
        works.pop(i).wait()
        if layer is not layers[-1]:
            works[i + 1] = comm.background(gather, layers[i + 1])
        use(layer)
        layer.release()


WRONG = {
    "8.3": """
memory: as much as a single rank: nothing is saved
    comm.all_reduce(grad)
    update(params, grad / comm.size, state)
memory: needs 64: update no more
    mean = reduce_scatter(comm, grad) / comm.size
    all_gather(comm, grad)
    grad /= comm.size
    update(params, grad, state)
shard: rank 0 updates params[4:8]
    chunk(params, comm.size, comm.rank) => chunk(params, comm.size, comm.rank + 1)
shard: rank 0 updates params[8:12]
    chunk(params, comm.size, comm.rank) => chunk(params, comm.size, -1 - comm.rank)
uneven: leave out the last 2
    size = len(params) // comm.size
    mine = slice(comm.rank * size, (comm.rank + 1) * size)
    reduce_scatter(comm, grad)
    update(params[mine], grad[mine] / comm.size, state)
    all_gather(comm, params)
mean: divided by 3 once more
    mean /= comm.size => mean /= comm.size ** 2
mean: the sum of the gradients of 3 ranks
    -     mean /= comm.size
gather: gather params, not the gradient
    all_gather(comm, params) => all_gather(comm, grad)
gather: rank 0 has still what it had before the step
    -     all_gather(comm, params)
early: has ended when its wait() returns
    adding = comm.background(reduce_scatter, grad)
    update(chunk(params, comm.size, comm.rank), chunk(grad, comm.size, comm.rank), state)
    adding.wait()
    all_gather(comm, params)
early: divided by 3: nothing had been added
    mean = chunk(grad, comm.size, comm.rank) / comm.size
    update(chunk(params, comm.size, comm.rank), mean, state)
    all_gather(comm, params)
bytes: leave out its all-gather
    comm.all_reduce(grad)
    mean = chunk(grad, comm.size, comm.rank) / comm.size
    update(chunk(params, comm.size, comm.rank), mean, state)
    all_gather(comm, params)
bytes: everything passes through rank 0
    mean = chunk(comm.all_gather(grad).mean(0), comm.size, comm.rank)
    update(chunk(params, comm.size, comm.rank), mean, state)
    all_gather(comm, params)
state: what the optimizer has remembered is lost
    mean, state) => mean, {})
copy: give update a view of params
    chunk(params, comm.size, comm.rank) => chunk(params, comm.size, comm.rank).clone()
update: No rank calls update
    mean = reduce_scatter(comm, grad)
    all_gather(comm, params)
raises: never waited for reduce_scatter in the background
    comm.background(reduce_scatter, grad)
    update(chunk(params, comm.size, comm.rank), chunk(grad, comm.size, comm.rank), state)
    all_gather(comm, params)
""",
    "8.4": """
memory: holds all layers at once
    works = [comm.background(all_gather, layer.allocate()) for layer in layers]
    for work, layer in zip(works, layers):
        work.wait()
        use(layer)
        layer.release()
memory: holds 3 layers at once
    works = [comm.background(all_gather, layer.allocate()) for layer in layers[:2]]
    for i, layer in enumerate(layers):
        works[i].wait()
        works += [comm.background(all_gather, after.allocate()) for after in layers[i + 2 : i + 3]]
        use(layer)
        layer.release()
memory: in forward rank 0 holds 3 layers
    gathering = comm.background(all_gather, layers[0].allocate())
    for i, layer in enumerate(layers):
        gathering.wait()
        if i + 1 < len(layers):
            gathering = comm.background(all_gather, layers[i + 1].allocate())
        use(layer)
        if i:
            layers[i - 1].release()
    layer.release()
early: layer 0 was released before use was called
    -         use(layer)
    -         layer.release()
    +         layer.release()
    +         use(layer)
early: was released before use
    works = [comm.background(all_gather, layers[0].allocate())]
    for i, layer in enumerate(layers):
        works[i].wait()
        if i + 1 < len(layers):
            works.append(comm.background(all_gather, layers[i + 1].allocate()))
            layer.release()
        use(layer)
    layer.release()
memory: only the next may be whole
    -         layer.release()
kept: the last one too
    -         layer.release()
    +         if i + 1 < len(layers):
    +             layer.release()
bytes: once per pass
    whole = layers[0].allocate()
    comm.background(all_gather, whole).wait()
    gathering = comm.background(all_gather, whole)
    for i, layer in enumerate(layers):
        gathering.wait()
        if i + 1 < len(layers):
            gathering = comm.background(all_gather, layers[i + 1].allocate())
        use(layer)
        layer.release()
prefetch: Begin it before, in the background
    for layer in layers:
        all_gather(comm, layer.allocate())
        use(layer)
        layer.release()
prefetch: begins after layer 0 was used
    for layer in layers:
        comm.background(all_gather, layer.allocate()).wait()
        use(layer)
        layer.release()
prefetch: right before its layer is used
    all_gather(comm, layers[0].allocate())
    for i, layer in enumerate(layers):
        if i + 1 < len(layers):
            all_gather(comm, layers[i + 1].allocate())
        use(layer)
        layer.release()
axis: was gathered in a wrong order
    for layer in layers:
        rows = comm.all_gather(of_equal_length(comm, layer.shard))
        layer.allocate().copy_(rows.T.reshape(-1)[: layer.n])
        use(layer)
        layer.release()
twice: gathers layer 1 2 times
    gathering = comm.background(all_gather, layers[0].allocate())
    for i, layer in enumerate(layers):
        gathering.wait()
        if i:
            gathering = comm.background(all_gather, layer.allocate())
            gathering.wait()
        if i + 1 < len(layers):
            gathering = comm.background(all_gather, layers[i + 1].allocate())
        use(layer)
        layer.release()
order: backward gives the last layer first
    for layer in sorted(layers, key=lambda layer: layer.i):
        all_gather(comm, layer.allocate())
        use(layer)
        layer.release()
order: use was called for 3 of 4 layers
    gathering = comm.background(all_gather, layers[0].allocate())
    for layer, following in zip(layers, layers[1:]):
        gathering.wait()
        gathering = comm.background(all_gather, following.allocate())
        use(layer)
        layer.release()
    gathering.wait()
    following.release()
wait: has ended when wait() of its Work has returned
    -         gathering.wait()
wait: 16 of its 24 elements were not there
    for layer in layers:
        layer.allocate()
        use(layer)
        layer.release()
allocate: only this rank's chunk of it is there
    for layer in layers:
        use(layer)
raises: index out of range
    if i + 1 < len(layers): => if True:
""",
}
RIGHT = {
    "8.3": (in_the_background, with_its_own_cut),
    "8.4": (by_rows, looking_back, taken_in_the_background),
}
COMPLETED = {
    "8.3": ["mean"],
    "8.4": ["comm.background(all_gather, layers[i + 1].allocate())"],
}
