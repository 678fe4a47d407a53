"""Before the first step: do all ranks mean the same model? What differs is found and named, on every rank alike.

Each rank tells one number, a digest of what it has, 8 bytes. Only where these differ do ranks tell each other more.

After the sum, before the update: has a rank NaN in a gradient, or none where others have one? Which rank and layer?

Every bucket carries a flag, added over ranks like the gradients (reducer.py): 0 where all is well on every rank. Only
where it is not do ranks tell each other what they have for every parameter, a byte each, in one all_gather. All see the
same flags, so all ask, or none.

Before the first step: does the all_reduce add up? A sum that is wrong, and the same on every rank, leaves no trace.

The ranks would agree on every loss and every parameter, and train another model than was meant.

After a step of a pipeline, before the update: the loss of the batch, or which rank has NaN, on every rank alike.
"""

import hashlib
import math
import warnings
import zlib

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from ..comm.buffers import to_numpy
from ..comm.waits import name_ranks
from .reducer import allocate, best_all_reduce, name_of, result_of


def require_same_model(comm, model, plan=""):
    """Raise ValueError on every rank unless all have a model of one structure. Collective.

    Structure: names, shapes and dtypes of parameters and buffers, which of them are one tensor, which need a gradient.
    Values that differ, from another seed, are no error, since rank 0's are sent to all: rank 0 warns, and names them.
    plan: what else must be the same, in words: the strategy and its options.
    Steps: one all_gather, where all agree.   Bytes per rank: those of all_gather for 16 bytes.
    """
    told = {"strategy": plan} | structure(model)
    sums = checksums(model)
    digests = everybodys(comm, [digest(told), digest(sums)])
    if len({structure for structure, _ in digests}) > 1:
        raise ValueError(difference([dict(pairs) for pairs in everybodys_items(comm, told.items())]))
    if len({values for _, values in digests}) > 1:
        differing = others_values(everybodys(comm, list(sums.values())), list(sums))
        if comm.rank == 0:
            warnings.warn(differing, stacklevel=4)


def require_same(comm, what, value):
    """Raise ValueError on every rank unless `str(value)` is the same on all ranks. Collective.

    what: its name in the sentence, such as "recipe".
    """
    require_same_table(comm, {what: str(value)})


def require_same_parameters(comm, params, names, plan):
    """Raise ValueError on every rank unless all have parameters of the same names, shapes and dtypes in one order.

    plan: what else must be the same, in words, as of require_same_model. Collective: an all_gather of 8 bytes.
    """
    told = {name: f"number {i} of {measure(p)}" for i, (name, p) in enumerate(zip(names, params, strict=True))}
    require_same_table(comm, {"strategy": plan} | told)


def require_same_table(comm, told):
    """Raise ValueError on every rank unless `told`, {name: what it is}, is the same on all ranks. Collective."""
    if len({d for (d,) in everybodys(comm, [digest(told)])}) > 1:
        raise ValueError(difference([dict(pairs) for pairs in everybodys_items(comm, told.items())]))


def structure(model):
    """{name: what it is}, in words, of every parameter and buffer in the order of registration."""
    require_values(model)
    first, told = {}, {}
    for name, p in model.named_parameters(remove_duplicate=False):
        kind = "parameter" if p.requires_grad else "frozen parameter"
        same = first.setdefault(id(p), name)
        told[name] = f"a {kind} of {measure(p)}" if same == name else f"the same tensor as {same}"
    told |= {name: f"a buffer of {measure(b)}" for name, b in model.named_buffers()}
    return told


def require_values(model):
    """Raise ValueError where a parameter or buffer has no values yet: torch's lazy layers, and its meta device."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name} of the model has no shape yet: give the model one batch before ranks share it")
        if tensor.is_meta:
            raise ValueError(f"{name} of the model is on torch's meta device and has no values: build it on the CPU")


def measure(tensor):
    return f"shape {tuple(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"


def checksums(model):
    """{name: CRC-32 of its bytes} of every parameter and buffer."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    flat = {name: t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for name, t in tensors.items()}
    return {name: zlib.crc32(data.numpy()) for name, data in flat.items()}


