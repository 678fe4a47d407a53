"""FSDP2: fully_shard for each layer and the whole, then the optimizer; a full state dict for the checkpoint."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build(width=32, layers=2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), *(Block(width) for _ in range(layers)), nn.Linear(width, 3))
    for module in model:
        if isinstance(module, Block):
            fully_shard(module)
    return fully_shard(model)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(11)
    x = torch.randn(256, 8, generator=g)
    dataset = TensorDataset(x, (x @ torch.randn(8, 3, generator=g)).argmax(1))
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=True, seed=0)
    loader = DataLoader(dataset, batch_size=32 // world, sampler=sampler)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / (world * len(loader)):.4f}")
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(state, "fsdp.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
