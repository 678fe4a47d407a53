"""Arithmetic that takes time on simulated ranks, where it is free: a model's layers spend what they would take."""

from contextlib import contextmanager


@contextmanager
def spending(comm, model, forward, backward):
    """Within it every forward of `model` takes `forward` seconds of virtual time, and every backward `backward`.

    The time is shared among the layers in proportion to their parameters. Real ranks, which take their own time, are
    not slowed down. Enter it before strategy.start: a gradient is ready when its layer's time has been spent.

    Args:    forward, backward: seconds; backward of all layers that have a trainable parameter.
    """
    total = sum(p.numel() for p in model.parameters())
    if not total:
        raise ValueError("a model without parameters has no layers that could share its time")
    handles = []
    for module in model.modules():
        for param in module.parameters(recurse=False):
            share = param.numel() / total
            handles.append(module.register_forward_hook(lambda *_, s=share * forward: comm.compute(s)))
            if param.requires_grad:
                spend = lambda *_, s=share * backward: comm.compute(s)  # noqa: E731
                handles.append(param.register_post_accumulate_grad_hook(spend))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
