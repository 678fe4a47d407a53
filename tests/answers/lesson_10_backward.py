"""Answers to do_backward of notebook 10 that a check must reject or accept; CI proves both."""

import torch

from hpdl_lab.parallel.pipeline.naive import do_backward

from . import WrongAnswer

# -- wrong -------------------------------------------------------------------------------------------------------------


def after(schedule, stage):
    """The rank of the stage after."""
    return schedule.rank_of(schedule.next(stage))


def before(schedule, stage):
    """The rank of the stage before."""
    return schedule.rank_of(schedule.previous(stage))


def gradient_of(comm, schedule, stage, y):
    """What the stage after sends, or None on the last stage."""
    return None if schedule.is_last(stage) else comm.recv(torch.empty_like(y), after(schedule, stage))


def arrows_the_wrong_way(comm, schedule, action, saved):
    stage, _, i = action
    x, y = saved.pop((stage, i))
    dy = None if schedule.is_first(stage) else comm.recv(torch.empty_like(y), before(schedule, stage))
    torch.autograd.backward(y, dy)
    if not schedule.is_last(stage):
        comm.send(x.grad, after(schedule, stage))


def keeps_the_gradient_to_itself(comm, schedule, action, saved):
    stage, _, i = action
    _, y = saved.pop((stage, i))
    torch.autograd.backward(y, gradient_of(comm, schedule, stage, y))


def the_last_stage_waits_too(comm, schedule, action, saved):
    stage, _, i = action
    x, y = saved.pop((stage, i))
    torch.autograd.backward(y, comm.recv(torch.empty_like(y), after(schedule, stage)))
    if not schedule.is_first(stage):
        comm.send(x.grad, before(schedule, stage))


def next_rank_for_next_stage(comm, schedule, action, saved):
    stage, _, i = action
    x, y = saved.pop((stage, i))
    dy = None if schedule.is_last(stage) else comm.recv(torch.empty_like(y), comm.rank + 1)
    torch.autograd.backward(y, dy)
    if not schedule.is_first(stage):
        comm.send(x.grad, comm.rank - 1)


def begins_with_ones(comm, schedule, action, saved):
    stage, _, i = action
    x, y = saved.pop((stage, i))
    gradient_of(comm, schedule, stage, y)
    y.sum().backward()
    if not schedule.is_first(stage):
        comm.send(x.grad, before(schedule, stage))


def passes_on_what_came(comm, schedule, action, saved):
    stage, _, i = action
    x, y = saved.pop((stage, i))
    dy = gradient_of(comm, schedule, stage, y)
    torch.autograd.backward(y, dy)
    if not schedule.is_first(stage):
        comm.send(x.grad if dy is None else dy, before(schedule, stage))


def divides_once_more(comm, schedule, action, saved):
    stage, _, i = action
    x, y = saved[stage, i]
    saved[stage, i] = x, y / schedule.micro_batches if schedule.is_last(stage) else y
    do_backward(comm, schedule, action, saved)


def only_for_the_input(comm, schedule, action, saved):
    stage, _, i = action
    x, y = saved.pop((stage, i))
    dy = gradient_of(comm, schedule, stage, y)
    if not schedule.is_first(stage):
        (dx,) = torch.autograd.grad(y, x, dy)
        comm.send(dx, before(schedule, stage))


def only_the_first_micro_batch(comm, schedule, action, saved):
    stage, _, i = action
    x, y = saved.pop((stage, i))
    dy = gradient_of(comm, schedule, stage, y)
    if i == 0:
        torch.autograd.backward(y, dy)
    if not schedule.is_first(stage):
        comm.send(torch.zeros_like(x) if x.grad is None else x.grad, before(schedule, stage))


def keeps_what_is_done(comm, schedule, action, saved):
    do_backward(comm, schedule, action, dict(saved))


def takes(comm, schedule, action, saved, choose):
    """do_backward of the micro-batch that choose(those of this stage) says, whatever the action says."""
    micro_batch = choose(i for stage, i in saved if stage == action.stage)
    do_backward(comm, schedule, action._replace(micro_batch=micro_batch), saved)


def takes_the_oldest(comm, schedule, action, saved):
    takes(comm, schedule, action, saved, min)


def takes_the_newest(comm, schedule, action, saved):
    takes(comm, schedule, action, saved, max)


def asks_for_the_shape(comm, schedule, action, saved):
    stage, _, i = action
    x, y = saved.pop((stage, i))
    dy = None
    if not schedule.is_last(stage):
        shape = comm.recv(torch.empty(2, dtype=torch.int64), after(schedule, stage)).tolist()
        dy = comm.recv(torch.empty(shape, dtype=y.dtype), after(schedule, stage))
    torch.autograd.backward(y, dy)
    if not schedule.is_first(stage):
        comm.send(torch.tensor(x.shape), before(schedule, stage))
        comm.send(x.grad, before(schedule, stage))


def forgets_to_wait(comm, schedule, action, saved):
    stage, _, i = action
    x, y = saved.pop((stage, i))
    torch.autograd.backward(y, gradient_of(comm, schedule, stage, y))
    if not schedule.is_first(stage):
        comm.isend(x.grad, before(schedule, stage))


def waits_for_all_stages(comm, schedule, action, saved):
    """Right in GPipe, where all ranks have as many backwards: one after the other."""
    do_backward(comm, schedule, action, saved)
    if schedule.ranks > 2:
        comm.barrier()


def sends_first(comm, schedule, action, saved):
    stage, _, i = action
    x, y = saved.pop((stage, i))
    if not schedule.is_first(stage):
        comm.send(x.grad, before(schedule, stage))
    torch.autograd.backward(y, gradient_of(comm, schedule, stage, y))


# -- right -------------------------------------------------------------------------------------------------------------


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


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "10.5": (
        WrongAnswer(arrows_the_wrong_way, "raises", "only for scalar outputs"),
        WrongAnswer(keeps_the_gradient_to_itself, "deadlock", "rank 1 never sent to rank 0"),
        WrongAnswer(the_last_stage_waits_too, "raises", "none after the last, whose output is the loss"),
        WrongAnswer(next_rank_for_next_stage, "neighbor", "ask schedule.rank_of"),
        WrongAnswer(begins_with_ones, "gradient", "was what came not used?"),
        WrongAnswer(passes_on_what_came, "gradient", "was something else sent by stage"),
        WrongAnswer(divides_once_more, "scale", "the losses are divided already"),
        WrongAnswer(only_for_the_input, "weights", "only torch.autograd.backward leaves them"),
        WrongAnswer(only_the_first_micro_batch, "accumulate", "That is micro-batch 0 alone"),
        WrongAnswer(keeps_what_is_done, "memory", "Take the entry out"),
        WrongAnswer(takes_the_oldest, "micro-batch", "in 0B2 rank 0 takes (0, 0) out of `saved`, and not (0, 2)"),
        WrongAnswer(takes_the_newest, "micro-batch", "gradients would meet the wrong activations"),
        WrongAnswer(asks_for_the_shape, "traffic", "nothing has to be asked"),
        WrongAnswer(forgets_to_wait, "wait", "rank 1 did not wait for 1 of its sends to rank 0"),
        WrongAnswer(waits_for_all_stages, "traffic", "a rank waits in 4 barriers, and none is needed"),
        WrongAnswer(sends_first, "raises", "NoneType"),
    ),
}
RIGHT = {
    "10.5": (posts_its_receive_first, by_the_tensors_own_method),
}
