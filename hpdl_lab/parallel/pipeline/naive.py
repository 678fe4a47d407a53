"""A pipeline in its simplest form: one tensor between stages, and every message is waited for at once.

    do_forward   receive x from the stage before, y = stage(x), send y to the stage after
    do_backward  receive the gradient of y from the stage after, send the gradient of x to the stage before

It carries out GPipe, whose forwards are all done before the first backward. 1F1B deadlocks: one rank sends its next
output while the other sends a gradient back, and both wait until theirs is received. pipeline/run_schedule.py posts its
messages, and carries out any schedule; it also has several tensors, halves of a backward, and stages on one rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...comm.base import Comm
from ...schedules import Action, Schedule


def do_forward(
    comm: Comm,
    schedule: Schedule,
    action: Action,
    module: torch.nn.Module,
    saved: dict[tuple[int, int], tuple[Tensor, Tensor]],
    x: Tensor,
    loss: Callable[[Tensor], Tensor],
) -> None:
    """Do the forward of one micro-batch through one stage, with its messages; keeps what backward needs in `saved`.

    Args:    action: schedules.Action of kind "F"; module: f(x) -> y, the layers of the stage. x: the micro-batch on the
             first stage, elsewhere a tensor of the shape of the stage's input, which is overwritten. loss: on the last
             stage f(y) -> scalar, divided by the number of micro-batches.
             saved: {(stage, micro-batch): (x, y)}, of this rank.
    """
    stage, _, micro_batch = action
    if not schedule.is_first(stage):
        comm.recv(x, schedule.rank_of(schedule.previous(stage)))
        x = x.clone().requires_grad_()
    y = module(x)
    if schedule.is_last(stage):
        y = loss(y)
    else:
        comm.send(y.detach().contiguous(), schedule.rank_of(schedule.next(stage)))
    saved[stage, micro_batch] = x, y


def do_backward(
    comm: Comm, schedule: Schedule, action: Action, saved: dict[tuple[int, int], tuple[Any, Tensor]]
) -> None:
    """Do the backward of one micro-batch through one stage, and send its messages.

        forward    previous stage --- x ---> [ this stage ] --- y ---> next stage
        backward   previous stage <- dx ---- [ this stage ] <-- dy --- next stage

    Args:    action: schedules.Action(stage, "B", micro_batch).
             schedule: previous(stage) and next(stage) are the numbers of the previous
             and the next stage; is_first(stage) is True if there is no previous stage,
             is_last(stage) if there is no next stage; rank_of(stage) is the rank that
             holds a stage.
             saved: {(stage, micro-batch): (x, y)} of this rank: the stage's input and
             output, from the forward. On the last stage, y is the micro-batch's loss,
             already divided by the number of micro-batches. On the first stage, x is
             data and needs no gradient. Remove the entry of this micro-batch, so that
             its activations are freed.
    Returns: None. Gradients of this micro-batch are added to .grad of the parameters.
    Raises:  CommTimeout if a neighbor does not answer.
    Steps: one receive, unless the stage is the last; one send, unless it is the first.
    Bytes per rank: the bytes of x.
    Ref: Huang et al. 2019 (GPipe), arXiv:1811.06965, section 2.
    """
    ### BEGIN SOLUTION
    stage, _, micro_batch = action
    x, y = saved.pop((stage, micro_batch))
    dy = None
    if not schedule.is_last(stage):
        dy = comm.recv(torch.empty(y.shape, dtype=y.dtype), schedule.rank_of(schedule.next(stage)))
    torch.autograd.backward(y, dy)
    if not schedule.is_first(stage):
        comm.send(x.grad.contiguous(), schedule.rank_of(schedule.previous(stage)))
    ### END SOLUTION
