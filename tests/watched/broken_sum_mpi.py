"""As right_mpi4py.py, but the sum is never divided."""

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

torch.set_num_threads(1)
comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()


def average(model):
    for p in model.parameters():
        mine = p.grad.numpy()
        total = np.empty_like(mine)
        comm.Allreduce(mine, total, op=MPI.SUM)
        p.grad = torch.from_numpy(total)


def main():
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((288, 6), dtype=np.float32)
    y = np.abs(x).sum(1, keepdims=True)
    x, y = (torch.from_numpy(np.array_split(a, size)[rank]) for a in (x, y))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 1))
    for p in model.parameters():
        comm.Bcast(p.detach().numpy(), root=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(4):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        losses = []
        for batch in order.split(24):
            loss = nn.functional.mse_loss(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            average(model)
            optimizer.step()
            losses.append(loss.detach())
        mean = comm.allreduce(torch.stack(losses).mean().item()) / size
        if rank == 0:
            print(f"epoch {epoch}: loss {mean:.4f}", flush=True)


main()
