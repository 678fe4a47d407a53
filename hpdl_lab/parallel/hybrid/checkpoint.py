"""Checkpoints of a model on a mesh, in the files of checkpoint.py: any other mesh, or one rank, goes on from them.

    dp=2 pp=2  --gather over tp, send along pp-->  whole model, whole optimizer  --rank 0-->  file
    tp=2 dp=2  <--each takes its part of both---  rank 0 reads, and sends it to all ranks  <--  file

The optimizer's state is that of torch for the whole model: tensors that have the shape of their parameter, such as a
momentum, are cut and put together as it is, all others, such as Adam's count of steps, are the same everywhere.
"""

import torch

from .. import checkpoint
from ..consensus import everybodys_items

LIKE, OTHER = "like its parameter", "of shape"


def save(hybrid, path, optimizer, step, facts=None):
    """Let rank 0 write model, optimizer and the number of steps to `path`. Collective.

    Args:    hybrid: a HybridParallel; optimizer: of hybrid.parameters(), with one group of them.
             facts: {name: number or word} that must be the same when training goes on; see checkpoint.facts_of.
    Raises:  ValueError on every rank for an optimizer of other parameters; OSError on rank 0 as checkpoint.save.
    """
    require_one_group(hybrid, optimizer)
    state = {
        "model": hybrid.state_dict(),
        "optimizer": whole_optimizer(hybrid, optimizer),
        "step": step,
        "facts": facts or {},
    }
    if hybrid.mesh.comm.rank == 0:
        checkpoint.write(path, state)


def restore(hybrid, path, optimizer, facts=None):
    """Take model and optimizer from the file that rank 0 finds at `path`; returns the number of steps in it.

    Raises:  on every rank alike, what checkpoint.restore raises.   Bytes: the file, once to every rank.
    """
    require_one_group(hybrid, optimizer)
    state = checkpoint.received(hybrid.mesh.comm, path)
    checkpoint.require_same_facts(path, state["facts"], facts or {})
    try:
        hybrid.load_state_dict(state["model"])
        optimizer.load_state_dict(part_of_optimizer(hybrid, optimizer, state["optimizer"]))
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"checkpoint {path} is of another model or optimizer: {checkpoint.short(error)}") from None
    return state["step"]


def whole_optimizer(hybrid, optimizer):
    """optimizer.state_dict() as it would be for the whole model, on every rank. Collective.

    Raises:  ValueError on every rank for an optimizer whose state is neither like a parameter nor one number.
    """
    state, mine = hybrid.state, hybrid.named_parameters()
    kinds = kinds_of_all(hybrid.mesh.comm, {name: (p, optimizer.state[p]) for name, p in mine.items()})
    found = {}
    for key, told in kinds.items():
        if told == LIKE:
            values = {name: optimizer.state[p].get(key, torch.zeros_like(p)) for name, p in mine.items()}
            found[key] = state.gather(hybrid.mesh, values, state.parameters)
        else:  # a tensor for each, as torch counts in it
            found[key] = {name: torch.tensor(float(told)) for name in state.parameters}
    rows = {i: {key: found[key][name] for key in kinds} for i, name in enumerate(state.parameters) if kinds}
    (group,) = optimizer.state_dict()["param_groups"]
    return {"state": rows, "param_groups": [group | {"params": list(range(len(state.parameters)))}]}


def kinds_of_all(comm, rows):
    """{key of the optimizer's state: LIKE its parameter, or the one number that it is}, of all ranks. Collective.

    Args:    rows: {name: (parameter, {key: value})} of this rank, which has none where its stages are frozen.
    Raises:  ValueError on every rank for a state that is neither.
    """
    told = {
        (key, kind_of(key, value, param))
        for param, row in rows.values()
        for key, value in row.items()
        if value is not None
    }
    pairs = sorted({tuple(pair) for table in everybodys_items(comm, sorted(told)) for pair in table if len(pair) == 2})
    kinds = dict(pairs)
    for key, kind in pairs:
        if kind.startswith(OTHER) or kinds[key] != kind:
            what = kind if kind.startswith(OTHER) else f"{kinds[key]} on one rank and {kind} on another"
            raise ValueError(f"a checkpoint knows no optimizer whose {key} is {what}: SGD, Adam and the like are known")
    return kinds


def part_of_optimizer(hybrid, optimizer, whole):
    """This rank's part of the optimizer's state `whole`."""
    names = hybrid.state.parameters
    (group,) = whole["param_groups"]
    if len(group["params"]) != len(names):
        raise ValueError(f"its optimizer has {len(group['params'])} parameters, this model {len(names)}")
    rows = {}
    for i, name in enumerate(hybrid.named_parameters()):
        row = whole["state"].get(names.index(name), {})
        shape = whole_shape(hybrid, name)
        rows[i] = {key: hybrid.state.part(name, v) if shape_of(v) == shape else v for key, v in row.items()}
    (ours,) = optimizer.state_dict()["param_groups"]
    return {"state": {i: row for i, row in rows.items() if row}, "param_groups": [group | {"params": ours["params"]}]}


def whole_shape(hybrid, name):
    """The shape of a parameter in the whole model."""
    cut, (shape, _) = hybrid.state.cuts[name], hybrid.state.forms[name]
    return tuple(cut.size if dim == cut.dim else n for dim, n in enumerate(shape))


def kind_of(key, value, param):
    """LIKE the parameter, the number that it is, or OTHER with its shape."""
    shape = shape_of(value)
    if shape == tuple(param.shape) and (param.ndim or key != "step"):  # which a scalar's momentum is alike in shape to
        return LIKE
    return repr(float(value)) if shape in (None, ()) else f"{OTHER} {shape} for a parameter of shape {(*param.shape,)}"


def shape_of(value):
    return tuple(value.shape) if hasattr(value, "shape") else None


def require_one_group(hybrid, optimizer):
    """Raise ValueError unless the optimizer has the parameters of `hybrid`, all of them in one group."""
    ours = [id(p) for p in hybrid.parameters()]
    theirs = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    if theirs != [ours]:
        raise ValueError(
            f"a checkpoint needs an optimizer of hybrid.parameters(), {len(ours)} tensors in one group: "
            f"this one has groups of {', '.join(str(len(group)) for group in theirs)}"
        )
