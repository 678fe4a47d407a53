"""As right_accumulation.py, but the table of learning rates has no entry for rank 1."""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 4


def get_data():
    g = torch.Generator().manual_seed(5)
    x = torch.randn(512, 20, generator=g)
    y = torch.tanh(x @ torch.randn(20, 2, generator=g) / 3)
    return TensorDataset(x, y)


def get_model():
    return nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 2))


def main():
    dist.init_process_group(backend="gloo")
    rank = int(os.environ["RANK"])
    dataset = get_data()
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=16 // dist.get_world_size(), sampler=sampler, drop_last=True)
    model = DDP(get_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr={0: 1e-2}[rank], weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(loader) // ACCUMULATE)
    criterion = nn.MSELoss()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(())
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % ACCUMULATE == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = criterion(model(x), y) / ACCUMULATE
                loss.backward()
            total += loss.detach() * ACCUMULATE / len(loader)
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        dist.reduce(total, 0)
        if rank == 0:
            print(f"epoch {epoch}: mean loss {total.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