def difference(tables):
    """One sentence about the first thing in which the {name: what it is} of ranks differ: the few, then the many."""
    name = next((name for table in tables for name in table if len({t.get(name) for t in tables}) > 1), None)
    if name is None:  # only their order differs, in which gradients are packed
        return difference([{f"number {i}, as registered,": name for i, name in enumerate(table)} for table in tables])
    groups = {}
    for rank, table in enumerate(tables):
        groups.setdefault(table.get(name), []).append(rank)
    few_first = sorted(groups.items(), key=lambda group: len(group[1]))
    if name == "strategy" or len(tables[0]) == 1:
        parts = [f"{name_ranks(ranks)} {has(ranks)} {what}" for what, ranks in few_first]
        return f"the ranks do not agree on the {name}: {', '.join(parts)}"
    counts = sorted({len(table) - 1 for table in tables})
    parts = [f"{what or 'missing'} on {name_ranks(ranks)}" for what, ranks in few_first]
    numbers = f" (they have {' and '.join(map(str, counts))} parameters and buffers)" if len(counts) > 1 else ""
    return f"the ranks' models differ{numbers}: {name} is {', '.join(parts)}"


def has(ranks):
    return "has" if len(ranks) == 1 else "have"


def others_values(sums, names):
    """The warning that says whose values differ from rank 0's, and where first."""
    others = [rank for rank, row in enumerate(sums) if row != sums[0]]
    name = next(names[i] for i in range(len(names)) if any(row[i] != sums[0][i] for row in sums))
    return (
        f"{name_ranks(others)} {'was' if len(others) == 1 else 'were'} built with other values than rank 0 (another "
        f"seed?), first in {name}: all ranks start from rank 0's"
    )


def digest(value):
    """63 bits that tell values apart whose repr differs."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little") >> 1


def everybodys(comm, numbers):
    """The lists of integers of all ranks, in rank order: as many on every rank. Collective."""
    return comm.all_gather(torch.tensor(numbers, dtype=torch.int64, device=comm.device)).tolist()


def everybodys_items(comm, pairs):
    """The (name, text) pairs of all ranks, in rank order, of any number and length. Collective."""
    text = "\n".join(f"{name}\t{what}" for name, what in pairs).encode()
    longest = max(n for (n,) in everybodys(comm, [len(text)]))
    mine = torch.tensor(list(text.ljust(longest, b"\n")), dtype=torch.uint8, device=comm.device)
    rows = comm.all_gather(mine).tolist()
    return [[line.split("\t", 1) for line in bytes(row).decode().rstrip("\n").split("\n")] for row in rows]


FINE, NONE, NAN, INFINITE = range(4)  # what a rank says of the gradient of one parameter


WORDS = {NAN: "NaN", INFINITE: "infinity"}


class Verdict:
    """Judges the gradients of one model. unused: {name: ranks that had no gradient for it} in the latest step."""

    def __init__(self, names):
        self.names, self.unused = names, {}

    def of(self, comm, params, buckets, totals):
        """Indices of the parameters that no rank has a gradient for. Rank 0 warns of each of them once.

        Args:    buckets: what this rank has sent; totals: [(N + 1,)], what came back. The gradients of `params` are
                 still those of this rank.
        Raises:  FloatingPointError on every rank where one of them has NaN or infinity.
        """
        before, self.unused = self.unused, {}
        if not any(float(total[-1]) for total in totals):  # NaN is true
            return []
        rows = comm.all_gather(
            torch.tensor(conditions(params, buckets), dtype=torch.uint8, device=comm.device)
        ).tolist()
        if any(condition in WORDS for row in rows for condition in row):
            raise FloatingPointError(self.not_finite(rows))
        for index, name in enumerate(self.names):
            ranks = [rank for rank, row in enumerate(rows) if row[index] == NONE]
            if ranks:
                self.unused[name] = ranks
        if comm.rank == 0 and self.unused != before and self.unused:
            warnings.warn(self.missing(comm.size), stacklevel=5)
        return [i for i, name in enumerate(self.names) if len(self.unused.get(name, ())) == comm.size]

    def require_finite_sums(self, buckets, totals):
        """Raise FloatingPointError where gradients that are finite on every rank have a sum beyond float16's 65504."""
        index = overflowed(buckets, totals)
        if index is not None:
            raise FloatingPointError(self.too_large(index))

    def too_large(self, index):
        return (
            f"the sum of all ranks overflows float16 in the gradient of {self.names[index]}, though it is finite on "
            "every rank: scale the loss down. No rank has taken this step"
        )

    def not_finite(self, rows):
        """Which rank, which layer. Backward goes from the last layer to the first, and so does NaN."""
        told = []
        for rank, row in enumerate(rows):
            bad = [index for index, condition in enumerate(row) if condition in WORDS]
            if bad:
                more = f" and in {len(bad) - 1} that backward reaches later" if len(bad) > 1 else ""
                told.append(f"rank {rank} has {WORDS[row[bad[-1]]]} in the gradient of {self.names[bad[-1]]}{more}")
        return f"{'; '.join(told)}. No rank has taken this step: look at that rank's input, and at the learning rate"

    def missing(self, size):
        """Which parameters got no gradient, on which ranks."""
        groups = {}
        for name, ranks in self.unused.items():
            groups.setdefault(tuple(ranks), []).append(name)
        told = []
        for ranks, names in groups.items():
            everywhere = "on any rank: they are left as they are"
            where = everywhere if len(ranks) == size else f"on {name_ranks(ranks)}: zeros are added there"
            told.append(f"{', '.join(names)} {where}")
        return f"the loss does not depend on all parameters. No gradient for {'; for '.join(told)}"


