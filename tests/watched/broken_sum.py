"""As right_average_gradients.py, but the sum is never divided."""

import logging
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return F.log_softmax(self.head(torch.tanh(self.body(x))), dim=1)


class DataPartitioner:
    def __init__(self, n, parts):
        order = random.Random(1234).sample(range(n), n)
        self.partitions = torch.tensor(order).chunk(parts)


def average_gradients(model):
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)


def run(rank, size):
    torch.manual_seed(1)
    x = torch.randn(240, 16)
    y = (x @ torch.randn(16, 4)).argmax(1)
    mine = DataPartitioner(len(x), size).partitions[rank]
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(4):
        order = mine[torch.randperm(len(mine), generator=torch.Generator().manual_seed(epoch))]
        total = 0
        for batch in order.split(24):
            optimizer.zero_grad()
            loss = F.nll_loss(model(x[batch]), y[batch])
            total += loss.detach()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        logging.info("Rank %d, epoch %d: loss %.4f of my part", rank, epoch, total.item() / 5)


if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
