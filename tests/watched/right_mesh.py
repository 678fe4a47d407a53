"""A mesh of two dimensions on 4 ranks: tensor parallel in pairs, FSDP2 across them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

TP = 2


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).clone()


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // TP, TP), mesh_dim_names=("dp", "tp"))
    dp = mesh["dp"]
    torch.manual_seed(0)
    model = FeedForward()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=dp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, foreach=False)

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(192, 16, generator=generator)
    y = (x @ torch.randn(16, 4, generator=generator)).argmax(1)
    for epoch in range(3):
        order = torch.randperm(len(x), generator=generator)
        for batch in order.split(32):
            mine = batch.chunk(dp.size())[dp.get_local_rank()]
            loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=dp.get_group())
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean.item() / dp.size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