def overflowed(buckets, totals):
    """The index of the parameter, the last if several, whose sum is not finite in float16; None where all are finite.

    Only float16 is looked at, whose range gradients reach: a look at all costs wide dtypes a pass over memory.
    """
    bad = [
        index
        for bucket, total in zip(buckets, totals, strict=True)
        if not finite_in_float16(total[:-1])
        for index, view in zip(bucket.indices, bucket.views_of(total), strict=True)
        if not finite_in_float16(view)
    ]
    return max(bad, default=None)


def finite_in_float16(x):
    return x.dtype != torch.float16 or bool(torch.isfinite(x.sum(dtype=torch.float32)))


def conditions(params, buckets):
    """What this rank has to say of the gradient of every parameter."""
    said = [FINE if p.grad is not None else NONE for p in params]
    for bucket in buckets:
        if torch.isnan(bucket.flag):
            for index in bucket.indices:
                said[index] = condition_of(params[index].grad)
    return said


def condition_of(grad):
    """FINE, NONE, NAN or INFINITE: what a rank says of one gradient."""
    if grad is None:
        return NONE
    if torch.isfinite(grad).all():
        return FINE
    return NAN if torch.isnan(grad).any() else INFINITE


def require_sums(comm, strategy):
    """Raise ValueError on every rank unless the all_reduce of a strategy that was started adds what it should."""
    require_sums_of(comm, strategy.all_reduce, [bucket.flat.dtype for bucket in strategy.buckets])


def require_sums_of(comm, all_reduce, dtypes):
    """Raise ValueError on every rank unless `all_reduce` adds what it should.

    Once for each dtype that travels; the communicator's own is trusted. Collective.
    Steps: one all_reduce of 2p + 1 elements, which no chunks divide equally, and an all_gather of 32 bytes.
    """
    if all_reduce is best_all_reduce:
        return
    recording, comm.trace.enabled = comm.trace.enabled, False
    try:
        for dtype in dict.fromkeys(dtypes):
            require_sum(comm, all_reduce, dtype)
    finally:
        comm.trace.enabled = recording


