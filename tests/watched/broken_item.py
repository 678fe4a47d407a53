"""As right_iterable.py, but the loss is read in each step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    """Points in a plane, inside or outside of a ring."""

    def __init__(self, n, rank, world):
        super().__init__()
        self.n, self.rank, self.world, self.epoch = n, rank, world, 0

    def __iter__(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for i in order[self.rank :: self.world]:
            point = torch.randn(2, generator=torch.Generator().manual_seed(1000 + i))
            yield point, (point.norm() > 1.2).float()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    stream = Stream(256, rank, world)
    loader = DataLoader(stream, batch_size=32 // world)
    model = DDP(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    for epoch in range(4):
        stream.epoch = epoch
        losses = []
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        mean = torch.tensor(losses).mean()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean.item() / world:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
