"""PyTorch: one process alone, DistributedDataParallel by gloo, the same compiled, and the ring of this laboratory."""

import sys
from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ...collectives import ring
from ...comm.torch.transport import world
from ..frameworks import two_layers
from . import net


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(map(torch.from_numpy, net.weights()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return two_layers(x, y, *self.weights)


def _main(how: str, role: str, number: str) -> None:
    x, y = map(torch.from_numpy, net.examples(int(number), 1 if how == "alone" else net.WORKERS))
    weights, comm = _Net(), None if how == "alone" else world(deadline=60)
    model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = weights
    if how in ("ddp", "compiled"):
        model = DistributedDataParallel(weights)
    if how == "compiled":
        model = torch.compile(model)
    descent = torch.optim.SGD(weights.parameters(), net.RATE)

    def step() -> None:
        descent.zero_grad()
        model(x, y).backward()  # DDP averages the gradients of all workers meanwhile
        if comm is not None and how == "ring":
            gradients = [weight.grad for weight in weights.parameters() if weight.grad is not None]
            vector_to_parameters(ring.all_reduce(comm, parameters_to_vector(gradients)) / comm.size, gradients)
        descent.step()

    net.train_and_print("hpdl_lab" if how == "ring" else "torch", step, lambda: model(x, y).item())


if __name__ == "__main__":
    _main(*sys.argv[1:])
