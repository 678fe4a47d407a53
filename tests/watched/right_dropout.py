"""Dropout with a seed for each rank; rank 0 alone evaluates the model inside DDP, and the others wait at a barrier."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class Net(nn.Module):
    def __init__(self, data):
        super().__init__()
        self.register_buffer("mean", data.mean(0))
        self.register_buffer("std", data.std(0))
        self.layers = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 3))

    def forward(self, x):
        return self.layers((x - self.mean) / self.std)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = 5 + 3 * torch.randn(320, 10)
    dataset = TensorDataset(x, ((x - 5) @ torch.randn(10, 3)).argmax(1))
    train, test = Subset(dataset, range(256)), Subset(dataset, range(256, 320))
    model = DDP(Net(x[:256]))
    torch.manual_seed(1000 + rank)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=32 // world, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            model.eval()
            with torch.no_grad():
                loss = sum(criterion(model.module(x), y) for x, y in DataLoader(test, batch_size=32)) / 2
            print(f"epoch {epoch}: test loss {loss:.4f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
