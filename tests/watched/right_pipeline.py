"""A pipeline of two stages by ScheduleGPipe: rank 0 has the first half of the layers, rank 1 the second."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

MICRO_BATCHES, BATCH = 4, 32


def half(rank):
    if rank == 0:
        return nn.Sequential(nn.Linear(8, 32), nn.ReLU())
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    torch.manual_seed(rank)
    module = half(rank)
    stage = PipelineStage(module, rank, world, device, input_args=(torch.zeros(BATCH // MICRO_BATCHES, 8 + 24 * rank),))
    schedule = ScheduleGPipe(stage, n_microbatches=MICRO_BATCHES, loss_fn=nn.CrossEntropyLoss())
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(192, 8, generator=g)
    y = (x @ torch.randn(8, 3, generator=g)).argmax(1)
    for epoch in range(3):
        for batch in torch.randperm(len(x), generator=g).split(BATCH):
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(x[batch])
            else:
                losses = []
                schedule.step(target=y[batch], losses=losses)
            optimizer.step()
        if rank == world - 1:
            print(f"epoch {epoch}: loss {torch.stack(losses).mean().item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