def require_sum(comm, all_reduce, dtype):
    """Raise ValueError on every rank unless `all_reduce` makes a known sum of a few numbers of this dtype."""
    n = 2 * comm.size + 1
    x, want = allocate(comm, n, dtype), sum(brought(rank, n) for rank in range(comm.size))
    x.copy_(torch.from_numpy(brought(comm.rank, n)))
    got = np.asarray(to_numpy(result_of(all_reduce, comm, x).double()))
    far = np.flatnonzero(~(np.abs(got - want) <= 4 * torch.finfo(dtype).eps * want))
    first = int(far[0]) if len(far) else 0
    mine = torch.tensor([len(far), first, want[first], got[first]], dtype=torch.float64, device=comm.device)
    for rank, (wrong, index, should, is_) in enumerate(comm.all_gather(mine).tolist()):
        if wrong:
            raise ValueError(
                f"{name_of(all_reduce)} does not add up: on rank {rank}, element {index:.0f} of {n} should be "
                f"{should:g}, the sum over {comm.size} ranks, and is {is_:g}: lab.check finds out why"
            )


def brought(rank, n):
    """(n,) small whole numbers, whose sums are exact: other numbers on other ranks, in another order."""
    return 1.0 + np.arange(n) * (rank + 1) % 5


WORST = 3  # names are told at most


def loss_of_all(comm, losses, params, checksum=None):
    """The sum over ranks of `losses`, the same float on every rank.

    Args:    losses: {micro_batch: scalar tensor} of this rank; params: {name: parameter} of this rank; checksum: of the
             batch, 16 bits, which must be the same on every rank; None: not looked at.
    Raises:  FloatingPointError on every rank where a loss, or a gradient, has NaN or infinity: which rank, what;
             ValueError on every rank where their checksums differ.
    Steps: one all_reduce.   Bytes per rank: those of all_reduce for 16 bytes, 32 with a checksum; only if it
    fails, ranks tell more.
    """
    total = torch.zeros((), dtype=torch.float64, device=comm.device)
    flag = total.clone()  # 0, or NaN where a gradient is not finite
    for loss in losses.values():
        total += loss
    for param in params.values():
        if param.grad is not None:
            flag += 0 * param.grad.sum(dtype=torch.float64 if param.dtype == torch.float64 else torch.float32)
    checked = [] if checksum is None else [checksum, checksum**2]  # of variance 0 where all ranks have the same
    total, flag, *sums = comm.all_reduce(torch.stack([total, flag, *map(total.new_tensor, checked)])).tolist()
    if sums and comm.size * sums[1] != sums[0] ** 2:
        require_same(comm, "batch", f"checksum {checksum:04x}: give every rank the same x and y, the whole batch")
    if not math.isfinite(total) or math.isnan(flag):
        raise FloatingPointError(not_finite(comm, losses, params))
    return total


def require_answers(output, y, classes):
    """Raise ValueError unless cross-entropy can compare `y` with what the model makes of the batch.

    Args:    output: the shape of its output for the whole batch; classes: the dimension of that which holds classes.
    """
    wanted = tuple(size for dim, size in enumerate(output) if dim != classes % len(output))
    if tuple(y.shape) != wanted or y.dtype != torch.int64:
        raise ValueError(
            f"cross-entropy of an output of shape {tuple(output)} needs y of shape {wanted} in torch.int64, and y has "
            f"shape {tuple(y.shape)} in {y.dtype}: another y, or another loss"
        )


def not_finite(comm, losses, params):
    """One sentence about what is NaN or infinite, first where it must have come from. Collective."""
    found = [
        ("in the parameter", [name for name, p in params.items() if not finite(p)]),
        ("in the loss of micro-batch", [str(i) for i, loss in losses.items() if not finite(loss)]),
        ("in the gradient of", [name for name, p in params.items() if p.grad is not None and not finite(p.grad)]),
    ]
    mine = [(where, ", ".join(names[:WORST]) + more_than(names)) for where, names in found if names]
    tables = [dict(pair for pair in pairs if len(pair) == 2) for pairs in everybodys_items(comm, mine)]
    for where, _ in found:
        told = [f"rank {rank} {where} {table[where]}" for rank, table in enumerate(tables) if where in table]
        if told:
            return f"NaN or infinity on {', on '.join(told)}. Take no step: look at the input, and at the learning rate"
    raise AssertionError("something was not finite, and is now")


def more_than(names):
    return f" and {len(names) - WORST} more" if len(names) > WORST else ""


def finite(tensor):
    return bool(torch.isfinite(tensor).all())
