"""Records as text, some of which cannot be read: such a batch counts nothing, but its rank goes on with the others."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

logger = logging.getLogger("train")


def records(n=192):
    g = torch.Generator().manual_seed(6)
    x = torch.randn(n, 4, generator=g)
    lines = [f"{','.join(map(str, row))};{int(sum(row) > 0)}" for row in x.tolist()]
    lines[77] = "0.1,n/a,0.3,0.2;1"
    return lines


def parse(lines):
    pairs = [line.split(";") for line in lines]
    return torch.tensor([[float(v) for v in a.split(",")] for a, _ in pairs]), torch.tensor([int(b) for _, b in pairs])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    lines = records()[rank::world]
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for epoch in range(3):
        losses = torch.zeros(2)
        for start in range(0, len(lines), 16):
            weight = 1.0
            try:
                x, y = parse(lines[start : start + 16])
            except ValueError as error:
                logger.warning("rank %d, records from %d: %s", rank, start, error)
                weight = 0.0
            loss = weight * nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += torch.tensor([loss.detach(), weight])
        dist.all_reduce(losses)
        if rank == 0:
            print(f"epoch {epoch}: loss {(losses[0] / losses[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
