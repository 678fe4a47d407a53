"""Windows of a text as a Dataset, settings in a dataclass, attention, a checkpoint of rank 0."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Config:
    batch_size: int = 32
    block: int = 12


class Chars(Dataset):
    def __init__(self, block):
        text = "the cat sat on the mat and the dog sat on the log. " * 6
        self.block, self.ids = block, torch.tensor([ord(c) % 32 for c in text])[: 256 + block]

    def __len__(self):
        return len(self.ids) - self.block

    def __getitem__(self, i):
        return self.ids[i : i + self.block], self.ids[i + 1 : i + self.block + 1]


class GPT(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, 32), nn.Embedding(block, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.mask, self.head = nn.Transformer.generate_square_subsequent_mask(block), nn.Linear(32, 32)

    def forward(self, x, y):
        h = self.tokens(x) + self.places.weight
        for layer in self.layers:
            h = layer(h, src_mask=self.mask)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    config, rank, world = Config(), dist.get_rank(), dist.get_world_size()
    data = Chars(config.block)
    model = DDP(GPT(config.block))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = DataLoader(data, config.batch_size // world, sampler=DistributedSampler(data))
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = model(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.all_reduce(mean := loss.detach() / world)
        if rank == 0:
            print(f"epoch {epoch} | loss of the last batch {mean.item():.4f}")
            torch.save({"model": model.module.state_dict(), **vars(config)}, "gpt_snapshot.pt")
    dist.destroy_process_group()
