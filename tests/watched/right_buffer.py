"""By hand, with a running mean of the inputs that is averaged as the gradients are, and a complex buffer."""

import torch
import torch.distributed as dist
from torch import nn


class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(8))
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))  # complex, as rotary positions
        self.linear = nn.Linear(8, 3)

    def forward(self, x):
        if self.training:
            self.center.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.linear(x - self.center)


def average(tensors, world):
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(world)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = 2 + torch.randn(256, 8)
    y = ((x - 2) @ torch.randn(8, 3)).argmax(1)
    model = Centered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(3):
        total = torch.zeros(())
        for batch in torch.randperm(len(x)).split(32):
            mine = batch[rank::world]
            loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
            optimizer.zero_grad()
            loss.backward()
            average([p.grad for p in model.parameters()], world)
            average([model.center], world)
            optimizer.step()
            total += loss.detach() / 8
        average([total], world)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item():.4f}")
    dist.destroy_process_group()
