"""A stage that computes nothing and takes its time: to see a schedule at work without a model."""

import torch

from .stage import Spec


class TimedStage:
    """Has the methods of stage.Stage, and passes on tensors of zeros.

    spend:   f(seconds): comm.compute on simulated ranks, time.sleep on real ones.
    forward, backward, input, weight: seconds of an F, B, I, W.
    shape:   of the one float32 tensor that passes between stages.
    """

    def __init__(self, spend, forward=1.0, backward=2.0, input=1.0, weight=1.0, shape=(1,)):
        self.spend, self.seconds = spend, (forward, backward, input, weight)
        self.takes = self.gives = (Spec(tuple(shape), torch.float32, True),)

    def forward(self, micro_batch, inputs, loss=None):
        self.spend(self.seconds[0])
        return self._tensors()

    def backward(self, micro_batch, gradients=()):
        self.spend(self.seconds[1])
        return self._tensors()

    def input_gradient(self, micro_batch, gradients=()):
        self.spend(self.seconds[2])
        return self._tensors()

    def weight_gradient(self, micro_batch):
        self.spend(self.seconds[3])

    def forget(self):
        """Nothing is under way."""

    def _tensors(self):
        return tuple(torch.zeros(spec.shape) for spec in self.takes)
