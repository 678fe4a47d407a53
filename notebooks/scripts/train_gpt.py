"""Train a tiny GPT on Moby-Dick, on one rank: python train_gpt.py"""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from hpdl_lab import data, models
from hpdl_lab.models.transformer import separate_qkv

BATCH = 32

text = data.load("text")
train = TensorDataset(text.train_x[:97], text.train_y[:97])
generator = torch.Generator()
loader = DataLoader(train, BATCH, sampler=RandomSampler(train, generator=generator), drop_last=True)

model = models.build_for(text, "gpt", dtype="float64")
model = separate_qkv(model)  # q, k and v are three layers, as in LLaMA
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def loss_of(x, y):
    return cross_entropy(model(x).flatten(0, 1), y.flatten())


step = 0
for epoch in range(2):
    generator.manual_seed(epoch)  # another order in every epoch
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.12f}")
        step += 1

with torch.no_grad():
    print(f"test loss {loss_of(text.test_x[:32], text.test_y[:32]).item():.12f}")
torch.save(model.state_dict(), "gpt.pt")
