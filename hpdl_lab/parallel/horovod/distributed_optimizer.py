"""Horovod's promise: a script for one rank becomes one for many by three changed lines.

    comm = hpdl_lab.comm.world()                              # 1  instead of nothing
    broadcast_parameters(comm, model)                         # 2  all ranks start from the same model
    optimizer = DistributedOptimizer(optimizer, comm)         # 3  step() averages the gradients first

Each rank then reads its own share of the data. What looks at gradients before the update comes after `synchronize`:

    loss.backward()
    optimizer.synchronize()                                   # averages now; step() does not do it again
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

Ref: Sergeev & Del Balso 2018, arXiv:1802.05799, section 4.
"""

import torch

from .fusion import Fusion


def DistributedOptimizer(optimizer, comm, named_parameters=None, **fusion):
    """Let `optimizer.step()` average the gradients over ranks first; returns the same optimizer. Collective.

    Reduction starts while backward goes on. It stays the optimizer that it was, with `synchronize()` besides: learning
    rate schedulers and `state_dict` see no difference. `step(closure)` would run backward after the average, and a
    GradScaler looks for infinity on its own rank alone, so that ranks would skip different steps: both are refused.

    Args:    optimizer: any torch.optim.Optimizer; its parameters in the same order on every rank.
             named_parameters: (name, parameter) pairs, for messages: model.named_parameters(); else "parameter 0", ...
             fusion: all_reduce, threshold, cycle, average, passes, timeline: see parallel/horovod/fusion.py.
    Raises:  ValueError where the optimizer has nothing to train, names are missing, or ranks differ in the number,
             names, shapes or dtypes of their parameters. Later, backward: ValueError where it comes to a parameter more
             than `passes` times in one step; `step` and `synchronize`: see Fusion.synchronize.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"DistributedOptimizer(optimizer, comm) needs an optimizer of torch.optim, got {kind}")
    if hasattr(optimizer, "synchronize"):
        raise ValueError("this optimizer averages its gradients already: DistributedOptimizer once is enough")
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not params:
        raise ValueError("this optimizer has no parameter that requires a gradient: nothing to average")
    names = names_of(params, named_parameters)
    fused = Fusion(comm, params, names, **fusion)
    optimizer.synchronize = fused.synchronize
    optimizer._step_supports_amp_scaling = True  # GradScaler then calls `step` on every rank, where it is refused
    optimizer.register_step_pre_hook(lambda _, args, kwargs: before_step(optimizer, fused, *args[1:], **kwargs))
    return optimizer


def before_step(optimizer, fused, closure=None):
    """Average the gradients, unless `synchronize` has done it since the last backward."""
    if closure is not None:
        raise ValueError(
            "step(closure): gradients are averaged before step runs the closure, which would replace them by this "
            "rank's own. Call closure() yourself, then step()"
        )
    if hasattr(optimizer, "found_inf"):
        raise ValueError(
            "GradScaler looks at this rank's gradients before they are averaged, and ranks would skip different steps. "
            "Train in bfloat16, or scale the loss yourself and divide the gradients after optimizer.synchronize()"
        )
    if not fused.averaged:
        fused.synchronize()
    fused.averaged = False


def names_of(params, named_parameters=None):
    """The names of `params`, in their order; "parameter 0", "parameter 1", ... where none are given."""
    if named_parameters is None:
        return [f"parameter {i}" for i in range(len(params))]
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError("named_parameters are pairs of a name and a parameter: model.named_parameters()")
    known = {id(param): name for name, param in pairs}
    missing = [i for i, param in enumerate(params) if id(param) not in known]
    if missing:
        of = f"{len(missing)} of the optimizer's {len(params)} parameters"
        raise ValueError(f"named_parameters lacks {of}, first of all number {missing[0]}")
    return [known[id(param)] for param in params]
