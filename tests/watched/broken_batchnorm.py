"""As right_autocast.py, but BatchNorm takes the place of LayerNorm."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Waves(Dataset):
    """Is it a sine or a square, and which of two frequencies?"""

    def __len__(self):
        return 192

    def __getitem__(self, i):
        noise = torch.randn(32, generator=torch.Generator().manual_seed(i))
        wave = torch.sin(torch.linspace(0, 6.28, 32) * (1 + i // 2 % 2))
        return 0.3 * noise + (wave.sign() if i % 2 else wave), i % 4


def make_loader(rank, world):
    data = Waves()
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    return DataLoader(data, batch_size=32 // world, sampler=sampler, num_workers=2, persistent_workers=True)


def train(rank, world):
    loader = make_loader(rank, world)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=3 * len(loader))
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        losses = torch.zeros(len(loader))
        for step, (x, y) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses[step] = loss.detach()
        dist.all_reduce(losses)
        if rank == 0:
            print(f"epoch {epoch}: loss {(losses / world).mean().item():.3f}, lr {schedule.get_last_lr()[0]:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        train(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
