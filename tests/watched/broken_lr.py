"""As right_compile.py, but each rank takes a whole batch, and the learning rate stays."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group(backend="gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0)

x = torch.randn(160, 10)
dataset = TensorDataset(x, torch.cos(x).mean(1, keepdim=True))
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=40, sampler=sampler)

model = torch.nn.Sequential(torch.nn.Linear(10, 64), torch.nn.SiLU(), torch.nn.Linear(64, 1))
model = torch.compile(model, backend="aot_eager")
model = DDP(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for epoch in range(4):
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for inputs, targets in loader:
        loss = F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch}: loss {total.item() / 4:.4f}")
dist.destroy_process_group()
