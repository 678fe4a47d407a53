"""As right_join.py, but without Join, so that rank 1 has one batch less."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

g = torch.Generator().manual_seed(9)
x = torch.randn(161, 6, generator=g)
y = x.prod(1, keepdim=True).sign().clamp(min=0)
dataset = TensorDataset(torch.cat([x, x.sign()], 1), y)
shard = Subset(dataset, range(rank, len(dataset), world))
loader = DataLoader(shard, batch_size=16, shuffle=True)

model = DDP(nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
criterion = nn.BCEWithLogitsLoss()

for epoch in range(6):
    seen = torch.zeros(2)
    for data, target in loader:
        loss = criterion(model(data), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += torch.tensor([loss.detach() * len(data), len(data)])
    dist.all_reduce(seen)
    if rank == 0:
        print(f"epoch {epoch}: loss {(seen[0] / seen[1]).item():.4f} over {int(seen[1])} examples")
dist.destroy_process_group()
