"""Before the first step: do all ranks mean the same model? What differs is found and named, on every rank alike.

Each rank tells one number, a digest of what it has, 8 bytes. Only where these differ do ranks tell each other more.
"""

import hashlib
import warnings
import zlib

import torch
from torch.nn.parameter import is_lazy

from ..comm.waits import name_ranks


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
