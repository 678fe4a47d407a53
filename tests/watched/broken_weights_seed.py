"""As right_flat_gradients.py, but nobody takes the weights of rank 0."""

import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

BATCH, LR = 40, 0.05


def flat_all_reduce(model):
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    start = 0
    for p in model.parameters():
        p.grad.copy_(flat[start : start + p.numel()].view_as(p))
        start += p.numel()


def broadcast_weights(model):
    vector = parameters_to_vector(model.parameters()).detach()
    dist.broadcast(vector, src=0)
    vector_to_parameters(vector, model.parameters())


def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    x = torch.from_numpy(np.random.default_rng(3).normal(size=(320, 6)).astype("float32"))
    y = torch.sin(x.sum(1, keepdim=True))

    torch.manual_seed(100 + rank)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)

    for epoch in range(3):
        order = np.random.default_rng(epoch).permutation(len(x))
        losses = []
        for start in range(0, len(x), BATCH):
            mine = order[start : start + BATCH][rank::world]
            loss = ((model(x[mine]) - y[mine]) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            flat_all_reduce(model)
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean:.4f}")
    dist.destroy_process_group()


main()
