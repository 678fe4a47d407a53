"""Answers to do_backward of notebook 10 that a check must reject or accept; CI proves both."""

import torch

from hpdl_lab.parallel.pipeline.naive import do_backward


def after(schedule, stage):
    """The rank of the stage after."""
    return schedule.rank_of(schedule.next(stage))


def before(schedule, stage):
    """The rank of the stage before."""
    return schedule.rank_of(schedule.previous(stage))


def gradient_of(comm, schedule, stage, y):
    """What the stage after sends, or None on the last stage."""
    return None if schedule.is_last(stage) else comm.recv(torch.empty_like(y), after(schedule, stage))


def passes_on_what_came(comm, schedule, action, saved):
    stage, _, i = action
    x, y = saved.pop((stage, i))
    dy = gradient_of(comm, schedule, stage, y)
    torch.autograd.backward(y, dy)
    if not schedule.is_first(stage):
        comm.send(x.grad if dy is None else dy, before(schedule, stage))


def takes(comm, schedule, action, saved, choose):
    """do_backward of the micro-batch that choose(micro-batches of this stage) says, whatever the action says."""
    micro_batch = choose(i for stage, i in saved if stage == action.stage)
    do_backward(comm, schedule, action._replace(micro_batch=micro_batch), saved)


def posts_its_receive_first(comm, schedule, action, saved):
    stage, _, i = action
    x, y = saved[stage, i]
    dy, work = None, None
    if not schedule.is_last(stage):
        dy = torch.empty_like(y)
        work = comm.irecv(dy, after(schedule, stage))
    del saved[stage, i]
    if work is not None:
        work.wait()
    torch.autograd.backward(y, dy)
    if not schedule.is_first(stage):
        comm.isend(x.grad.contiguous(), before(schedule, stage)).wait()


def by_the_tensors_own_method(comm, schedule, action, saved):
    stage, _, i = action
    x, y = saved.pop((stage, i))
    y.backward(gradient_of(comm, schedule, stage, y))
    if x.grad is not None:
        comm.send(x.grad, before(schedule, stage))


WRONG = {
    "10.4": """
raises: only for scalar outputs
    stage, _, i = action
    x, y = saved.pop((stage, i))
    dy = None if schedule.is_first(stage) else comm.recv(torch.empty_like(y), before(schedule, stage))
    torch.autograd.backward(y, dy)
    if not schedule.is_last(stage):
        comm.send(x.grad, after(schedule, stage))
deadlock: rank 1 never sent to rank 0
    stage, _, i = action
    _, y = saved.pop((stage, i))
    torch.autograd.backward(y, gradient_of(comm, schedule, stage, y))
raises @by_the_tensors_own_method: none after the last, whose output is the loss
    -     y.backward(gradient_of(comm, schedule, stage, y))
    -     if x.grad is not None:
    +     torch.autograd.backward(y, comm.recv(torch.empty_like(y), after(schedule, stage)))
    +     if not schedule.is_first(stage):
neighbor @passes_on_what_came: schedule.rank_of(stage) is the rank of each stage
    -     dy = gradient_of(comm, schedule, stage, y)
    +     dy = None if schedule.is_last(stage) else comm.recv(torch.empty_like(y), comm.rank + 1)
    -         comm.send(x.grad if dy is None else dy, before(schedule, stage))
    +         comm.send(x.grad, comm.rank - 1)
gradient @passes_on_what_came: did you not use what came?
    dy = gradient_of => gradient_of
    torch.autograd.backward(y, dy) => y.sum().backward()
    grad if dy is None else dy, => grad,
gradient @passes_on_what_came: send something else
scale: the losses are divided already
    stage, _, i = action
    x, y = saved[stage, i]
    saved[stage, i] = x, y / schedule.micro_batches if schedule.is_last(stage) else y
    do_backward(comm, schedule, action, saved)
weights: only torch.autograd.backward leaves them
    stage, _, i = action
    x, y = saved.pop((stage, i))
    dy = gradient_of(comm, schedule, stage, y)
    if not schedule.is_first(stage):
        (dx,) = torch.autograd.grad(y, x, dy)
        comm.send(dx, before(schedule, stage))
accumulate @passes_on_what_came: That is micro-batch 0 alone
    -     torch.autograd.backward(y, dy)
    +     if i == 0:
    +         torch.autograd.backward(y, dy)
    -         comm.send(x.grad if dy is None else dy, before(schedule, stage))
    +         comm.send(torch.zeros_like(x) if x.grad is None else x.grad, before(schedule, stage))
memory: Take the entry out
    do_backward(comm, schedule, action, dict(saved))
micro-batch: in 0B2 rank 0 takes (0, 0) out of `saved`, and not (0, 2)
    takes(comm, schedule, action, saved, min)
micro-batch: gradients would meet the wrong activations
    takes(comm, schedule, action, saved, max)
traffic @passes_on_what_came: one per micro-batch
    -     dy = gradient_of(comm, schedule, stage, y)
    +     dy = None
    +     if not schedule.is_last(stage):
    +         shape = comm.recv(torch.empty(2, dtype=torch.int64), after(schedule, stage)).tolist()
    +         dy = comm.recv(torch.empty(shape, dtype=y.dtype), after(schedule, stage))
    -         comm.send(x.grad if dy is None else dy, before(schedule, stage))
    +         comm.send(torch.tensor(x.shape), before(schedule, stage))
    +         comm.send(x.grad, before(schedule, stage))
wait: rank 1 did not wait for 1 of its sends to rank 0
    stage, _, i = action
    x, y = saved.pop((stage, i))
    torch.autograd.backward(y, gradient_of(comm, schedule, stage, y))
    if not schedule.is_first(stage):
        comm.isend(x.grad, before(schedule, stage))
traffic: a rank waits in 4 barriers, and none is needed
    do_backward(comm, schedule, action, saved)
    if schedule.ranks > 2:
        comm.barrier()
raises: NoneType
    stage, _, i = action
    x, y = saved.pop((stage, i))
    if not schedule.is_first(stage):
        comm.send(x.grad, before(schedule, stage))
    torch.autograd.backward(y, gradient_of(comm, schedule, stage, y))
""",
}
RIGHT = {
    "10.4": (posts_its_receive_first, by_the_tensors_own_method),
}
COMPLETED = {
    "10.4": ["schedule.rank_of(schedule.next(stage))", "schedule.rank_of(schedule.previous(stage))"],
}
