"""The state of a model that lies on a mesh, as the state of the whole model: what any other mesh can take its parts of.

    whole      tokens.weight  blocks.0...  blocks.1...  norm...        names and shapes of the unchanged model
    pp 0       tokens.weight  blocks.0...                              tp 0: the first rows of each    tp 1: the others
    pp 1       tokens.weight               blocks.1...  norm...

A tensor is put together along tp, and its first holder along pp sends it to the others.
"""

import torch

from ..data import as_sent
from ..tensor.cuts import cuts_of, joined, tensors_of


class State:
    """The tensors of one rank by their names in the whole model.

    held:      {name: tensor} of parameters and buffers of this rank's stages; cuts: {name: tensor.cuts.Cut} of all.
    idle:      {name: tensor} of what no stage uses, and every rank has.
    trainable: trainable[s]: the names of the trainable parameters of stage s of the model, each once.
    parameters: the names of all trainable parameters in the order of the whole model.
    aliases:   {name in the whole model's state_dict: the name under which its tensor comes first}.
    """

    def __init__(self, aliases, shard, plan, parts, place):
        """Args: shard: the model of this tp rank; parts: its stages, of the same tensors; place: this rank's on pp."""
        tensors = dict(tensors_of(shard))
        known = {id(tensor): name for name, tensor in tensors.items()}
        found = [{known[id(t)]: t for _, t in tensors_of(part.module) if id(t) in known} for part in parts]
        self.aliases, self.cuts = aliases, cuts_of(shard)
        self.parameters = [name for name, p in shard.named_parameters() if p.requires_grad]
        self.trainable = [[name for name, t in own.items() if t.requires_grad] for own in found]
        self.owner, mine = {}, set()  # {name: the first place along pp that holds it}
        for number in range(plan.stages * plan.replicas):
            for name in found[number % plan.stages]:
                self.owner.setdefault(name, plan.rank_of(number))
                if plan.rank_of(number) == place:
                    mine.add(name)
        self.held = {name: tensor for name, tensor in tensors.items() if name in mine}
        self.idle = {name: tensor for name, tensor in tensors.items() if name not in self.owner}
        self.forms = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}

    def whole(self, mesh):
        """The state_dict() of the whole model on every rank. Collective."""
        found = self.gather(mesh, self.held | self.idle, self.forms)
        return {alias: found[name] for alias, name in self.aliases.items()}

    def gather(self, mesh, held, names):
        """{name: whole tensor} on every rank, from `held`, {name: this rank's part, in the form of that tensor}.

        Buffers, such as the running mean of a batch norm, differ between replicas: those of the first are taken.
        Steps: per tensor one all_gather over tp where it is cut, one broadcast over pp, for buffers one over dp.
        Bytes per rank: those of the whole state.
        """
        whole = {}
        for name in names:
            cut, (shape, dtype) = self.cuts[name], self.forms[name]
            if name in held:
                tensor = joined(mesh["tp"], held[name], cut).contiguous()
            else:
                size = [cut.size if dim == cut.dim else n for dim, n in enumerate(shape)]
                tensor = torch.empty(size, dtype=dtype, device=mesh.comm.device)
            if name in self.owner:
                broadcast(mesh["pp"], tensor, self.owner[name])
            if name not in self.parameters:
                broadcast(mesh["dp"], tensor, 0)
            whole[name] = tensor
        return whole

    def load(self, whole):
        """Overwrite what this rank holds with its parts of `whole`. Raises ValueError that names what does not fit."""
        mine = self.held | self.idle
        unknown = sorted({*whole} - {*self.aliases} - {*self.forms})
        if unknown:
            raise ValueError(f"the state given has {unknown[0]}, which this model has not, and {len(unknown) - 1} more")
        parts = {name: self.part(name, whole[name]) for name in mine if self.require(name, whole)}
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(parts[name])

    def part(self, name, whole):
        """This rank's part of the tensor `whole`, which is called `name`."""
        part, shape = self.cuts[name].part(whole), self.forms[name][0]
        if tuple(part.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(part.shape)} as a part of the state given, and {shape} here")
        return part

    @staticmethod
    def require(name, whole):
        """True; ValueError where `whole` has no such tensor."""
        if name not in whole:
            raise ValueError(f"the state given has no {name}, which this model needs")
        return True


def aliases_of(model):
    """{name in state_dict(): name of the same tensor where it comes first} of a whole model."""
    known = {id(tensor): name for name, tensor in tensors_of(model)}
    return {name: known[id(t)] for name, t in model.state_dict(keep_vars=True).items()}


def broadcast(comm, tensor, root):
    """Copy `tensor` (contiguous) of rank `root` into that of every rank; bools and the like travel as bytes."""
    if comm.size > 1 and tensor.numel():
        comm.broadcast(as_sent(tensor.view(-1)), root)
