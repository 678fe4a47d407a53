"""Gradients on a mesh: over which axes each of them is added before the optimizer's step.

    a matrix that tp cuts             dp            every tp rank has its own part of it
    a norm, or a bias after a sum     dp            all tp ranks have computed the same whole gradient already
    the same with sequence parallel   dp and tp     each tp rank has seen only its positions of the sequence
    the tokens' table of a GPT        dp and pp     the first and the last stage use one table, and each adds its part

Never all of them: two stages hold different layers, and two tp ranks different halves of a matrix.
"""

from typing import NamedTuple

import torch

from ...comm.base import Comm


class Placed(NamedTuple):
    """One parameter on one rank, and where else there are parts of its gradient.

    name:      in the whole model; parameter: this rank's tensor, whole or cut by tp.
    over_tp:   True where each tp rank holds this parameter whole and has a part of its gradient.
    shared:    the communicator of the stages that hold this very parameter (tied weights), None where one does.
    """

    name: str
    parameter: torch.Tensor
    over_tp: bool = False
    shared: Comm | None = None


def reduce_gradients(mesh, parameters):
    """Make every gradient that of the whole batch, by adding it over those axes of the mesh along which it is in parts.

    The loss on a rank is divided by the global batch. So the parts add up, and nothing is divided here.

        dp 0: gradient of its examples --+                 where over_tp: over mesh["tp"], too
        dp 1: gradient of its examples --+--> sum          where shared is there: over that communicator, too

    Args:    mesh: a DeviceMesh; mesh["dp"] is the communicator of the ranks that hold the same part of the model.
             parameters: list of Placed, in the same order on every rank that meets another in an all_reduce. Of each,
             placed.parameter is this rank's tensor, and its .grad what is added; placed.over_tp is True where each tp
             rank has a part of that gradient; placed.shared is the communicator of the stages that hold this very
             parameter, or None. A gradient that is None counts as zeros: another rank may have one for it.
    Returns: None; every parameter.grad is overwritten by the sum, the same on every rank that holds that parameter.
    Steps: per parameter one all_reduce over dp, one over tp where over_tp, one over `shared` where it is there.
    Ref: Narayanan et al. 2021, arXiv:2104.04473, section 2; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """
    ### BEGIN SOLUTION
    for placed in parameters:
        p = placed.parameter
        grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
        if placed.over_tp:
            mesh["tp"].all_reduce(grad)
        if placed.shared is not None:
            placed.shared.all_reduce(grad)
        p.grad = mesh["dp"].all_reduce(grad)
    ### END SOLUTION
