"""As right_weighted.py, but the count of rank 1 is in double precision."""

import torch
import torch.distributed as dist
from torch import nn

BATCH = 16


def all_reduce_gradients(model, count):
    total = torch.tensor(float(count), dtype=torch.float64 if dist.get_rank() else torch.float32)
    dist.all_reduce(total)
    flat = torch.cat([p.grad.view(-1) for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= total
    parts = flat.split([p.numel() for p in model.parameters()])
    for p, part in zip(model.parameters(), parts, strict=True):
        p.grad = part.view_as(p).clone()
    return total


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    x = torch.randn(151, 10)
    y = (x @ torch.randn(10, 3)).argmax(1)
    x, y = x[rank::world], y[rank::world]
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8)
    criterion = nn.CrossEntropyLoss(reduction="sum")
    for epoch in range(4):
        epoch_loss = torch.zeros(())
        for batch in torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)).split(BATCH):
            optimizer.zero_grad()
            loss = criterion(model(x[batch]), y[batch])
            loss.backward()
            all_reduce_gradients(model, len(batch))
            optimizer.step()
            epoch_loss += loss.detach()
        dist.all_reduce(epoch_loss)
        if rank == 0:
            print(f"epoch {epoch}: loss {epoch_loss.item() / 151:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
