"""Horovod's promise: a script for one rank becomes one for many by three changed lines.

    comm = hpdl_lab.comm.world()                              # 1  instead of nothing
    broadcast_parameters(comm, model)                         # 2  all ranks start from the same model
    optimizer = DistributedOptimizer(optimizer, comm)         # 3  step() averages the gradients first

Each rank then reads its own share of the data. Ref: Sergeev & Del Balso 2018, arXiv:1802.05799, section 4.
"""

from .fusion import Fusion


def DistributedOptimizer(optimizer, comm, named_parameters=None, **fusion):
    """Let `optimizer.step()` average the gradients over ranks first; returns the same optimizer.

    Reduction starts while backward goes on. So it stays the optimizer that it was: learning rate schedulers,
    `state_dict` and gradient scaling see no difference.

    Args:    optimizer: any torch.optim.Optimizer; its parameters in the same order on every rank.
             named_parameters: (name, parameter) pairs, for messages: model.named_parameters(); else "parameter 0", ...
             fusion: all_reduce, threshold, cycle, average, passes, timeline: see parallel/fusion.py.
    Raises:  ValueError where the optimizer has nothing to train, or names are missing.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not params:
        raise ValueError("this optimizer has no parameter that requires a gradient: nothing to average")
    names = names_of(params, named_parameters)
    fused = Fusion(comm, params, names, **fusion)
    optimizer.register_step_pre_hook(lambda *_: fused.synchronize())
    return optimizer


def names_of(params, named_parameters=None):
    """The names of `params`, in their order; "parameter 0", "parameter 1", ... where none are given."""
    if named_parameters is None:
        return [f"parameter {i}" for i in range(len(params))]
    known = {id(param): name for name, param in named_parameters}
    missing = [i for i, param in enumerate(params) if id(param) not in known]
    if missing:
        of = f"{len(missing)} of the optimizer's {len(params)} parameters"
        raise ValueError(f"named_parameters lacks {of}, first of all number {missing[0]}")
    return [known[id(param)] for param in params]
