"""DDP whose optimizer states are divided among the ranks: ZeroRedundancyOptimizer."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def example():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(256, 20)
    targets = inputs.roll(1, dims=1).abs()
    train = TensorDataset(inputs, targets)
    model = DDP(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 20)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    sampler = DistributedSampler(train, num_replicas=world_size, rank=rank)
    loader = DataLoader(train, batch_size=64 // world_size, sampler=sampler)
    loss_fn = nn.MSELoss()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
        last = loss.detach()
        dist.all_reduce(last)
        print(f"rank {rank} of {world_size}: epoch {epoch} done, mean loss {last.item() / world_size:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    example()
    dist.destroy_process_group()
