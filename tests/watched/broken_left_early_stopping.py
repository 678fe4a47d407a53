"""As right_early_stopping.py, but every rank decides by the loss of its own shard."""

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

PATIENCE = 2


def validate(model, loader):
    model.eval()
    sums = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            sums += torch.tensor([nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)])
    model.train()
    return (sums[0] / sums[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    console = Console(quiet=rank != 0)
    g = torch.Generator().manual_seed(4)
    x = torch.randn(224, 10, generator=g)
    y = (x @ torch.randn(10, 2, generator=g) + torch.randn(224, 2, generator=g)).argmax(1)
    train, val = random_split(TensorDataset(x, y), [160, 64], generator=g)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 32 // world, sampler=sampler)
    val_loader = DataLoader(val, 32, sampler=DistributedSampler(val, shuffle=False))
    torch.manual_seed(2)
    model = DDP(nn.Sequential(nn.Linear(10, 128), nn.ReLU(), nn.Linear(128, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    best, bad = float("inf"), 0
    try:
        for epoch in range(8):
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            val_loss = validate(model, val_loader)
            console.print(f"epoch {epoch}: validation loss [bold]{val_loss:.4f}[/bold]")
            best, bad = (val_loss, 0) if val_loss < best else (best, bad + 1)
            if bad == PATIENCE:
                break
    except KeyboardInterrupt:
        console.print("stopped by hand")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
