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
    """Do the backward of one micro-batch through one stage, with its messages: as in forward, reversed.

        forward    stage before --- x ---> [ this stage ] --- y ---> stage after
        backward   stage before <- dx ---- [ this stage ] <-- dy --- stage after

    Args:    action: schedules.Action of kind "B"; schedule: whose previous(stage), next(stage), is_first(stage),
             is_last(stage) and rank_of(stage) say which rank has which stage.
             saved: {(stage, micro-batch): (x, y)}, this rank's: the stage's input and output, with their graph. On the
             last stage y is the loss of the micro-batch, a scalar, already divided by the number of micro-batches; on
             the first x is the batch's, which needs no gradient. The entry of this micro-batch is removed: no more
             than what is live is kept in memory.
    Returns: None. The gradients of the parameters are added to what their .grad has from other micro-batches.
    Raises:  CommTimeout if a neighbor does not answer.
    Steps: 1 message in, unless the stage is the last; 1 out, unless it is the first.   Bytes per rank: as x has.
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
