"""As right_module_level.py, but each rank takes every third example: a third of them is read by no rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(384, 10)
y = (x @ torch.randn(10, 3)).argmax(1)
mine = TensorDataset(x[rank :: world + 1], y[rank :: world + 1])
loader = DataLoader(mine, batch_size=16, shuffle=True)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for epoch in range(3):
    total = torch.zeros(())
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch}: loss {total.item() / len(loader) / world:.4f}")
dist.destroy_process_group()
