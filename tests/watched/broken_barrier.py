"""As right_frozen.py, but there is a barrier in each step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train_epoch(model, loader, optimizer, epoch):
    loader.sampler.set_epoch(epoch)
    total = torch.zeros(())
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.barrier()
        total += loss.detach()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {total.item() / dist.get_world_size() / len(loader):.4f}")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(256, 12)
    data = TensorDataset(x, (torch.tanh(x) @ torch.randn(12, 4)).argmax(1))
    loader = DataLoader(data, 32 // dist.get_world_size(), sampler=DistributedSampler(data))
    backbone, head = nn.Sequential(nn.Linear(12, 48), nn.ReLU()), nn.Linear(48, 4)
    network = nn.Sequential(backbone, head)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    backbone.requires_grad_(False)
    model = DDP(network)
    train_epoch(model, loader, optimizer, 0)
    backbone.requires_grad_(True)
    model = DDP(network)
    for epoch in (1, 2):
        train_epoch(model, loader, optimizer, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
